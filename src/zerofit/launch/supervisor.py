"""Supervise a job: forward signals, end hangs, restart after out-of-memory errors and lost ranks."""

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

from zerofit import command_line, rank_status, run_folder
from zerofit.errors import EXIT_CODES
from zerofit.launch import postmortem, retry
from zerofit.launch.cluster import documents
from zerofit.launch.cluster.coordinator import Coordinator
from zerofit.plan import preflight
from zerofit.settings import Settings
from zerofit.train.checkpoint import resume
from zerofit.train.checkpoint.facts import ASIDE

POLL_SECONDS = 0.5


@dataclass
class Job:
    """What `run` needs to start attempts.

    command: flags -> argv; parse: (flags, ranks) -> Settings; flags: with --output_dir; count: processes of this node;
    crew: the nodes of a job with several, else None.
    """

    command: Callable[[list[str]], list[str]]
    parse: Callable[[list[str], int], Settings]
    settings: Settings
    flags: list[str]
    folder: Path
    env: dict[str, str]
    count: int
    crew: Coordinator | None = None


def run(job: Job) -> int:
    """Run the job, with new attempts as far as --on_oom and --max_restarts allow; return the exit code."""
    endings, restarts, flags, settings = [], 0, job.flags, job.settings
    members = {int(r): gpus for r, gpus in job.crew.board["members"].items()} if job.crew else None
    while True:
        if job.crew:
            job.crew.order(len(endings) + 1, members, flags)
        records = Path(tempfile.mkdtemp(prefix="zerofit-attempt-"))
        try:
            last = _attempt(job, flags, settings, records)
            endings.append(last)
            if last.kind == "out of memory":
                preflight.record_oom([record["traceback"] for record in rank_status.records(records)])
            next_attempt = _following(job, last, flags, settings, restarts)
            if next_attempt and job.crew:
                next_attempt, members = _with_the_nodes_there_are(job, last, next_attempt)
            opened = (job.folder / "run.json").exists()
            if next_attempt is None:
                if last.kind == "stopped" and settings.save_only_model:
                    last.code = EXIT_CODES["interrupted"]  # with 75, SLURM would requeue it for ever
                _end(job, endings, records, opened, settings, flags)
                if job.crew:
                    job.crew.announce(
                        end={"code": last.code, "sentence": "" if last.kind == "finished" else last.sentence}
                    )
                return last.code
            last.what_next, flags, settings, counts = next_attempt
            restarts += counts
            checkpoint = retry.archive_attempt(job.folder, len(endings), records) if opened else None
        finally:
            shutil.rmtree(records, ignore_errors=True)
        flags = _resumed(flags, checkpoint, job)
        where = f"from {checkpoint.name}" if checkpoint else "from the start"
        print(
            f"zerofit: {last.sentence}\nzerofit: attempt {len(endings) + 1}, {where}: {last.what_next}", file=sys.stderr
        )


def _resumed(flags: list[str], checkpoint: Path | None, job: Job) -> list[str]:
    if checkpoint is not None:
        return [*command_line.drop(flags, "--resume_from_checkpoint"), "--resume_from_checkpoint", str(checkpoint)]
    requested = job.settings.resume_from_checkpoint  # the user's flag; its checkpoint may have been archived
    if requested and not Path(requested).exists():
        return command_line.drop(flags, "--resume_from_checkpoint")
    return flags


def follow(job: Job) -> int:
    """Run this node's part of each attempt that node 0 orders; return the job's exit code."""
    crew = job.crew
    while True:
        message = crew.next_order()
        if end := message.get("end"):
            if end["sentence"] and end["code"]:
                print(f"{crew.name}: zerofit: {end['sentence']}", file=sys.stderr)
            return end["code"]
        crew.begin()
        flags = documents.with_decisions(job.flags, message["order"]["flags"], job.folder)
        with tempfile.TemporaryDirectory(prefix="zerofit-attempt-") as folder:
            crew.report(*_watch(job, flags, job.parse(flags, crew.processes), Path(folder)), Path(folder))


def _with_the_nodes_there_are(job: Job, last, following: tuple):
    """Adapt `following` to the nodes present now, with the same effective batch.

    Returns: (following, {node: processes}); (None, None) if too few nodes are present.
    """
    members = job.crew.muster()
    if members is None:
        last.what_next = ""
        return None, None
    change, flags, settings, counts = following
    ranks = sum(members.values())
    if ranks != settings.world_size:
        batch = retry.same_batch(
            settings.effective_batch_size, settings.per_device_train_batch_size, ranks, settings.sp_size
        )
        flags = [
            *command_line.drop(flags, "--gpus", "--zero", *retry.BATCH),
            *batch,
            "--zero",
            settings.zero,
            "--gpus",
            str(ranks),
        ]
        settings = job.parse(flags, ranks)
    nodes = f"{len(members)} node{'s' * (len(members) > 1)} with {ranks} processes"
    return (f"{change}, on {nodes}" if change else nodes, flags, settings, counts), members


def _attempt(job: Job, flags: list[str], settings, records: Path) -> postmortem.Outcome:
    kills = _host_kills()
    code, signals_received, hung = _watch(job, flags, settings, records)
    kills = _host_kills() - kills
    if job.crew:
        job.crew.report(code, signals_received, hung, records)
        code, signals_received, hung = job.crew.collect(records)
        if job.crew.lost:
            return postmortem.lost_node(", ".join(job.crew.host(r) for r in job.crew.lost), records)
    return postmortem.ending(code, records, signals_received, hung, settings.hang_timeout, kills)


def _watch(job: Job, flags: list[str], settings, records: Path) -> tuple[int, list[int], int | None]:
    command = job.command(flags)
    added_env = {rank_status.FOLDER: str(records), "ZEROFIT_COMMAND": command_line.hide_secrets(command)}
    added_env |= job.crew.environment() if job.crew else {}
    return watch(command, os.environ | job.env | added_env, records, settings.hang_timeout, job.count, crew=job.crew)


def _following(job: Job, last, flags, settings, restarts: int):
    """Return the next attempt: (change, flags, settings, 1 for a restart else 0); None to end the job."""
    if last.kind == "out of memory" and settings.on_oom != "fail":
        smaller = retry.next_smaller_setting(settings, flags, job.parse)
        if smaller and (settings.on_oom == "retry" or _agreed(last, smaller[0])):
            return (*smaller, 0)
    if last.kind == "stopped" and job.crew and job.crew.change:
        return job.crew.change, flags, settings, 0
    if last.kind in ("lost rank", "hang") and restarts < settings.max_restarts:
        return f"the same again ({restarts + 1} of {settings.max_restarts} restarts)", flags, settings, 1
    return None


def _agreed(last, what: str) -> bool:
    if not sys.stdin.isatty():
        print("zerofit: --on_oom ask: there is no terminal to ask at", file=sys.stderr)
        return False
    return input(f"{last.sentence}\nstart again with {what}? [y/N] ").strip().lower() in ("y", "yes")


def _end(job: Job, endings: list, records: Path, opened: bool, settings, flags: list[str]) -> None:
    """Write report.json and report.md and print the cause, if there is something to report.

    Nothing is written before the run folder is opened, or if the only attempt ended as intended or by a user error.
    """
    last = endings[-1]
    if last.kind == "interrupted":
        _tell_interrupted(job.folder, last, opened)
    if not opened or (last.kind in ("finished", "stopped", "interrupted", "user error") and len(endings) == 1):
        return
    smaller = retry.next_smaller_setting(settings, flags, job.parse) if last.kind == "out of memory" else None
    advice = postmortem.advice(last, job.folder, settings, smaller)
    report_note = f"; {job.folder}/report.md"
    # An incomplete checkpoint; on a full disk the report needs the space.
    shutil.rmtree(job.folder / ASIDE, ignore_errors=True)
    try:
        postmortem.write(job.folder, endings, advice)
        if last.kind != "finished":
            archive = job.folder / "attempts" / str(len(endings))
            archive.mkdir(parents=True, exist_ok=True)
            for file in records.iterdir():
                shutil.move(file, archive / file.name)
    except OSError as error:  # such as the full disk that ended the job
        report_note = f" (report.md could not be written: {error.strerror})"
    if last.kind == "finished":
        return
    if last.kind not in ("user error", "stopped"):
        print(f"zerofit: {last.sentence}{report_note}", file=sys.stderr)
    if advice:
        print(f"zerofit: try: {advice}", file=sys.stderr)


def _tell_interrupted(folder: Path, last: postmortem.Outcome, opened: bool) -> None:
    """Print how to resume, and write "interrupted" into result.json.

    The ranks may not have written it: one that waited for another saw a broken connection first, or was killed.
    """
    ended = "interrupted" if last.signal == "SIGINT" else f"stopped by {last.signal}"
    print(f"zerofit: {resume.how_to_go_on(ended, folder, last.step)}", file=sys.stderr)
    if opened and not run_folder.finished(folder):
        status = {"status": "interrupted", "error": f"{ended} (by a signal to the job)", "steps": last.step or 0}
        run_folder.write_json(folder / "result.json", status)


# --- one attempt's processes ---


def watch(
    words: list[str], env: dict, records: Path, limit: float, count: int, stdout=None, crew: Coordinator | None = None
) -> tuple[int, list[int], int | None]:
    """Run the command in a new session, forward signals to it, leave no process behind.

    The first SIGTERM or SIGUSR1 (SLURM's warning before a time limit) makes training ranks save and end; a second
    signal kills them. On several nodes, node 0 decides on the first signal.

    Args: limit: seconds without a step of any rank after which the job is killed, 0 for no limit; count: ranks that
        must have made a step before `limit` or a save applies; stdout: a file instead of this process's.
    Returns: exit code (128 + n for signal n), signals received, the rank furthest behind if the job hung, else None.
    """
    rank_status.write_stop(records, 0)
    env = env | {rank_status.SUPERVISOR: str(os.getpid())}
    child = subprocess.Popen(words, env=env, start_new_session=True, stdout=stdout)
    heard: list[int] = []
    hung = None

    def pass_on(number, _frame):
        heard.append(number)
        if len(heard) == 1 and crew:
            return  # crew.look reports it to node 0, which decides for all nodes
        if len(heard) == 1 and number in rank_status.ASKS_TO_SAVE and _asked_to_save(records, count):
            return
        signal_group(child.pid, signal.SIGKILL if len(heard) > 1 else number)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    try:
        while True:
            try:
                code = child.wait(POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if crew:
                    crew.look(records, heard, lambda number: signal_group(child.pid, number))
                if not heard and hung is None and (hung := _hung(records, limit, count)) is not None:
                    rank_status.write_stacks(records)
                    signal_group(child.pid, signal.SIGKILL)
    finally:
        _end_ranks(records)
        for number, handler in before.items():
            signal.signal(number, handler)
    return (code if code >= 0 else 128 - code), heard, hung


def _asked_to_save(records: Path, count: int) -> bool:
    """Write the step after which all ranks save and end; return False if some rank has made no step yet.

    Ranks are less than two steps apart, since each step waits for the others: two more steps reach all of them.
    """
    pulses = rank_status.pulses(records)
    if len(pulses) < count:
        return False
    rank_status.write_stop(records, max(step for _, step, _ in pulses.values()) + 2)
    return True


def _end_ranks(records: Path) -> None:
    """End the ranks that outlived the launcher.

    torchrun starts each rank in its own session, so they are found by an environment variable.
    """
    import psutil

    remaining = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(rank_status.FOLDER) == str(records):
                remaining.append(process)
                process.send_signal(rank_status.ENDS_RANKS)
        except psutil.Error:
            continue
    for process in psutil.wait_procs(remaining, timeout=0.5)[1]:
        process.kill()
    psutil.wait_procs(remaining, timeout=5)


def _hung(records: Path, limit: float, count: int) -> int | None:
    """Return the rank furthest behind if none has made a step for `limit` seconds, else None."""
    pulses = rank_status.pulses(records) if limit else {}
    if len(pulses) < count or time.monotonic() - max(beat_time for _, _, beat_time in pulses.values()) < limit:
        return None
    return min(pulses, key=lambda rank: pulses[rank][1:])


def signal_group(group: int, number: int) -> None:
    if number in rank_status.ASKS_TO_SAVE:  # ranks and torchrun ignore these (launch/torchrun.py)
        number = signal.SIGHUP
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _host_kills() -> int:
    """Return how many processes of this control group the kernel has killed for lack of memory so far."""
    try:
        lines = Path("/sys/fs/cgroup/memory.events").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
