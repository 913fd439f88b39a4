"""`zerofit status`: report how a run stands, from its folder, its processes and SLURM."""

import argparse
import contextlib
import json
import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from zerofit import rank_status
from zerofit.errors import UserError

JOB, LOG, CANCELLED = "slurm.json", "slurm.log", "cancelled"  # in the run folder of a job on SLURM

ANSWER_SECONDS = 60.0  # that SLURM's commands get


ENDED = tuple("COMPLETED CANCELLED FAILED TIMEOUT PREEMPTED NODE_FAIL OUT_OF_MEMORY BOOT_FAIL DEADLINE REVOKED".split())


def main(argv: list[str]) -> None:
    """`zerofit status`: see --help. Raises: UserError for what is no run folder."""
    parser = argparse.ArgumentParser(prog="zerofit status", allow_abbrev=False, description=__doc__)
    parser.add_argument("run", nargs="+", help="run folders")
    for name in parser.parse_args(argv).run:
        folder = find(name)
        found = jobs(folder)
        print("\n".join([f"{name}: {progress(folder)}" if not _is_sweep(folder) else f"{name}:",
                         *(f"  job {job}" for job in found)]))  # fmt: skip
        for one in sweep(folder):
            print(f"  {one.name}: {progress(one)}")
        if not found and not finished(folder):
            process = supervisor(folder)
            print(f"  runs here as process {process.pid}" if process else "  nothing of it runs on this machine")


def find(name: str) -> Path:
    """A run folder. Raises: UserError where nothing says that one was begun there."""
    folder = Path(name).expanduser()
    if not (folder / "run.json").exists() and not (folder / JOB).exists() and supervisor(folder) is None:
        raise UserError(f"{name}: is no run folder (neither run.json nor slurm.json is there); name one of runs/.")
    return folder


def _is_sweep(folder: Path) -> bool:
    return bool(read(folder / JOB).get("jobs"))


def sweep(folder: Path) -> list[Path]:
    """The run folders of a sweep's jobs; of another run: none."""
    return [folder / str(number) for number in range(read(folder / JOB).get("jobs", 0))]


# --- the run folder ---


def progress(folder: Path) -> str:
    """What the run folder says: how it ended, or how far it is."""
    result, told = read(folder / "result.json"), read(folder / "report.json")
    if finished(folder):
        measured = (("train loss", result.get("train_loss")), ("eval loss", result.get("eval_loss")))
        return ", ".join(
            [f"finished after {result['steps']:,} steps", *(f"{name} {value:.4f}" for name, value in measured if value)]
        )
    lines = [f"cancelled; {far(folder)}" if (folder / CANCELLED).exists() else far(folder)]
    if told.get("status") == "failed":
        lines.append(f"the last start ended: {told['cause']}")
        if told.get("try"):
            lines.append(f"try: {told['try']}")
    return "; ".join(lines)


def far(folder: Path) -> str:
    """The last logged step with its loss, speed and age, and the newest checkpoint."""
    file, last = folder / "metrics.jsonl", {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError):  # half a line is being written
            entry = json.loads(line)
            last = entry if "loss" in entry else last
    steps = [path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")]
    saved = max(map(int, filter(str.isdigit, steps)), default=None)
    checkpoint = f"newest checkpoint {saved}" if saved else "no checkpoint yet"
    if not last:
        return f"before the first step, {checkpoint}"
    age = time.time() - file.stat().st_mtime
    words = [f"step {last['step']:,}", f"loss {last['loss']:.4f}"]
    if last.get("tokens_per_second"):
        words.append(f"{last['tokens_per_second']:,.0f} tok/s")
    return ", ".join([*words, f"{age:,.0f} s ago", checkpoint])


def finished(folder: Path) -> bool:
    return read(folder / "result.json").get("status") == "finished"


def read(file: Path) -> dict:
    """A JSON file of the run folder; {} where it is not there, or half written."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


# --- SLURM ---


@dataclass
class SlurmJob:
    """One job, or one of an array, as SLURM tells it. state: one of its words."""

    id: str
    state: str
    words: str

    @property
    def is_alive(self) -> bool:
        return not self.state.startswith(ENDED) and self.state != "unknown"

    def __str__(self) -> str:
        return f"{self.id}: {self.state}{f' ({self.words})' if self.words else ''}"


def ask(*words: str) -> str:
    """What a command of SLURM answers. Raises: UserError where it is missing, fails or is silent, with its words."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except FileNotFoundError:
        raise UserError(
            f"{words[0]} is not installed here: run this on a login node of the cluster (`module load slurm` where it has "
            "modules), or see the batch script with --print."
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{words[0]} did not answer within {ANSWER_SECONDS:.0f} s; is slurmctld up (`scontrol ping`)?") from None  # fmt: skip
    if done.returncode:
        raise UserError(f"{words[0]}: {(done.stderr or done.stdout).strip() or f'exit code {done.returncode}'}")
    return done.stdout


def address(folder: Path) -> tuple[str, list[str]]:
    """(number of the run's job, options that say on which cluster it is); ("", []) for a run without one.

    Raises: UserError for a number or a cluster's name that SLURM's commands could take for something else.
    """
    facts = read(folder / JOB)
    number, cluster = facts.get("job_id", ""), facts.get("cluster", "")
    if number and not re.fullmatch(r"[0-9]+(_[0-9]+)?", str(number)):
        raise UserError(
            f"{folder / JOB}: job_id {number!r} is no number of a job; `squeue --me` shows those that you have."
        )
    if cluster and not re.fullmatch(r"\w[\w.-]*", str(cluster)):
        raise UserError(
            f"{folder / JOB}: cluster {cluster!r} is no name of a cluster; `sacctmgr show cluster` lists them."
        )
    return str(number), [f"--clusters={cluster}"] if cluster else []


def jobs(folder: Path) -> list[SlurmJob]:
    """What SLURM says of the run's job; [] for a run that was not submitted to it.

    squeue knows a job until some minutes after its end, sacct later too where the cluster keeps accounts.
    Raises: UserError where SLURM's commands are missing or silent.
    """
    number, there = address(folder)
    if not number:
        return []
    with contextlib.suppress(UserError):  # "Invalid job id specified": it has forgotten it
        said = ask("squeue", *there, "--noheader", "--array", "--states=all", f"--jobs={number}",
                         "--format=%i|%T|%M of %l, %D nodes %N %r")  # fmt: skip
        if found := _parse(said):
            return found
    with contextlib.suppress(UserError):  # no accounts are kept
        said = ask("sacct", *there, "--noheader", "--allocations", "--parsable2", f"--jobs={number}",
                         "--format=JobID,State,Elapsed")  # fmt: skip
        if found := _parse(said):
            return found
    ask("scontrol", "ping")  # says it where slurmctld is the reason
    return [SlurmJob(number, "unknown", "SLURM does not remember it any more")]


def _parse(said: str) -> list[SlurmJob]:
    rows = [line.split("|", 2) for line in said.splitlines() if line.count("|") >= 2]
    return [SlurmJob(number, state, words.removesuffix(" None")) for number, state, words in rows]


# --- processes of this machine ---


def supervisor(folder: Path):
    """The process (psutil's) of this machine that watches over the run's ranks, or that is the run; None: there is none."""
    import psutil

    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or not _runs(process.cmdline(), process, folder):
                continue
            while rank_status.FOLDER in process.environ():  # a rank or its launcher: whoever started it
                process = process.parent()
            return process
        except (psutil.Error, AttributeError):
            continue
    return None


def _runs(words: list[str], process, folder: Path) -> bool:
    """Whether a command line is a recipe's or `zerofit launch`'s with this --output_dir."""
    if not words or not Path(words[0]).name.startswith("python"):
        return False
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("-", "_") == "__output_dir":
            value = value if equals else "".join(words[i + 1 : i + 2])
            return (Path(process.cwd()) / Path(value).expanduser()).resolve() == folder.resolve()
    return False
