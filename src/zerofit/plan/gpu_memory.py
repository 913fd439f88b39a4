"""Estimate how much GPU memory is available for tensors, and the overhead of torch's allocator."""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

from zerofit.base import allocator
from zerofit.base.hardware import GIB, MAX_IDLE_BYTES, Gpu

GPUS_PER_NODE = 8

# CUDA context, kernels and libraries of a process, in GiB: "non-PyTorch memory" in torch's out-of-memory messages, for
# the T4 process memory minus reserved memory. Every message is in benchmarks/published/contexts.csv.
CONTEXT_GIB = {
    "T4": 0.15,
    "L4": 0.25,
    "A10G": 0.65,
    "A100": 0.5,
    "L40S": 0.5,
    "L40": 0.5,
    "RTX 4090": 0.5,
    "RTX 6000 Ada": 0.5,
    "RTX 3090": 0.5,
    "RTX 5090": 0.6,
}

UNKNOWN_CONTEXT_GIB = 0.6  # for GPUs without a published message

# NCCL's channels and buffers, in GiB: the same messages of jobs on several GPUs, minus the context. It is 0.6 to 0.9 on
# four and five GPUs of a node, and 1.5 on 48 GPUs of six nodes.
NCCL_GIB = {"within a node": 0.8, "across nodes": 1.5}

# Additional GiB of NCCL if NVLink's switches reduce (NVLS), with DeepSpeed's copy of the world group as a second
# communicator. This is an estimate for 8 x H100, where a total of 1.5 to 2.5 is usual; no message has been published.
# A run measures it for later plans on the same machine.
NVLS_GIB = 1.2
WITH_NVLS = ("H100", "H200", "H800", "H20", "B200", "B300")
WITHOUT_SWITCHES = ("PCIe", "NVL")  # names of cards that PCIe or a bridge of two or four links

# cuBLAS allocates a workspace for each of two handles (main thread and autograd) from torch's allocator
# (aten/src/ATen/cuda/CublasHandlePool.cpp): 32 MiB since Hopper, else 8 MiB and 128 KiB. cuBLASLt's is 1 MiB.
WORKSPACE_BYTES = {"Hopper": 2 * 32 * 2**20, "older": 2 * (8 * 2**20 + 128 * 2**10)}

SINCE_HOPPER = (
    *WITH_NVLS, "GH200", "GB200", "GB300", "RTX PRO 6000", "RTX 5060", "RTX 5070", "RTX 5080", "RTX 5090",
)  # fmt: skip

FRAGMENTATION = 0.03  # share of the allocated bytes lost to fragmentation if the allocator is not simulated

# Added to the simulated bytes of recomputed compiled layers: a graph releases its saved tensors only at its end.
# Measured on a CPU: up to 11 % (docs/speed.md, tests/model/test_compiled.py); without recomputation it is less.
COMPILED_MARGIN = 0.12
# Share of a GPU's memory: the largest error of allocated bytes in benchmarks/published for fully specified jobs.
MARGIN = 0.01

# Memory that rows of different lengths can reserve without expandable segments, relative to rows of equal length: the
# maximum of 12 published jobs (swift-* in benchmarks/published/points.csv).
UNEQUAL_ROWS = 1.9

MARGINS = Path(__file__).with_name("margins.json")  # written by benchmarks/published.py --margins


@dataclass(frozen=True)
class Margin:
    """The bytes that jobs need, relative to their closed form."""

    low: float  # 19 of 20 jobs need more
    high: float  # 19 of 20 jobs need less
    reserved: float  # median of the bytes that torch's allocator reserves on a larger GPU


@functools.cache
def _margins() -> dict[str, dict]:
    return json.loads(MARGINS.read_text(encoding="utf-8"))["kinds"]


def margin(zero: int) -> Margin:
    """Return the measured margin of the closed forms for the segments of torch's allocator and this stage."""
    segments = "expandable" if allocator.expandable_segments() else "usual"
    kind = _margins()[f"{segments} segments, {'stage 3' if zero == 3 else 'below stage 3'}"]
    return Margin(kind["low"], kind["high"], kind["reserved"])


def workspace_bytes(gpu: Gpu | None) -> int:
    """Return the bytes of cuBLAS's workspaces on this GPU; 0 on a CPU."""
    if gpu is None:
        return 0
    return WORKSPACE_BYTES["Hopper" if _is_one_of(gpu, SINCE_HOPPER) else "older"]


def context_bytes(gpu: Gpu) -> int:
    """Return the bytes of the CUDA context on this GPU."""
    return int(next((size for name, size in CONTEXT_GIB.items() if _is_one_of(gpu, [name])), UNKNOWN_CONTEXT_GIB) * GIB)


def nccl_bytes(ranks: int, node: int = GPUS_PER_NODE, gpu: Gpu | None = None) -> int:
    """Return the bytes of NCCL's buffers on each GPU. node: GPUs per node; gpu: None: without NVLS."""
    if ranks == 1:
        return 0
    has_switches = gpu is not None and _is_one_of(gpu, WITH_NVLS) and not _is_one_of(gpu, WITHOUT_SWITCHES)
    switches = has_switches and min(ranks, node) > 4
    return int((NCCL_GIB["within a node" if ranks <= node else "across nodes"] + NVLS_GIB * switches) * GIB)


def _is_one_of(gpu: Gpu, names) -> bool:
    """Return whether the GPU's device name has one of these names as separate words: A10G does not match A10."""
    return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", gpu.device_name) for name in names)


def outside_allocator(gpu: Gpu, ranks: int, node: int = GPUS_PER_NODE) -> dict[str, int]:
    """Return {reason: bytes} of the GPU memory outside torch's allocator. node: GPUs per node.

    After a run on this machine, its measurement replaces the estimates for GPUs of this machine (--gpu_type detect). A
    measurement that includes other programs is ignored: a plan subtracts their memory separately.
    """
    parts = {"CUDA context": context_bytes(gpu), "NCCL buffers": nccl_bytes(ranks, node, gpu)}
    size = allocator.recorded_outside_bytes(gpu.device_name, ranks, node)
    if size is not None and size - sum(parts.values()) < MAX_IDLE_BYTES:
        return {"CUDA context and NCCL, measured by a run here": size}
    return parts


def allocator_capacity(gpu: Gpu, ranks: int) -> int:
    """Return the bytes of a GPU that torch's allocator can use for tensors."""
    return int(gpu.memory_gib * GIB) - sum(outside_allocator(gpu, ranks).values()) - workspace_bytes(gpu)


def allocator_overhead(answer: dict | None, allocated: int) -> dict[str, int]:
    """Return the bytes that torch's allocator reserves above the allocated peak.

    Args: answer: a simulation's; None: the margin of the closed form includes these bytes.
    Returns: {"reserved": on the planned GPU, "least": on a full GPU, which returns unused segments}.
    """
    if answer is None:
        return {"reserved": 0, "least": 0}
    replayed = answer.get("allocator")
    if not replayed:
        return dict.fromkeys(("reserved", "least"), int(FRAGMENTATION * allocated))
    return {name: replayed[name] - replayed["allocated"] for name in ("reserved", "least")}
