"""`zerofit cancel`: make a run save a checkpoint and end, on SLURM or on this machine."""

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
    """`zerofit cancel`: see --help. Raises: UserError if the path is not the folder of a running run."""
    parser = argparse.ArgumentParser(prog="zerofit cancel", allow_abbrev=False, description=__doc__)
    parser.add_argument(
        "--now", action="store_true", help="end the run immediately and lose the progress since its last checkpoint"
    )
    parser.add_argument("--wait", type=float, default=600.0, metavar="SECONDS", help="time limit for the save")
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
    """Signal running jobs to save and end; cancel pending jobs immediately and all jobs after `wait` seconds."""
    if not alive:
        raise UserError(f"{folder}: the job has already ended.")
    _check_job(folder, *status.address(folder))
    for run_folder in [folder, *status.sweep(folder)]:
        paths.appending(run_folder / status.CANCELLED).close()  # so that slurm.sbatch does not requeue it
    job_id, cluster = status.address(folder)
    if wait and any(job.state == "RUNNING" for job in alive):
        _cancel(*cluster, "--state=PENDING", job_id)
        _cancel(*cluster, "--signal=USR1", job_id)
        print(f"job {job_id} was asked to save a checkpoint and end; waiting up to {wait:.0f} s", flush=True)
        if _ended(lambda: not any(job.is_alive for job in status.jobs(folder)), wait):
            return
    _cancel(*cluster, job_id)
    if not _ended(lambda: not any(job.is_alive for job in status.jobs(folder)), status.ANSWER_SECONDS):
        print(f"job {job_id} is still running after the request to end; see `zerofit status {folder}`")


def _check_job(folder: Path, job_id: str, cluster: list[str]) -> None:
    """Check that the job's log is in the folder, since a copied run folder may contain any job id of this user."""
    output = ""
    with contextlib.suppress(UserError):  # it may just have ended
        output = status.ask("scontrol", *cluster, "show", "job", job_id, "--oneliner")
    for log in re.findall(r"\bStdOut=(.*?)(?: \w+=|$)", output, re.M):
        if not Path(log.replace("%%", "%")).resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{folder}: job {job_id} belongs to another run (its log is {log}); end it with `scancel {job_id}`."
            )


def _cancel(*words: str) -> None:
    with contextlib.suppress(UserError):  # the job may have ended
        status.ask("scancel", *words)


def _end_process(folder: Path, wait: float) -> None:
    process = run_lock.holder(folder)
    if process is None:
        host = run_lock.owner(folder).get("host")
        elsewhere = f"; cancel it on {host}, where it was started" if host else ""
        raise UserError(f"{folder}: not running on this machine, and not submitted with `zerofit slurm`{elsewhere}.")
    process.send_signal(signal.SIGTERM)
    if wait:
        print(f"process {process.pid} was asked to save a checkpoint and end; waiting up to {wait:.0f} s", flush=True)
    if _ended(lambda: not rank_status.is_alive(process), max(wait, rank_status.ONE_SIGNAL_SECONDS + POLL_SECONDS)):
        return
    process.send_signal(signal.SIGTERM)  # the second signal kills the ranks immediately
    if not _ended(lambda: not rank_status.is_alive(process), status.ANSWER_SECONDS):
        print(f"process {process.pid} is still running after the request to end")


def _ended(done: Callable[[], bool], seconds: float) -> bool:
    """Poll `done` until it returns True; return False after a timeout in seconds."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
