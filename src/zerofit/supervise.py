"""The processes of one job, watched: signals passed on, hangs ended, out-of-memory and lost ranks started again."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import failure, planner, postmortem, recovery, report
from .args import Settings

POLL_SECONDS = 0.5
STACK_SECONDS = 2.0  # that ranks get to write where they stand


@dataclass
class Job:
    """command: flags -> the words to run; parse: flags -> Settings; flags: with --output_dir."""

    command: Callable[[list[str]], list[str]]
    parse: Callable[[list[str]], Settings]
    settings: Settings
    flags: list[str]
    folder: Path
    env: dict[str, str]
    count: int


def run(job: Job) -> int:
    """Run the job to its end, with new attempts where --on_oom and --max_restarts allow; return the exit code."""
    endings, restarts, flags, settings = [], 0, job.flags, job.settings
    while True:
        records = Path(tempfile.mkdtemp(prefix="zerofit-attempt-"))
        try:
            last = _attempt(job, flags, settings, records)
            endings.append(last)
            if last.kind == "out of memory":
                planner.outgrown()
            following = _following(job, last, flags, settings, restarts)
            opened = (job.folder / "run.json").exists()
            if following is None:
                _end(job, endings, records, opened, settings, flags)
                return last.code
            last.what_next, flags, settings, counts = following
            restarts += counts
            checkpoint = recovery.put_aside(job.folder, len(endings), records) if opened else None
        finally:
            shutil.rmtree(records, ignore_errors=True)
        flags = _resumed(flags, checkpoint, job)
        where = f"from {checkpoint.name}" if checkpoint else "from the start"
        print(
            f"zerofit: {last.sentence}\nzerofit: attempt {len(endings) + 1}, {where}: {last.what_next}", file=sys.stderr
        )


def _resumed(flags: list[str], checkpoint: Path | None, job: Job) -> list[str]:
    from . import probe

    if checkpoint is not None:
        return [*probe.drop(flags, "--resume_from_checkpoint"), "--resume_from_checkpoint", str(checkpoint)]
    asked = job.settings.resume_from_checkpoint  # of the user's own; put aside, where it was in the run folder
    if asked and not Path(asked).exists():
        return probe.drop(flags, "--resume_from_checkpoint")
    return flags


def _attempt(job: Job, flags: list[str], settings, records: Path) -> postmortem.Ending:
    kills, words = _host_kills(), job.command(flags)
    told = {failure.FOLDER: str(records), "ZEROFIT_COMMAND": report.hide_secrets(words)}
    code, heard, hung = watch(words, os.environ | job.env | told, records, settings.hang_timeout, job.count)
    kills = _host_kills() - kills
    return postmortem.ending(code, records, heard, hung, settings.hang_timeout, kills)


def _following(job: Job, last, flags, settings, restarts: int):
    """(what changes, flags, settings, 1 where it counts as a restart) of the next attempt, None: there is none."""
    if last.kind == "out of memory" and settings.on_oom != "fail":
        found = recovery.smaller(settings, flags, job.parse)
        if found and (settings.on_oom == "retry" or _agreed(last, found[0])):
            return (*found, 0)
    if last.kind in ("lost rank", "hang") and restarts < settings.max_restarts:
        return f"the same again ({restarts + 1} of {settings.max_restarts} restarts)", flags, settings, 1
    return None


def _agreed(last, what: str) -> bool:
    if not sys.stdin.isatty():
        print("zerofit: --on_oom ask: there is no terminal to ask at", file=sys.stderr)
        return False
    return input(f"{last.sentence}\nstart again with {what}? [y/N] ").strip().lower() in ("y", "yes")


def _end(job: Job, endings: list, records: Path, opened: bool, settings, flags: list[str]) -> None:
    """Write the report where there is something to tell; a mistake met before the run folder leaves nothing."""
    last = endings[-1]
    if last.kind == "interrupted":
        print(f"zerofit: stopped by {last.signal}", file=sys.stderr)
    if not opened or (last.kind in ("finished", "stopped", "interrupted", "user error") and len(endings) == 1):
        return
    smaller = recovery.smaller(settings, flags, job.parse) if last.kind == "out of memory" else None
    advice = postmortem.advice(last, settings, smaller)
    postmortem.write(job.folder, endings, advice)
    if last.kind == "finished":
        return
    aside = job.folder / "attempts" / str(len(endings))
    aside.mkdir(parents=True, exist_ok=True)
    for file in records.iterdir():
        shutil.move(file, aside / file.name)
    if last.kind not in ("user error", "stopped"):
        print(f"zerofit: {last.sentence}; {job.folder}/report.md", file=sys.stderr)
    if advice:
        print(f"zerofit: try: {advice}", file=sys.stderr)


# --- one attempt's processes ---


def watch(
    words: list[str], env: dict, records: Path, limit: float, count: int, stdout=None
) -> tuple[int, list[int], int | None]:
    """Run the command in a session of its own, pass signals on, leave no process behind.

    The first SIGTERM or SIGUSR1 (how SLURM announces the end) has the ranks save and end, once they train.

    Args: limit: seconds without a step of any rank after which the job is ended; 0: none. stdout: a file instead of
        this process's.
    Returns: exit code, the signals that were passed on, the rank that held up a job that hung.
    """
    failure.write_stop(records, 0)
    child = subprocess.Popen(words, env=env, start_new_session=True, stdout=stdout)
    heard: list[int] = []
    hung = None

    def pass_on(number, _frame):
        heard.append(number)
        if len(heard) == 1 and number in (signal.SIGTERM, signal.SIGUSR1) and _asked_to_save(records, count):
            return
        signal_group(child.pid, signal.SIGKILL if len(heard) > 1 else number)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    try:
        while True:
            try:
                code = child.wait(POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if not heard and hung is None and (hung := _hung(records, limit, count)) is not None:
                    _write_stacks(records)
                    signal_group(child.pid, signal.SIGKILL)
    finally:
        _end_ranks(records)
        for number, handler in before.items():
            signal.signal(number, handler)
    return (code if code >= 0 else 128 - code), heard, hung


def _asked_to_save(records: Path, count: int) -> bool:
    """Name the step after which all ranks save and end; False while some have not made one yet.

    Ranks are less than two steps apart, since each step waits for the others.
    """
    pulses = failure.pulses(records)
    if len(pulses) < count:
        return False
    failure.write_stop(records, max(step for _, step, _ in pulses.values()) + 2)
    return True


def _end_ranks(records: Path) -> None:
    """End what outlived the launcher. torchrun starts ranks in sessions of their own: their environment tells them."""
    import psutil

    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(failure.FOLDER) == str(records):
                left.append(process)
                process.terminate()
        except psutil.Error:
            continue
    for process in psutil.wait_procs(left, timeout=0.5)[1]:
        process.kill()
    psutil.wait_procs(left, timeout=5)


def _hung(records: Path, limit: float, count: int) -> int | None:
    """The rank that is furthest behind when none has made a step for `limit` seconds."""
    pulses = failure.pulses(records) if limit else {}
    if len(pulses) < count or time.time() - max(when for _, _, when in pulses.values()) < limit:
        return None
    return min(pulses, key=lambda rank: pulses[rank][1:])


def _write_stacks(records: Path) -> None:
    for pid, _, _ in failure.pulses(records).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(STACK_SECONDS)


def signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _host_kills() -> int:
    """Processes of this control group that the kernel has ended because memory was full."""
    try:
        lines = Path("/sys/fs/cgroup/memory.events").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
