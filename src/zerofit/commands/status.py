"""`zerofit status`: report the state of a run from its folder, its processes and SLURM."""

import argparse
import contextlib
import itertools
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from zerofit.base.errors import UserError, printable
from zerofit.job import run_folder, run_lock

JOB, LOG, CANCELLED = "slurm.json", "slurm.log", "cancelled"  # files in the run folder of a SLURM job

ANSWER_SECONDS = 60.0  # timeout of SLURM's commands


ENDED = tuple("COMPLETED CANCELLED FAILED TIMEOUT PREEMPTED NODE_FAIL OUT_OF_MEMORY BOOT_FAIL DEADLINE REVOKED".split())


def main(argv: list[str]) -> None:
    """`zerofit status`: see --help. Raises: UserError for a path that is not a run folder."""
    parser = argparse.ArgumentParser(prog="zerofit status", allow_abbrev=False, description=__doc__)
    parser.add_argument("run", nargs="+", help="run folders")
    for name in parser.parse_args(argv).run:
        folder = find(name)
        slurm_jobs = jobs(folder)
        print(printable("\n".join([f"{name}: {progress(folder)}" if not _is_sweep(folder) else f"{name}:",
                                   *(f"  job {job}" for job in slurm_jobs)])))  # fmt: skip
        for job_folder in sweep(folder):
            print(printable(f"  {job_folder.name}: {progress(job_folder)}"))
        if not slurm_jobs and not run_folder.finished(folder):
            process = run_lock.holder(folder)
            print(f"  running as process {process.pid}" if process else "  not running on this machine")


def find(name: str) -> Path:
    """Return the run folder. Raises: UserError without run.json, slurm.json or a running process."""
    folder = Path(name).expanduser()
    if not (folder / "run.json").exists() and not (folder / JOB).exists() and run_lock.holder(folder) is None:
        raise UserError(f"{name}: not a run folder (run.json and slurm.json are missing); use a folder of runs/.")
    return folder


def _is_sweep(folder: Path) -> bool:
    return bool(run_folder.read_record(folder / JOB).get("jobs"))


def sweep(folder: Path) -> list[Path]:
    """Return the run folders of a sweep's jobs, or [] for a single run."""
    jobs = run_folder.read_record(folder / JOB).get("jobs", 0)
    return [*itertools.takewhile(Path.is_dir, (folder / str(number) for number in range(jobs)))]


# --- the run folder ---


def progress(folder: Path) -> str:
    """Describe the run's end or progress from the run folder."""
    result, report = (run_folder.read_record(folder / name) for name in ("result.json", "report.json"))
    if run_folder.finished(folder):
        losses = (("train loss", result.get("train_loss")), ("eval loss", result.get("eval_loss")))
        summary = [f"finished after {result.get('steps') or 0:,} steps"]
        return ", ".join([*summary, *(f"{name} {value:.4f}" for name, value in losses if value)])
    lines = [f"cancelled; {last_step(folder)}" if (folder / CANCELLED).exists() else last_step(folder)]
    if report.get("status") == "failed":
        lines.append(f"the last start failed: {report.get('cause')}")
        if report.get("try"):
            lines.append(f"try: {report['try']}")
    return "; ".join(lines)


def last_step(folder: Path) -> str:
    """Describe the last logged step (loss, throughput, age) and the newest checkpoint."""
    last = next((entry for entry in reversed(run_folder.read_metrics(folder)) if entry.get("loss") is not None), None)
    saved = max(run_folder.checkpoints(folder), default=None)
    checkpoint = f"newest checkpoint {saved}" if saved else "no checkpoint yet"
    if not last:
        return f"before the first step, {checkpoint}"
    age = time.time() - (folder / run_folder.METRICS).stat().st_mtime
    parts = [f"step {last['step']:,}", f"loss {last['loss']:.4f}"]
    if last.get("tokens_per_second"):
        parts.append(f"{last['tokens_per_second']:,.0f} tok/s")
    return ", ".join([*parts, f"{age:,.0f} s ago", checkpoint])


# --- SLURM ---


@dataclass
class SlurmJob:
    """A job, or a job of an array."""

    id: str
    state: str  # from SLURM, or "unknown"
    details: str

    @property
    def is_alive(self) -> bool:
        return not self.state.startswith(ENDED) and self.state != "unknown"

    def __str__(self) -> str:
        return f"{self.id}: {self.state}{f' ({self.details})' if self.details else ''}"


def ask(*words: str) -> str:
    """Run a SLURM command and return its output. Raises: UserError if it is missing, fails or times out."""
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except FileNotFoundError:
        raise UserError(
            f"{words[0]} is not installed: run this on a login node of the cluster (try `module load slurm`), or "
            "print the batch script with --print."
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{words[0]} did not respond within {ANSWER_SECONDS:.0f} s; is slurmctld up (`scontrol ping`)?"
        ) from None
    if result.returncode:
        raise UserError(f"{words[0]}: {(result.stderr or result.stdout).strip() or f'exit code {result.returncode}'}")
    return result.stdout


def address(folder: Path) -> tuple[str, list[str]]:
    """Return (job id, options that select its cluster), or ("", []) for a run outside SLURM.

    Raises: UserError for a malformed id or cluster name, which SLURM's commands could misinterpret.
    """
    facts = run_folder.read_json(folder / JOB)
    job_id, cluster = facts.get("job_id", ""), facts.get("cluster", "")
    if job_id and not re.fullmatch(r"[0-9]+(_[0-9]+)?", str(job_id)):
        raise UserError(f"{folder / JOB}: job_id {job_id!r} is not a job id; `squeue --me` lists your jobs.")
    if cluster and not re.fullmatch(r"\w[\w.-]*", str(cluster)):
        raise UserError(
            f"{folder / JOB}: cluster {cluster!r} is not a cluster name; `sacctmgr show cluster` lists them."
        )
    return str(job_id), [f"--clusters={cluster}"] if cluster else []


def jobs(folder: Path) -> list[SlurmJob]:
    """Return the state of the run's job, or of all jobs of its array; [] for a run outside SLURM.

    squeue lists a job until some minutes after its end, sacct also later if the cluster has accounting.
    Raises: UserError if SLURM's commands are missing or time out.
    """
    job_id, cluster = address(folder)
    if not job_id:
        return []
    with contextlib.suppress(UserError):  # "Invalid job id specified": squeue no longer lists it
        output = ask("squeue", *cluster, "--noheader", "--array", "--states=all", f"--jobs={job_id}",
                         "--format=%i|%T|%M of %l, %D nodes %N %r")  # fmt: skip
        if rows := _parse(output):
            return rows
    with contextlib.suppress(UserError):  # the cluster does not have accounting
        output = ask("sacct", *cluster, "--noheader", "--allocations", "--parsable2", f"--jobs={job_id}",
                         "--format=JobID,State,Elapsed")  # fmt: skip
        if rows := _parse(output):
            return rows
    ask("scontrol", "ping")  # raises if slurmctld does not respond
    return [SlurmJob(job_id, "unknown", "SLURM has deleted its record")]


def _parse(output: str) -> list[SlurmJob]:
    rows = [line.split("|", 2) for line in output.splitlines() if line.count("|") >= 2]
    return [SlurmJob(job_id, state, details.removesuffix(" None")) for job_id, state, details in rows]
