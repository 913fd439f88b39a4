"""Measure time and memory of one operation, forward and backward."""

import time

import torch
from allocations import Allocations


def time_and_peak(run, device: str) -> tuple[float, int]:
    """Return (seconds, peak bytes above those before) of `run()`: the allocator's on CUDA, tensor bytes on a CPU."""
    if device == "cpu":
        with Allocations() as made:  # counting costs time, so another run is timed
            run()
        started = time.perf_counter()
        run()
        return time.perf_counter() - started, made.peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, started = torch.cuda.memory_allocated(), time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started, torch.cuda.max_memory_allocated() - before
