"""Configure torch's memory allocators before torch is imported; record the GPU memory outside of them.

A run measures the memory outside of the allocator (CUDA context, NCCL). Plans for the same GPUs on this machine use it.
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

CHECK_BYTES = 64 * 2**20  # several pages of an expandable segment

OUTSIDE_FILE = "outside_allocator.json"  # in the cache folder


def configure() -> None:
    """Enable expandable segments unless the user configured the allocator, and pin blocks above 256 MiB unrounded.

    Rows of different lengths fragment the default segments. CPU offload pins blocks of several GiB (DeepSpeed's fp32
    weights, gradients and 16-bit buffers), which torch rounds up to a power of two
    (aten/src/ATen/core/CachingHostAllocator.h): this can double the host memory of a job.
    """
    name = next((name for name in VARIABLES if os.environ.get(name)), None)
    if name is None and default():
        os.environ[VARIABLES[0]] = default()
    elif name and _has_threshold() and PINNED_ROUND_KEY not in os.environ[name]:
        os.environ[name] = f"{os.environ[name]},{_pinned()}"


def default(expandable: bool = True) -> str:
    """Return the allocator settings that `configure` applies unless the user configured the allocator.

    Args: expandable: False if the GPU's driver rejects expandable segments.
    """
    return ",".join([f"{EXPANDABLE_KEY}:{expandable}"] * _has_expandable() + [_pinned()] * _has_threshold())


def check_expandable_segments() -> str | None:
    """Allocate on this rank's GPU, and fall back to torch's default segments if its driver rejects expandable ones.

    Returns: the decision to print; None if the user configured the allocator.
    """
    if os.environ.get(VARIABLES[0]) != default() or not expandable_segments():
        return None
    import torch

    try:
        _allocate()
        return f"{EXPANDABLE_KEY} True: less fragmentation by uneven rows (disable: {disabling_setting()})"
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        os.environ[VARIABLES[0]] = default(expandable=False)
        torch.cuda.memory._set_allocator_settings(os.environ[VARIABLES[0]])
        _allocate()
        return f"{EXPANDABLE_KEY} False: the driver rejects them ({first_line(error)})"


def disabling_setting() -> str:
    """Return the assignment that disables expandable segments."""
    return f"{VARIABLES[0]}={EXPANDABLE_KEY}:False"


def _allocate() -> None:
    import torch

    torch.empty(CHECK_BYTES, dtype=torch.uint8, device="cuda").fill_(1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def pinned_bytes(size: int) -> int:
    """Return the bytes of host memory that a pinned block of `size` bytes takes in this process."""
    threshold = _threshold_bytes()
    if size == 0 or (threshold is not None and size > threshold):
        return size
    return 1 << (size - 1).bit_length()


def expandable_segments() -> bool:
    """Return whether the environment enables the CUDA allocator's expandable segments."""
    settings = ",".join(os.environ.get(name, "") for name in VARIABLES)
    return f"{EXPANDABLE_KEY}:true" in settings.replace(" ", "").lower()


def record_outside_bytes(device_name: str, ranks: int, node: int, size: int) -> None:
    """Record the bytes that a run measured outside of torch's allocator, if the cache folder is writable.

    The smallest measurement of all runs is kept: others may include other programs on the GPU.

    Args: device_name: as torch.cuda reports it; node: GPUs per node.
    """
    key, kept = _key(device_name, ranks, node), _outside()
    if size < kept.get(key, size + 1):
        with contextlib.suppress(OSError):
            paths.cache_root().mkdir(parents=True, exist_ok=True)
            paths.write_text(paths.cache_root() / OUTSIDE_FILE, json.dumps(kept | {key: size}, indent=1) + "\n")


def recorded_outside_bytes(device_name: str, ranks: int, node: int) -> int | None:
    """Return the bytes outside of torch's allocator that runs measured on these GPUs; None without a run."""
    return _outside().get(_key(device_name, ranks, node))


def _outside() -> dict[str, int]:
    """Return {GPUs and torch version: bytes}; {} if the file cannot be read."""
    try:
        kept = json.loads((paths.cache_root() / OUTSIDE_FILE).read_text(encoding="utf-8"))
        return {key: size for key, size in kept.items() if type(size) is int and size >= 0}
    except (OSError, ValueError, AttributeError):
        return {}


def _key(device_name: str, ranks: int, node: int) -> str:
    return f"{ranks} x {device_name}, {min(node, ranks)} a node, torch {metadata.version('torch')}"


def _pinned() -> str:
    return f"{PINNED_ROUND_KEY}:{PINNED_ROUND_MIB}"


def _has_expandable() -> bool:
    """Return whether torch supports expandable segments here. WSL2's driver fails (pytorch issue 192330)."""
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
