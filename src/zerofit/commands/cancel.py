"""`zerofit cancel`: have a run save a checkpoint and end, on SLURM or on this machine."""

import argparse
import contextlib
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from zerofit.base import paths, rank_status
from zerofit.base.errors import UserError, printable
from zerofit.commands import status
from zerofit.job import run_lock

POLL_SECONDS = 1.0


def main(argv: list[str]) -> None:
    """`zerofit cancel`: see --help. Raises: UserError for a path that is no run folder, or is not running."""
    parser = argparse.ArgumentParser(prog="zerofit cancel", allow_abbrev=False, description=__doc__)
    parser.add_argument(
        "--now", action="store_true", help="end it at once; what it made since its last checkpoint is lost"
    )
    parser.add_argument("--wait", type=float, default=600.0, metavar="SECONDS", help="that it gets to save")
    parser.add_argument("run", help="the run folder")
    args = parser.parse_args(argv)
    folder = status.find(args.run)
    wait = 0.0 if args.now else args.wait
    if slurm_jobs := status.jobs(folder):
        _cancel_job(folder, [job for job in slurm_jobs if job.is_alive], wait)
    else:
        _end_process(folder, wait)
    for run_folder in status.sweep(folder) or [folder]:
        print(printable(f"{run_folder}: {status.progress(run_folder)}"))


def _cancel_job(folder: Path, alive: list[status.SlurmJob], wait: float) -> None:
    """Signal running jobs to save and end; cancel pending ones, and after `wait` seconds all."""
    if not alive:
        raise UserError(f"{folder}: its job has ended; nothing runs.")
    _check_job(folder, *status.address(folder))
    for run_folder in [folder, *status.sweep(folder)]:
        paths.appending(run_folder / status.CANCELLED).close()  # slurm.sbatch then does not queue it again
    job_id, cluster = status.address(folder)
    if wait and any(job.state == "RUNNING" for job in alive):
        _cancel(*cluster, "--state=PENDING", job_id)
        _cancel(*cluster, "--signal=USR1", job_id)
        print(f"job {job_id} was asked to save a checkpoint and end; waiting up to {wait:.0f} s", flush=True)
        if _ended(lambda: not any(job.is_alive for job in status.jobs(folder)), wait):
            return
    _cancel(*cluster, job_id)
    if not _ended(lambda: not any(job.is_alive for job in status.jobs(folder)), status.ANSWER_SECONDS):
        print(f"job {job_id} was asked to end and still runs; `zerofit status {folder}` shows its state")


def _check_job(folder: Path, job_id: str, cluster: list[str]) -> None:
    """Refuse a job whose log is in another folder: a run folder of somebody else may name any job of this user."""
    said = ""
    with contextlib.suppress(UserError):  # it has ended just now
        said = status.ask("scontrol", *cluster, "show", "job", job_id, "--oneliner")
    for log in re.findall(r"\bStdOut=(.*?)(?: \w+=|$)", said, re.M):
        if not Path(log.replace("%%", "%")).resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{folder}: names job {job_id}, whose log is {log}: it is another run's; `scancel {job_id}` ends it."
            )


def _cancel(*words: str) -> None:
    with contextlib.suppress(UserError):  # the job may have ended meanwhile
        status.ask("scancel", *words)


def _end_process(folder: Path, wait: float) -> None:
    process = run_lock.holder(folder)
    if process is None:
        there = run_lock.owner(folder).get("host")
        elsewhere = f"; it was begun on {there}, where it can be cancelled" if there else ""
        raise UserError(
            f"{folder}: nothing of it runs on this machine (and it was not submitted with `zerofit slurm`){elsewhere}."
        )
    process.send_signal(signal.SIGTERM)
    if wait:
        print(f"process {process.pid} was asked to save a checkpoint and end; waiting up to {wait:.0f} s", flush=True)
    if _ended(lambda: not rank_status.is_there(process), max(wait, rank_status.ONE_SIGNAL_SECONDS + POLL_SECONDS)):
        return
    process.send_signal(signal.SIGTERM)  # the second one kills the ranks at once
    if not _ended(lambda: not rank_status.is_there(process), status.ANSWER_SECONDS):
        print(f"process {process.pid} was asked to end and still runs")


def _ended(done: Callable[[], bool], seconds: float) -> bool:
    """Poll `done` until it is true; return False after a timeout in seconds."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
