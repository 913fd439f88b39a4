"""Prove on this rank's device, before the model is loaded, that a technique computes what it should."""

import contextlib
import gc
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from zerofit.base import distributed
from zerofit.base.errors import UserError, first_line
from zerofit.base.paths import cache_root


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


def file(kind: str, *known) -> Path:
    """Return the file on this machine that stands for a proof. known: all that the proof depends on."""
    return cache_root() / kind / hashlib.sha256("\n".join(map(str, known)).encode()).hexdigest()[:24]


def remember(files: list[Path], holds: bool) -> None:
    """Keep that a proof holds, by the first of its files; else forget it, by all of them."""
    with contextlib.suppress(OSError):  # without the file a plan counts what runs without the technique
        if holds:
            files[0].parent.mkdir(parents=True, exist_ok=True)
            files[0].touch()
        else:
            for one in files:
                one.unlink(missing_ok=True)
