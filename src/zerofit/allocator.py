"""Configure torch's memory allocators before torch is imported; compute the size of pinned blocks."""

import os
from importlib import metadata

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is torch's older name, still read

PINNED_ROUND_KEY = "pinned_max_round_threshold_mb"  # torch 2.13 and newer

PINNED_ROUND_MIB = 256


def configure() -> None:
    """Make torch pin blocks above 256 MiB at their exact size, unless the user has set a threshold.

    CPU offload pins blocks of several GiB (DeepSpeed's fp32 weights, gradients and 16-bit buffers). torch rounds each
    up to a power of two (aten/src/ATen/core/CachingHostAllocator.h), which can double the host memory of a job.
    """
    if not _has_threshold():
        return
    name = next((name for name in VARIABLES if os.environ.get(name)), VARIABLES[0])
    settings = os.environ.get(name, "")
    if PINNED_ROUND_KEY not in settings:
        os.environ[name] = f"{settings},{default()}".lstrip(",")


def default() -> str:
    """Return the allocator setting that `configure` adds to the environment."""
    return f"{PINNED_ROUND_KEY}:{PINNED_ROUND_MIB}"


def pinned_bytes(size: int) -> int:
    """Return the bytes of host memory that a pinned block of `size` bytes takes in this process."""
    threshold = _threshold_bytes()
    if size == 0 or (threshold is not None and size > threshold):
        return size
    return 1 << (size - 1).bit_length()


def expandable_segments() -> bool:
    """Return whether the environment turns on the CUDA allocator's expandable segments."""
    settings = ",".join(os.environ.get(name, "") for name in VARIABLES)
    return "expandable_segments:true" in settings.replace(" ", "").lower()


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
