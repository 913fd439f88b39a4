"""Prove on this rank's device, before the model is loaded, that a technique computes what it should."""

import gc
from collections.abc import Callable

import torch

from zerofit.base import distributed
from zerofit.base.errors import UserError, first_line


def problem(find: Callable[[], str | None], flag: str, fix: str) -> str | None:
    """Return what `find` finds wrong on any rank, the same on all; None if nothing is. Collective.

    The memory that it took on a GPU is released, whose peak counts from here.
    Args: flag: what is proven; fix: what to do without it.
    Raises: UserError if the GPU computes nothing more.
    """
    try:
        of_this_rank = find()
    except Exception as error:
        of_this_rank = f"it failed here ({first_line(error)})"
    if torch.cuda.is_initialized():
        gc.collect()
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:  # no CUDA call of this process works any more
            raise UserError(f"{flag}: failed on this GPU ({first_line(error)}); {fix}.") from error
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return next(filter(None, distributed.all_gather(of_this_rank)), None)
