"""Run a program and turn its expected errors into one sentence on stderr and an exit code."""

import atexit
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
    bytes_asked_for,
    full_disk,
    printable,
    shortened,
)
from zerofit.job import job, run_folder, run_lock
from zerofit.job.recipe import Recipe


def check_early(recipe: Recipe) -> None:
    """Check what a recipe's command line names, and set the variables that torch reads at import.

    `--help` prints the flags and exits the process.
    """
    process.begin()
    os.environ.update(distributed.thread_waiting())
    if job.named(sys.argv[1:]):  # the launcher has checked it
        return
    from zerofit.config import early_check

    own = distributed.rank() == 0 and not distributed.may_be_restart()  # then checkpoint/restart.py decides
    guard(lambda: early_check.check(recipe, sys.argv[1:], here=True, own_folder=own))


def guard(main) -> None:
    """Run `main()` and turn a `UserError` into one sentence on stderr and its exit code.

    A user's mistake is raised on every rank; the first of each node prints it, and its exit ends the other ranks.
    """
    process.begin()
    with contextlib.suppress(AttributeError, OSError):  # no stream of Python's own; a fork's, which is another file now
        sys.stdout.reconfigure(errors="backslashreplace")  # as of stderr: names and data may hold what has no UTF-8
    atexit.register(gc.freeze)  # else the interpreter's last collections of the libraries' objects take 1 to 3 s
    told = False  # the next command has been printed
    try:
        _explain_full_disk(lambda: _explain_out_of_memory(main))
        distributed.stop()
    except UserError as error:
        told = isinstance(error, Stopped)
        rank_status.record(error)
        sys.stdout.flush()
        if isinstance(error, Stopped) and os.environ.get("RANK", "0") != "0":
            distributed.stop(wait=False)
            raise SystemExit(error.exit_code) from None
        if not distributed.first_of_node() and not (rank_status.folder() and isinstance(error, OutOfMemory | DiskFull)):
            # The first raises the same error and prints it; if it is still busy after 10 s, this rank prints it.
            time.sleep(10)
        # An error from a data loading process arrives with its traceback in front.
        prefix = "zerofit" if isinstance(error, Stopped) else "zerofit: error"
        said = shortened(str(error).rpartition("UserError: ")[2].strip())
        print(f"{prefix}: {printable(said)}", file=sys.stderr, flush=True)
        distributed.stop(wait=False)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt as error:
        told = True
        rank_status.record(error)
        if not rank_status.folder():  # else the supervisor prints it, once for all ranks
            print(f"zerofit: {str(error) or _interrupted()}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODES["interrupted"]) from None
    except Exception as error:
        rank_status.record(error)
        if rank_status.folder() and rank_status.of_a_peer(error):  # the supervisor reports the lost rank
            raise SystemExit(1) from None
        raise
    finally:
        report(told)
        run_lock.release()


def report(told: bool = False) -> None:
    """Write report.html if this process has trained; under a supervisor, that one writes it.

    Args: told: the next command has been printed already.
    """
    if (folder := run_folder.opened()) and not rank_status.folder():
        from zerofit.report import run_page

        run_page.write(folder, told)


def _interrupted() -> str:
    """Return the sentence for a Ctrl-C outside the training loop."""
    if not (folders := run_lock.held()):
        return "interrupted"
    from zerofit.checkpoint import resumable

    return resumable.how_to_go_on("interrupted", folders[0], None)


def _explain_full_disk(main) -> None:
    """Run `main()`, turning a full disk into DiskFull and a name that is too long into UserError.

    train/run.py handles checkpoints.
    """
    try:
        main()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UserError(
                f"{str(error.filename)[:80]}...: is longer than a file system takes; name another."
            ) from error
        if not rank_status.disk_is_full(error):
            raise
        raise DiskFull(full_disk(error.filename or "a file of this run")) from error


def _explain_out_of_memory(main) -> None:
    """Run `main()`, turning out of memory while loading into OutOfMemory (else: train/memory_report.py)."""
    try:
        main()
    except (RuntimeError, MemoryError) as error:
        if rank_status.host_is_full(error):
            reason = (str(error).splitlines() or ["MemoryError"])[0]  # Python's own has no text
            raise OutOfMemory(
                f"rank {os.environ.get('RANK', '0')} could not get more host memory ({reason}); "
                "on a CPU try a smaller --per_device_train_batch_size, else --offload_path, or fewer data workers."
            ) from error
        if not rank_status.gpu_is_full(error):
            raise

        raise OutOfMemory(
            f"rank {os.environ.get('RANK', '0')} ran out of GPU memory in the load phase{bytes_asked_for(error)}: the "
            "largest part are the parameters; try --zero 3 on more GPUs, --zero 3 --offload all, or a smaller model."
        ) from error
