"""`zerofit cancel`: have a run save a checkpoint and end, on SLURM or on this machine."""

import argparse
import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path

from zerofit import rank_status
from zerofit.errors import UserError
from zerofit.launch.cluster import status

POLL_SECONDS = 1.0


def main(argv: list[str]) -> None:
    """`zerofit cancel`: see --help. Raises: UserError for what is no run folder, or does not run."""
    parser = argparse.ArgumentParser(prog="zerofit cancel", allow_abbrev=False, description=__doc__)
    parser.add_argument(
        "--now", action="store_true", help="end it at once; what it made since its last checkpoint is lost"
    )
    parser.add_argument("--wait", type=float, default=600.0, metavar="SECONDS", help="that it gets to save")  # fmt: skip
    parser.add_argument("run", help="the run folder")
    given = parser.parse_args(argv)
    folder = status.find(given.run)
    wait = 0.0 if given.now else given.wait
    if found := status.jobs(folder):
        _cancel_job(folder, [job for job in found if job.is_alive], wait)
    else:
        _end_process(folder, wait)
    for one in status.sweep(folder) or [folder]:
        print(f"{one}: {status.progress(one)}")


def _cancel_job(folder: Path, alive: list[status.SlurmJob], wait: float) -> None:
    """Running jobs are asked to save; waiting ones, and those that take too long, are ended."""
    if not alive:
        raise UserError(f"{folder}: its job has ended; nothing runs.")
    for one in [folder, *status.sweep(folder)]:
        (one / status.CANCELLED).touch()  # slurm.sbatch then does not queue it again
    number, there = status.address(folder)
    if wait and any(job.state == "RUNNING" for job in alive):
        _cancel(*there, "--state=PENDING", number)
        _cancel(*there, "--signal=USR1", number)
        print(f"job {number} was asked to save a checkpoint and end; waiting up to {wait:.0f} s", flush=True)
        if _ended(lambda: not any(job.is_alive for job in status.jobs(folder)), wait):
            return
    _cancel(*there, number)
    if not _ended(lambda: not any(job.is_alive for job in status.jobs(folder)), status.ANSWER_SECONDS):
        print(f"job {number} was told to end and has not yet; `zerofit status {folder}` tells how it stands")


def _cancel(*words: str) -> None:
    with contextlib.suppress(UserError):  # it has ended meanwhile
        status.ask("scancel", *words)


def _end_process(folder: Path, wait: float) -> None:
    process = status.supervisor(folder)
    if process is None:
        raise UserError(
            f"{folder}: nothing of it runs on this machine (and it was not submitted with `zerofit slurm`)."
        )
    process.send_signal(signal.SIGTERM)
    if wait:
        print(f"process {process.pid} was asked to save a checkpoint and end; waiting up to {wait:.0f} s", flush=True)
    if _ended(lambda: not rank_status.is_there(process), wait):
        return
    process.send_signal(signal.SIGTERM)  # the second ends everything at once
    if not _ended(lambda: not rank_status.is_there(process), status.ANSWER_SECONDS):
        print(f"process {process.pid} was told to end and has not yet")


def _ended(done: Callable[[], bool], seconds: float) -> bool:
    """Wait until it is done; False: it was not within so many seconds."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
