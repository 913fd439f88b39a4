"""Say how much of a GPU's memory is left for tensors, and what torch's allocator holds beyond them."""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

from zerofit.base import allocator
from zerofit.base.hardware import GIB, NOBODY_ELSE_BYTES, Gpu

GPUS_OF_A_NODE = 8

# CUDA context, kernels and libraries of one process, in GiB: what torch's out-of-memory messages call "non-PyTorch
# memory", and for the T4 process memory minus reserved. Every message is in benchmarks/published/contexts.csv.
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

UNKNOWN_CONTEXT_GIB = 0.6  # of a GPU for which no message was found

# NCCL's channels and buffers: the same messages of jobs on several GPUs, minus the context. Four and five GPUs of one
# node 0.6 to 0.9, 48 GPUs on six nodes 1.5.
NCCL_GIB = {"within a node": 0.8, "across nodes": 1.5}

# More of it where NVLink's switches add (NVLS) and DeepSpeed's copy of the world is a second communicator. A guess for
# 8 x H100, where 1.5 to 2.5 in all are usual: no message is known. A run measures it, for plans of its machine's GPUs.
NVLS_GIB = 1.2

WITH_NVLS = ("H100", "H200", "H800", "H20", "B200", "B300")

WITHOUT_SWITCHES = ("PCIe", "NVL")  # cards of these names, linked by PCIe or by a bridge of two or four

# cuBLAS has a workspace for each of two handles (the main thread's and autograd's), counted by the allocator:
# aten/src/ATen/cuda/CublasHandlePool.cpp, 32 MiB from Hopper on, else 8 MiB and 128 KiB. cuBLASLt's is 1 MiB.
WORKSPACE_BYTES = {"Hopper": 2 * 32 * 2**20, "older": 2 * (8 * 2**20 + 128 * 2**10)}

SINCE_HOPPER = (
    *WITH_NVLS, "GH200", "GB200", "GB300", "RTX PRO 6000", "RTX 5060", "RTX 5070", "RTX 5080", "RTX 5090",
)  # fmt: skip

FRAGMENTATION = 0.03  # of the allocated bytes: what the allocator loses to fragmentation where it is not simulated

# Added to the simulated bytes of compiled layers that are recomputed: a graph releases what it keeps at its end only.
# Measured on a CPU: up to 11 % (docs/kernels.md, tests/model/test_compiled.py); without recomputation they keep less.
COMPILED_MARGIN = 0.12

MARGIN = 0.01  # of a GPU's memory: the largest error of allocated bytes in benchmarks/published, where all is stated


# Times the memory of equal rows that rows of different lengths can hold where the allocator's segments do not expand:
# the most of 12 published jobs (swift-* in benchmarks/published/points.csv).
UNEQUAL_ROWS = 1.9


MARGINS = Path(__file__).with_name("margins.json")  # written by benchmarks/published.py --margins


@dataclass(frozen=True)
class Margin:
    """How many times the bytes of their closed form jobs need."""

    low: float  # nineteen of twenty need more
    high: float  # nineteen of twenty need less
    reserved: float  # what torch's allocator holds on a GPU with room, in the median


@functools.cache
def _margins() -> dict[str, Margin]:
    known = json.loads(MARGINS.read_text(encoding="utf-8"))["kinds"]
    return {kind: Margin(entry["low"], entry["high"], entry["reserved"]) for kind, entry in known.items()}


def margin(zero: int) -> Margin:
    """Return the measured margin of the closed forms, by the segments of torch's allocator and the stage."""
    segments = "expandable" if allocator.expandable_segments() else "usual"
    return _margins()[f"{segments} segments, {'stage 3' if zero == 3 else 'below stage 3'}"]


def workspace_bytes(gpu: Gpu | None) -> int:
    """Return the bytes of cuBLAS's workspaces on this GPU; 0 on a CPU."""
    if gpu is None:
        return 0
    return WORKSPACE_BYTES["Hopper" if _is_one_of(gpu, SINCE_HOPPER) else "older"]


def context_bytes(gpu: Gpu) -> int:
    """Return the bytes of the CUDA context on this GPU."""
    return int(next((size for name, size in CONTEXT_GIB.items() if _is_one_of(gpu, [name])), UNKNOWN_CONTEXT_GIB) * GIB)


def nccl_bytes(ranks: int, node: int = GPUS_OF_A_NODE, gpu: Gpu | None = None) -> int:
    """Return the bytes of NCCL's buffers on each GPU. node: GPUs of a node; gpu: None: one without NVLS."""
    if ranks == 1:
        return 0
    has_switches = gpu is not None and _is_one_of(gpu, WITH_NVLS) and not _is_one_of(gpu, WITHOUT_SWITCHES)
    switches = has_switches and min(ranks, node) > 4
    return int((NCCL_GIB["within a node" if ranks <= node else "across nodes"] + NVLS_GIB * switches) * GIB)


def _is_one_of(gpu: Gpu, names) -> bool:
    """Return whether the GPU's device name has one of these names as whole words: A10G is no A10."""
    return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", gpu.device_name) for name in names)


def outside_allocator(gpu: Gpu, ranks: int, node: int = GPUS_OF_A_NODE) -> dict[str, int]:
    """Return {reason: bytes} of the GPU memory outside torch's allocator. node: GPUs of a node.

    For a GPU of this machine (--gpu_type detect) it is what a run here measured, once there was one. A run beside other
    programs has measured theirs too, which come and go, and which a plan takes from the GPU's memory by itself.
    """
    parts = {"CUDA context": context_bytes(gpu), "NCCL buffers": nccl_bytes(ranks, node, gpu)}
    size = allocator.kept_outside(gpu.device_name, ranks, node)
    if size is not None and size - sum(parts.values()) < NOBODY_ELSE_BYTES:
        return {"CUDA context and NCCL, measured by a run here": size}
    return parts


def room(gpu: Gpu, ranks: int) -> int:
    """Return the bytes of a GPU that torch's allocator can hold."""
    return int(gpu.memory_gib * GIB) - sum(outside_allocator(gpu, ranks).values()) - workspace_bytes(gpu)


def beyond_allocated(answer: dict | None, allocated: int) -> dict[str, int]:
    """Return the bytes that torch's allocator holds above the allocated peak.

    Args: answer: of a simulation, None: there is none, and the closed form's margin has them.
    Returns: {"reserved": on the planned GPU, "least": on a full one, where it returns unused segments}.
    """
    if answer is None:
        return {"reserved": 0, "least": 0}
    replayed = answer.get("allocator")
    if not replayed:
        return dict.fromkeys(("reserved", "least"), int(FRAGMENTATION * allocated))
    return {name: replayed[name] - replayed["allocated"] for name in ("reserved", "least")}
