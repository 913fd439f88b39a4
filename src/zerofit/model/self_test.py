"""Run self-tests of techniques on each rank's device before the model is loaded, and store their results."""

import contextlib
import gc
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from zerofit.base import distributed
from zerofit.base.errors import UserError, first_line
from zerofit.base.paths import cache_root


def run(compare: Callable[[], str | None], flag: str, fix: str) -> str | None:
    """Run a comparison; return the failure of any rank, the same on all ranks, or None. Collective.

    GPU memory that it used is released, and the peak is reset.
    Args: compare: returns a failure or None; flag: the tested setting; fix: how to avoid it.
    Raises: UserError if the GPU is unusable afterwards.
    """
    try:
        failure = compare()
    except Exception as error:
        failure = f"it raised an error ({first_line(error)})"
    if torch.cuda.is_initialized():
        gc.collect()
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:  # further CUDA calls of this process fail too
            raise UserError(f"{flag}: failed on this GPU ({first_line(error)}); {fix}.") from error
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return next(filter(None, distributed.all_gather(failure)), None)


def result_file(kind: str, *conditions) -> Path:
    """Return the file that marks a passed self-test on this machine. conditions: all values the result depends on."""
    return cache_root() / kind / hashlib.sha256("\n".join(map(str, conditions)).encode()).hexdigest()[:24]


def store_result(files: list[Path], passed: bool) -> None:
    """Create the first of the result files if the self-test passed; delete all of them if it failed."""
    with contextlib.suppress(OSError):  # without the file a plan does not count on the technique
        if passed:
            files[0].parent.mkdir(parents=True, exist_ok=True)
            files[0].touch()
        else:
            for file in files:
                file.unlink(missing_ok=True)
