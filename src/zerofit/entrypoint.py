"""Run a program and turn its expected errors into one sentence on stderr and an exit code."""

import contextlib
import errno
import gc
import os
import sys
import time

from zerofit.base import distributed, process, rank_status
from zerofit.base.errors import (
    EXIT_CODES,
    DiskFull,
    OutOfMemory,
    Stopped,
    UserError,
    failed_allocation,
    full_disk,
    printable,
    shortened,
)
from zerofit.job import job, run_folder, run_lock
from zerofit.job.recipe import Recipe


def check_early(recipe: Recipe) -> None:
    """Check a recipe's command line, and set the variables that torch reads at import.

    `--help` prints the flags and exits. Garbage collections, a fifth of the imports' processor time, are off until
    `recipe.parse`.
    """
    process.begin()
    os.environ.update(distributed.thread_waiting())
    if not job.file_argument(sys.argv[1:]):  # else the launcher has checked it
        from zerofit.config import early_check

        chooses_folder = distributed.rank() == 0 and not distributed.may_be_restart()  # else checkpoint/restart.py does
        guard(lambda: early_check.check(recipe, sys.argv[1:], here=True, own_folder=chooses_folder))
    gc.disable()


def guard(main) -> None:
    """Run `main()` and turn a `UserError` into one sentence on stderr and its exit code.

    All ranks raise a user's mistake; the first of each node prints it, and its exit ends the other ranks.
    """
    process.begin()
    with contextlib.suppress(AttributeError, OSError):  # not one of Python's streams, or replaced in a fork
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: names and data may not be encodable
    is_printed = False  # the next command
    try:
        _explain_full_disk(lambda: _explain_out_of_memory(main))
        distributed.stop()
    except UserError as error:
        is_printed = isinstance(error, Stopped)
        rank_status.record(error)
        sys.stdout.flush()
        if isinstance(error, Stopped) and os.environ.get("RANK", "0") != "0":
            distributed.stop(wait=False)
            raise SystemExit(error.exit_code) from None
        if not distributed.first_of_node() and not (rank_status.folder() and isinstance(error, OutOfMemory | DiskFull)):
            # The first rank raises and prints the same error; if it is still busy after 10 s, this rank prints it.
            time.sleep(10)
        # An error from a data loading process starts with its traceback.
        prefix = "zerofit" if isinstance(error, Stopped) else "zerofit: error"
        message = shortened(str(error).rpartition("UserError: ")[2].strip())
        print(f"{prefix}: {printable(message)}", file=sys.stderr, flush=True)
        distributed.stop(wait=False)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt as error:
        is_printed = True
        rank_status.record(error)
        if not rank_status.folder():  # else the supervisor prints it once for all ranks
            print(f"zerofit: {str(error) or _interrupted()}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODES["interrupted"]) from None
    except Exception as error:
        rank_status.record(error)
        if rank_status.folder() and rank_status.caused_by_peer(error):  # the supervisor reports the lost rank
            raise SystemExit(1) from None
        raise
    finally:
        report(is_printed)
        run_lock.release()


def report(is_printed: bool = False) -> None:
    """Write report.html if this process has trained without a supervisor, which would write it.

    Args: is_printed: the next command is already printed.
    """
    if (folder := run_folder.opened()) and not rank_status.folder():
        from zerofit.report import run_page

        run_page.write(folder, is_printed)


def _interrupted() -> str:
    """Return the message for a Ctrl-C outside the training loop."""
    if not (folders := run_lock.held()):
        return "interrupted"
    from zerofit.checkpoint import resumable

    return resumable.how_to_continue("interrupted", folders[0], None)


def _explain_full_disk(main) -> None:
    """Run `main()`; raise DiskFull for a full disk and UserError for a file name that is too long.

    train/run.py handles checkpoints.
    """
    try:
        main()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UserError(
                f"{str(error.filename)[:80]}...: is too long for a file system; use a shorter name."
            ) from error
        if not rank_status.disk_is_full(error):
            raise
        raise DiskFull(full_disk(error.filename or "a file of this run")) from error


def _explain_out_of_memory(main) -> None:
    """Run `main()`; raise OutOfMemory for errors while loading (train/memory_report.py handles training)."""
    try:
        main()
    except (RuntimeError, MemoryError) as error:
        if rank_status.host_is_full(error):
            reason = (str(error).splitlines() or ["MemoryError"])[0]  # MemoryError may lack a message
            raise OutOfMemory(
                f"rank {os.environ.get('RANK', '0')} ran out of host memory ({reason}); "
                "on a CPU try a smaller --per_device_train_batch_size, otherwise --offload_path or fewer data workers."
            ) from error
        if not rank_status.gpu_is_full(error):
            raise

        raise OutOfMemory(
            f"rank {os.environ.get('RANK', '0')} ran out of GPU memory in the load phase{failed_allocation(error)}, "
            "mostly for parameters; try --zero 3 on more GPUs, --zero 3 --offload all, or a smaller model."
        ) from error
