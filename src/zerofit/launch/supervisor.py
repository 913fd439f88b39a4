"""Supervise a job: forward signals, end hangs, restart after out-of-memory errors and lost ranks.

Of a job on several nodes a supervisor watches the ranks of its own node; torchrun's agents start them again, as
launch/rendezvous.py decides.
"""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from zerofit.base import health, rank_status
from zerofit.base.errors import EXIT_CODES, BrokenLinks, UserError
from zerofit.base.phases import SUSPENDED_SECONDS
from zerofit.checkpoint import next_settings, resumable
from zerofit.checkpoint.facts import ASIDE
from zerofit.job import job as job_file
from zerofit.job import run_folder
from zerofit.job.request import Request
from zerofit.job.settings import Settings
from zerofit.launch import postmortem, retry
from zerofit.plan import preflight
from zerofit.report import live, run_page
from zerofit.train import network_check

POLL_SECONDS = 0.5


@dataclass
class Job:
    """What `run` needs to start attempts.

    start: (settings, folder, facts, trial) -> argv, whose job.json it has written into the folder; resolve: (request,
    ranks) -> Settings; settings: with --output_dir; count: processes of this node; node: its name for messages, of a
    job on several; facts: found before the first attempt, for run.json (job/job.py).
    """

    start: Callable[[Settings, Path, dict, dict], list[str]]
    resolve: Callable[[Request, int], Settings]
    settings: Settings
    folder: Path
    env: dict[str, str]
    count: int
    node: str = ""
    facts: dict = field(default_factory=dict)
    healthy: health.Health | None = None  # this node, before the first attempt
    page: live.Page | None = None  # what writes report.html while the job runs


@dataclass
class Attempt:
    """One attempt to start. change: what differs from the previous one."""

    settings: Settings
    change: str = ""
    is_restart: bool = False


def run(job: Job) -> int:
    """Run the job, with new attempts as far as --on_oom and --max_restarts allow; return the exit code."""
    job.healthy, job.page = health.look(), live.Page(job.folder)
    try:
        return _run(job)
    finally:
        job.page.stop()


def _run(job: Job) -> int:
    endings, restarts = [], 0
    attempt = Attempt(job.settings)
    while True:
        records = Path(tempfile.mkdtemp(prefix="zerofit-attempt-"))
        try:
            last = _run_attempt(job, attempt, records)
            endings.append(last)
            following = _next_attempt(job, attempt, last, restarts)
            opened = (job.folder / "run.json").exists()
            if following is None:
                return _end_job(job, attempt, endings, records, opened)
            last.what_next = following.change
            restarts += following.is_restart
            checkpoint = _archive(job, endings, records) if opened else None
        finally:
            shutil.rmtree(records, ignore_errors=True)
        following.settings = _resumed(following.settings, checkpoint, job)
        attempt = following
        where = f"from {checkpoint.name}" if checkpoint else "from the start"
        print(
            f"zerofit: {last.sentence}\nzerofit: attempt {len(endings) + 1}, {where}: {last.what_next}", file=sys.stderr
        )


def run_node(job: Job, leads: bool) -> int:
    """Run this node's part of a job on several nodes to its end; return the exit code.

    Args: leads: whether this is node 0, which writes the report.
    """
    from zerofit.launch import rendezvous

    job.page = live.Page(job.folder) if leads else None
    try:
        with tempfile.TemporaryDirectory(prefix="zerofit-attempt-") as name:
            records = Path(name)
            env = os.environ | job.env | {rank_status.FOLDER: name}
            command = job.start(job.settings, records, {}, {})
            kills = postmortem.host_kills()
            code, signals, hung = watch(command, env, records, job.settings.hang_timeout, job.count, goes_on=True)
            endings = rendezvous.endings(records)
            if not endings or endings[-1].what_next:
                limit, kills = job.settings.hang_timeout, postmortem.host_kills() - kills
                endings.append(postmortem.ending(code, records, signals, hung, limit, kills))
            opened = (job.folder / "run.json").exists()
            if not leads:
                last = endings[-1]
                if last.kind not in ("finished", "user error"):
                    print(f"{job.node}: zerofit: {last.sentence}", file=sys.stderr)
                return last.code
            attempt = Attempt(_as_last_resolved(job, opened))
            return _end_job(job, attempt, endings, records, opened)
    finally:
        if job.page:
            job.page.stop()


def _as_last_resolved(job: Job, opened: bool) -> Settings:
    """Return the settings of the last attempt, which its ranks have written into the run folder."""
    if opened:
        with contextlib.suppress(UserError):
            return job_file.read(job.folder / job_file.FILE, job.settings.recipe).settings
    return job.settings


def _run_attempt(job: Job, attempt: Attempt, records: Path) -> postmortem.Outcome:
    settings, kills = attempt.settings, postmortem.host_kills()
    command = job.start(settings, records, job.facts, {})
    env = os.environ | job.env | {rank_status.FOLDER: str(records)}
    code, signals, hung = watch(command, env, records, settings.hang_timeout, job.count)
    last = postmortem.ending(code, records, signals, hung, settings.hang_timeout, postmortem.host_kills() - kills)
    if last.kind == "out of memory":
        preflight.publish(None)  # the next attempt has other settings
    return last


# --- between attempts ---


def _next_attempt(job: Job, attempt: Attempt, last: postmortem.Outcome, restarts: int) -> Attempt | None:
    """Return the attempt that follows one that ended like `last`; None to end the job."""
    settings = attempt.settings
    if last.kind == "out of memory" and settings.on_oom != "fail":
        smaller = next_settings.next_smaller_setting(settings, job.resolve, last.phase)
        if smaller and (settings.on_oom == "retry" or _agreed(last, smaller[0])):
            change, settings = smaller
            return replace(attempt, settings=settings, change=change, is_restart=False)
    if change := without_copies_between_gpus(job, last, settings):
        return replace(attempt, change=change, is_restart=False)
    if last.kind in ("lost rank", "hang") and restarts < settings.max_restarts:
        change = f"the same settings (restart {restarts + 1} of {settings.max_restarts}){_damage(job)}"
        return replace(attempt, change=change, is_restart=True)
    return None


def _archive(job: Job, endings: list[postmortem.Outcome], records: Path) -> Path | None:
    """Archive an attempt that another follows; return the checkpoint to go on from, None: from the start."""
    with contextlib.suppress(OSError):  # a full disk: the job goes on without
        postmortem.write(job.folder, endings, "", goes_on=True)
    return retry.archive_attempt(job.folder, records)


def _damage(job: Job) -> str:
    """Return what has degraded on this node since the job began, as a part of a sentence; "" for nothing."""
    worse = health.worse(job.healthy, health.look()) if job.healthy else ""
    return f"; on this node {worse}" if worse else ""


def without_copies_between_gpus(job: Job, last: postmortem.Outcome, settings: Settings) -> str:
    """Turn NCCL's copies from GPU to GPU off for the job if GPUs of one node did not answer each other with them.

    Returns: the change for the next attempt; "" if there is none.
    """
    tried = network_check.WITHOUT_PEERS in os.environ | job.env
    if last.phase != BrokenLinks.phase or tried or settings.use_cpu:
        return ""
    job.env |= {network_check.WITHOUT_PEERS: "1", network_check.PEERS_FAILED: "1"}
    return f"the same with {network_check.WITHOUT_PEERS}=1, without copies from GPU to GPU"


def _resumed(settings: Settings, checkpoint: Path | None, job: Job) -> Settings:
    """Return the settings of an attempt that continues from a checkpoint; None: from the start."""
    requested = job.settings.resume_from_checkpoint  # the user's flag; its checkpoint may have been archived
    if checkpoint is not None:
        asked = settings.request.put(
            resume_from_checkpoint="auto"
        )  # ranks verify its hashes, and may take an older one
    elif requested and requested.lower() not in next_settings.NEWEST and not Path(requested).exists():
        asked = settings.request.drop("resume_from_checkpoint")
    else:
        return settings
    return job.resolve(asked, settings.world_size)


def _agreed(last, what: str) -> bool:
    if not sys.stdin.isatty():
        print("zerofit: --on_oom ask: no terminal to ask on", file=sys.stderr)
        return False
    return input(f"{last.sentence}\nstart again with {what}? [y/N] ").strip().lower() in ("y", "yes")


def _end_job(job: Job, attempt: Attempt, endings: list[postmortem.Outcome], records: Path, opened: bool) -> int:
    """End the job after its last attempt; return its exit code."""
    last = endings[-1]
    if last.kind == "stopped" and attempt.settings.save_only_model:
        last.code = EXIT_CODES["interrupted"]  # with 75, SLURM would requeue it forever
    _write_report(job, attempt, endings, records, opened)
    job.page.stop()
    if opened:
        run_page.write(job.folder, told=last.kind not in ("finished", "out of memory", "diverged"))
    return last.code


def _write_report(job: Job, attempt: Attempt, endings: list[postmortem.Outcome], records: Path, opened: bool) -> None:
    """Write report.json and report.md and print the cause, if there is something to report.

    Nothing is written before the run folder is opened, or if the only attempt ended as intended or by a user error.
    """
    last = endings[-1]
    if last.kind == "interrupted":
        _tell_interrupted(job.folder, last, opened)
    is_untold = last.kind == "crash" or (job.node and last.kind in ("lost rank", "hang", "out of memory"))
    if not opened and is_untold and not last.traceback:
        print(f"zerofit: {last.sentence}", file=sys.stderr)
    if not opened or (
        last.kind in ("finished", "stopped", "interrupted", "user error", "unavailable") and len(endings) == 1
    ):
        return
    smaller = None
    if last.kind == "out of memory":
        smaller = next_settings.next_smaller_setting(attempt.settings, job.resolve, last.phase)
    advice = postmortem.advice(last, job.folder, attempt.settings, smaller)
    report_note = f"; {job.folder}/report.md"
    # An incomplete checkpoint; on a full disk the report needs the space.
    shutil.rmtree(job.folder / ASIDE, ignore_errors=True)
    try:
        postmortem.write(job.folder, endings, advice)
        if last.kind != "finished" and not job.node:  # there the agents have
            retry.archive_records(job.folder, records)
    except OSError as error:  # such as the full disk that ended the job
        report_note = f" (report.md could not be written: {error.strerror})"
    if last.kind == "finished":
        return
    if last.kind not in ("user error", "unavailable", "stopped"):
        print(f"zerofit: {_cause(last, alone=not job.node)}{report_note}", file=sys.stderr)
    if advice:
        print(f"zerofit: try: {advice}", file=sys.stderr)


def _cause(last: postmortem.Outcome, alone: bool) -> str:
    """Return why the job ended, without the cause if rank 0 has already printed it on this terminal."""
    kinds = ("out of memory", "disk full", "diverged")
    if alone and last.rank == 0 and last.kind in kinds and not last.signal:
        return last.sentence.partition(":")[0]
    return last.sentence


def _tell_interrupted(folder: Path, last: postmortem.Outcome, opened: bool) -> None:
    """Print how to resume, and write "interrupted" into result.json.

    The ranks may not have written it: some end with a broken connection, others are killed.
    """
    ended = "interrupted" if last.signal == "SIGINT" else f"stopped by {last.signal}"
    print(f"zerofit: {resumable.how_to_go_on(ended, folder, last.step)}", file=sys.stderr)
    if opened and not run_folder.finished(folder):
        status = {"status": "interrupted", "error": f"{ended} (by a signal to the job)", "steps": last.step or 0}
        run_folder.write_json(folder / "result.json", status)


# --- one attempt's processes ---


def watch(
    command: list[str],
    env: dict,
    records: Path,
    limit: float,
    count: int,
    stdout=None,
    goes_on: bool = False,
) -> tuple[int, list[int], int | None]:
    """Run the command in a new session, forward signals to it, leave no process behind.

    The first SIGTERM, SIGUSR1 (SLURM's warning before a time limit) or SIGHUP (a terminal that closes) makes training
    ranks save and end, on several nodes those of all; a second signal kills them.

    Args: limit: seconds without a step of any rank after which the job is killed, 0 for no limit; count: ranks that
        must have made a step before `limit` or a save applies; stdout: a file instead of this process's;
        goes_on: whether the command starts ranks that have ended again; a hang then ends the ranks only.
    Returns: exit code (128 + n for signal n), signals received, the rank furthest behind if the job hung, else None.
    """
    env = env | {rank_status.SUPERVISOR: str(os.getpid())}
    of_nohup = signal.signal(signal.SIGHUP, lambda *_: None)  # ignored by nohup, it would be in the ranks too
    try:
        child = subprocess.Popen(command, env=env, start_new_session=True, stdout=stdout)
    finally:
        signal.signal(signal.SIGHUP, of_nohup)
    signals: list[int] = []
    hung = None
    last_poll = awake = time.monotonic()

    def pass_on(number: int) -> None:
        if len(signals) > 1:
            number = signal.SIGKILL
        elif number in rank_status.ASKS_TO_SAVE and _asked_to_save(records, count):
            return
        signal_group(child.pid, number)

    before = rank_status.handle_signals(rank_status.receiver(signals, pass_on))
    try:
        while True:
            try:
                code = child.wait(POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() - last_poll > SUSPENDED_SECONDS:
                    awake = time.monotonic()
                if not signals and hung is None and (hung := _hung(records, limit, count, awake)) is not None:
                    rank_status.write_stacks(records)
                    if goes_on:
                        rank_status.write_json(records / rank_status.HUNG, {"rank": hung, "limit": limit})
                        rank_status.kill_ranks(records)
                    else:
                        signal_group(child.pid, signal.SIGKILL)
                elif goes_on and not (records / rank_status.HUNG).exists():  # the agent has moved it
                    hung = None
                last_poll = time.monotonic()
    finally:
        _end_ranks(records)
        for number, handler in before.items():
            signal.signal(number, handler)
        if signal.SIGHUP in signals:
            _leave_terminal()
    return (code if code >= 0 else 128 - code), signals, hung


def _asked_to_save(records: Path, count: int) -> bool:
    """Ask the ranks to save and end; return False if some rank has made no step yet, and cannot."""
    if len(rank_status.heartbeats(records)) < count:
        return False
    (records / rank_status.ASKED).touch()
    rank_status.ask_to_save(records)
    return True


def _end_ranks(records: Path) -> None:
    """End the ranks that outlived the launcher; each has a session of its own, so its group does not reach them."""
    remaining = []
    for process in psutil.process_iter():
        try:
            if rank_status.is_of(process, records):
                remaining.append(process)
                process.send_signal(rank_status.ENDS_RANKS)
        except psutil.Error:
            continue
    for process in psutil.wait_procs(remaining, timeout=0.5)[1]:
        process.kill()
    psutil.wait_procs(remaining, timeout=5)


def _hung(records: Path, limit: float, count: int, awake: float = 0.0) -> int | None:
    """Return the rank furthest behind if none has made a step for `limit` seconds, else None.

    Args: awake: time.monotonic() from which on to wait for a step.
    """
    heartbeats = rank_status.heartbeats(records) if limit else {}
    beats = [beat_time for _, _, beat_time in heartbeats.values()]
    if len(beats) < count or time.monotonic() - max(*beats, awake) < limit:
        return None
    return min(heartbeats, key=lambda rank: heartbeats[rank][1:])


def _leave_terminal() -> None:
    """Redirect output to /dev/null if the terminal is gone: each line would be an error."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def signal_group(group: int, number: int) -> None:
    if number in rank_status.SENT_TO_ALL:  # torchrun ignores these (launch/torchrun.py), ranks save
        number = signal.SIGHUP
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
