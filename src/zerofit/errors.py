"""The user's mistakes: one sentence that names the place, the cause and the fix."""

import os
import re
import sys
import time

EXIT_CODES = {
    "disk full": 1,
    "user error": 2,
    "out of memory": 3,
    "diverged": 4,
    "hang": 5,
    "stopped": 75,
    "interrupted": 130,
}


class UserError(Exception):
    """A mistake that the user can mend. Its text is the whole message; no traceback is shown."""

    exit_code = EXIT_CODES["user error"]


class Diverged(UserError):
    """Training stopped because the loss or the gradient is no longer a finite number."""

    exit_code = EXIT_CODES["diverged"]


class Stopped(UserError):
    """Asked by SIGTERM or SIGUSR1, the run has saved a checkpoint and ended (75: EX_TEMPFAIL, try again)."""

    exit_code = EXIT_CODES["stopped"]


class OutOfMemory(UserError):
    """The GPU's memory did not suffice."""

    exit_code = EXIT_CODES["out of memory"]


def printable(text: str) -> str:
    """Return the text with control characters spelled out: those of the data would steer the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: f"\\x{ord(m[0]):02x}", text)


class DiskFull(UserError):
    """A disk did not take what was written."""

    exit_code = EXIT_CODES["disk full"]


def guard(main) -> None:
    """Run `main()` and turn a `UserError` into one sentence on stderr and its exit code.

    Every rank of a job meets the same mistake; rank 0 speaks and its end ends the others.
    """
    from . import failure, run_lock, world

    try:
        _full_disk_in_words(lambda: _out_of_memory_in_words(main))
        world.stop()
    except UserError as error:
        failure.record(error)
        sys.stdout.flush()
        if isinstance(error, Stopped) and os.environ.get("RANK", "0") != "0":
            world.stop(wait=False)
            raise SystemExit(error.exit_code) from None
        if os.environ.get("RANK", "0") != "0" and not (failure.folder() and isinstance(error, OutOfMemory | DiskFull)):
            # Rank 0 meets the same mistake and says it; where it is still busy after a while, this rank does.
            time.sleep(10)
        # A mistake met in a data loading process arrives with its traceback in front.
        start = "zerofit" if isinstance(error, Stopped) else "zerofit: error"
        print(f"{start}: {printable(str(error).rpartition('UserError: ')[2].strip())}", file=sys.stderr, flush=True)
        world.stop(wait=False)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt as error:
        failure.record(error)
        if not failure.folder():  # the supervisor says it, once for all ranks
            print(f"zerofit: {str(error) or _interrupted()}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODES["interrupted"]) from None
    except Exception as error:
        failure.record(error)
        if failure.folder() and failure.of_a_peer(error):  # the supervisor tells of the rank that was lost
            raise SystemExit(1) from None
        raise
    finally:
        run_lock.release()


def _interrupted() -> str:
    """Return the sentence for a Ctrl-C while no steps are made."""
    from . import run_lock

    if not (folders := run_lock.held()):
        return "interrupted"
    from . import report

    return report.how_to_go_on("interrupted", folders[0], None)


def _full_disk_in_words(main) -> None:
    """Run `main()`; a disk that is full is no fault of the program. What is written to a checkpoint train.run explains."""
    from . import failure

    try:
        main()
    except OSError as error:
        if not failure.disk_is_full(error):
            raise
        raise DiskFull(full_disk(error.filename or "a file of this run")) from error


def full_disk(place) -> str:
    """Return the sentence for a file or folder whose disk is full."""
    return f"the disk of {place} is full (No space left on device); make room, or name a folder on another disk with --output_dir"


def _out_of_memory_in_words(main) -> None:
    """Run `main()`; what it runs out of before training (train.run explains the rest) is the model being loaded."""
    from . import failure

    try:
        main()
    except (RuntimeError, MemoryError) as error:
        if failure.host_is_full(error):
            said = (str(error).splitlines() or ["MemoryError"])[0]  # Python's own has no text
            raise OutOfMemory(
                f"rank {os.environ.get('RANK', '0')} could not get more host memory ({said}); "
                "on a CPU try a smaller --per_device_train_batch_size, else --offload_path, or fewer data workers."
            ) from error
        if not failure.gpu_is_full(error):
            raise
        from .memory_report import asked

        raise OutOfMemory(
            f"rank {os.environ.get('RANK', '0')} ran out of GPU memory in the load phase{asked(error)}: the largest part "
            "are the parameters; try --zero 3 on more GPUs, --zero 3 --offload all, or a smaller model."
        ) from error
