"""Configure torch's memory allocators before torch is imported; keep what a GPU holds outside of them.

A run measures what its GPU holds outside (CUDA context, NCCL). Plans for the same GPUs on this machine count with it.
"""

import contextlib
import json
import os
import platform
import sys
from importlib import metadata

from zerofit.base import paths
from zerofit.base.errors import first_line

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is torch's older name, still read

PINNED_ROUND_KEY = "pinned_max_round_threshold_mb"  # torch 2.13 and newer

PINNED_ROUND_MIB = 256

EXPANDABLE_KEY = "expandable_segments"

PROOF_BYTES = 64 * 2**20  # several pages of an expandable segment

OUTSIDE = "outside_allocator.json"  # in the cache folder


def configure() -> None:
    """Set expandable segments unless the user has set the allocator, and pin blocks above 256 MiB at their exact size.

    Rows of different lengths leave the usual segments with holes that longer rows cannot use. CPU offload pins blocks
    of several GiB (DeepSpeed's fp32 weights, gradients and 16-bit buffers), which torch rounds up to a power of two
    (aten/src/ATen/core/CachingHostAllocator.h): that can double the host memory of a job.
    """
    name = next((name for name in VARIABLES if os.environ.get(name)), None)
    if name is None and default():
        os.environ[VARIABLES[0]] = default()
    elif name and _has_threshold() and PINNED_ROUND_KEY not in os.environ[name]:
        os.environ[name] = f"{os.environ[name]},{_pinned()}"


def default(expandable: bool = True) -> str:
    """Return the allocator settings that `configure` sets where the user has set none.

    Args: expandable: False: those of a GPU whose driver refuses expandable segments.
    """
    return ",".join([f"{EXPANDABLE_KEY}:{expandable}"] * _has_expandable() + [_pinned()] * _has_threshold())


def prove_expandable() -> str | None:
    """Allocate on this rank's GPU, and go back to torch's usual segments where its driver refuses expandable ones.

    Returns: the sentence to say of the kit's setting; None where the setting is the user's.
    """
    if os.environ.get(VARIABLES[0]) != default() or not expandable_segments():
        return None
    import torch

    try:
        _allocate()
        return f"{EXPANDABLE_KEY} True: rows of different lengths leave less memory unused (off: {off()})"
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        os.environ[VARIABLES[0]] = default(expandable=False)
        torch.cuda.memory._set_allocator_settings(os.environ[VARIABLES[0]])
        _allocate()
        return f"{EXPANDABLE_KEY} False: the driver refuses them ({first_line(error)})"


def off() -> str:
    """Return the assignment that turns expandable segments off."""
    return f"{VARIABLES[0]}={EXPANDABLE_KEY}:False"


def _allocate() -> None:
    import torch

    torch.empty(PROOF_BYTES, dtype=torch.uint8, device="cuda").fill_(1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def pinned_bytes(size: int) -> int:
    """Return the bytes of host memory that a pinned block of `size` bytes takes in this process."""
    threshold = _threshold_bytes()
    if size == 0 or (threshold is not None and size > threshold):
        return size
    return 1 << (size - 1).bit_length()


def expandable_segments() -> bool:
    """Return whether the environment turns on the CUDA allocator's expandable segments."""
    settings = ",".join(os.environ.get(name, "") for name in VARIABLES)
    return f"{EXPANDABLE_KEY}:true" in settings.replace(" ", "").lower()


def keep_outside(device_name: str, ranks: int, node: int, size: int) -> None:
    """Keep the bytes that a run measured outside of torch's allocator, as far as the cache folder can be written.

    The smallest of all runs is kept: other programs on the GPU are in a figure (plan/gpu_memory.py leaves such out).

    Args: device_name: torch.cuda's; node: GPUs of a node.
    """
    key, kept = _key(device_name, ranks, node), _outside()
    if size < kept.get(key, size + 1):
        with contextlib.suppress(OSError):
            paths.cache_root().mkdir(parents=True, exist_ok=True)
            paths.write_text(paths.cache_root() / OUTSIDE, json.dumps(kept | {key: size}, indent=1) + "\n")


def kept_outside(device_name: str, ranks: int, node: int) -> int | None:
    """Return the bytes outside of torch's allocator that runs here measured on these GPUs; None: there was no run."""
    return _outside().get(_key(device_name, ranks, node))


def _outside() -> dict[str, int]:
    """Return {GPUs and version of torch: bytes}, {} where the file cannot be read."""
    try:
        kept = json.loads((paths.cache_root() / OUTSIDE).read_text(encoding="utf-8"))
        return {key: size for key, size in kept.items() if type(size) is int and size >= 0}
    except (OSError, ValueError, AttributeError):
        return {}


def _key(device_name: str, ranks: int, node: int) -> str:
    return f"{ranks} x {device_name}, {min(node, ranks)} a node, torch {metadata.version('torch')}"


def _pinned() -> str:
    return f"{PINNED_ROUND_KEY}:{PINNED_ROUND_MIB}"


def _has_expandable() -> bool:
    """Return whether torch has expandable segments here: not under WSL2, whose driver fails (pytorch issue 192330)."""
    return sys.platform == "linux" and "microsoft" not in platform.release().lower()


def _has_threshold() -> bool:
    return tuple(int(part) for part in metadata.version("torch").split("+")[0].split(".")[:2]) >= (2, 13)


def _threshold_bytes() -> int | None:
    """Return the size in bytes above which pinned blocks are not rounded up; None if all are."""
    for name in VARIABLES:
        for entry in os.environ.get(name, "").split(","):
            key, _, value = entry.partition(":")
            if key.strip() == PINNED_ROUND_KEY and value.strip().isdigit():
                return int(value) * 2**20
    return None
