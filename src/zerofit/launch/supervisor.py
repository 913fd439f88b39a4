"""Supervise a job: forward signals, end hangs, restart after out-of-memory errors and lost ranks.

In a multi-node job, each supervisor watches the ranks of one node. torchrun's agents restart them
(launch/rendezvous.py).
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
from zerofit.checkpoint.facts import STAGING
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
class Supervised:
    """A job to supervise.

    start: (settings, folder, facts, trial) -> argv, writes job.json into the folder; resolve: (request, ranks) ->
    Settings; settings: include --output_dir; count: processes of this node; node: name for messages in a multi-node
    job; facts: collected before the first attempt, for run.json (job/job.py).
    """

    start: Callable[[Settings, Path, dict, dict], list[str]]
    resolve: Callable[[Request, int], Settings]
    settings: Settings
    folder: Path
    env: dict[str, str]
    count: int
    node: str = ""
    facts: dict = field(default_factory=dict)
    initial_health: health.Health | None = None  # this node, before the first attempt
    page: live.Page | None = None  # writes report.html while the job runs


@dataclass
class Attempt:
    """An attempt to start. change: difference from the previous attempt."""

    settings: Settings
    change: str = ""
    is_restart: bool = False


def run(job: Supervised) -> int:
    """Run the job and its restarts (--on_oom, --max_restarts); return the exit code."""
    job.initial_health, job.page = health.read(), live.Page(job.folder)
    try:
        return _run(job)
    finally:
        job.page.stop()


def _run(job: Supervised) -> int:
    endings, restarts = [], 0
    attempt = Attempt(job.settings)
    while True:
        records = Path(tempfile.mkdtemp(prefix="zerofit-attempt-"))
        try:
            last = _run_attempt(job, attempt, records)
            endings.append(last)
            next_attempt = _next_attempt(job, attempt, last, restarts)
            opened = (job.folder / "run.json").exists()
            if next_attempt is None:
                return _end_job(job, attempt, endings, records, opened)
            last.what_next = next_attempt.change
            restarts += next_attempt.is_restart
            checkpoint = _archive(job, endings, records) if opened else None
        finally:
            shutil.rmtree(records, ignore_errors=True)
        next_attempt.settings = _resumed(next_attempt.settings, checkpoint, job)
        attempt = next_attempt
        where = f"from {checkpoint.name}" if checkpoint else "from the start"
        print(
            f"zerofit: {last.sentence}\nzerofit: attempt {len(endings) + 1}, {where}: {last.what_next}", file=sys.stderr
        )


def run_node(job: Supervised, leads: bool) -> int:
    """Run this node's part of a multi-node job; return the exit code. leads: for node 0, which writes the report."""
    from zerofit.launch import rendezvous

    job.page = live.Page(job.folder) if leads else None
    try:
        with tempfile.TemporaryDirectory(prefix="zerofit-attempt-") as name:
            records = Path(name)
            env = os.environ | job.env | {rank_status.FOLDER: name}
            command = job.start(job.settings, records, {}, {})
            kills = postmortem.host_kills()
            code, signals, hung = watch(
                command, env, records, job.settings.hang_timeout, job.count, restarts_ranks=True
            )
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
            attempt = Attempt(_last_settings(job, opened))
            return _end_job(job, attempt, endings, records, opened)
    finally:
        if job.page:
            job.page.stop()


def _last_settings(job: Supervised, opened: bool) -> Settings:
    """Return the settings that the last attempt's ranks wrote into the run folder."""
    if opened:
        with contextlib.suppress(UserError):
            return job_file.read(job.folder / job_file.FILE, job.settings.recipe).settings
    return job.settings


def _run_attempt(job: Supervised, attempt: Attempt, records: Path) -> postmortem.Outcome:
    settings, kills = attempt.settings, postmortem.host_kills()
    command = job.start(settings, records, job.facts, {})
    env = os.environ | job.env | {rank_status.FOLDER: str(records)}
    code, signals, hung = watch(command, env, records, settings.hang_timeout, job.count)
    last = postmortem.ending(code, records, signals, hung, settings.hang_timeout, postmortem.host_kills() - kills)
    if last.kind == "out of memory":
        preflight.publish(None)  # the next attempt has other settings
    return last


# --- between attempts ---


def _next_attempt(job: Supervised, attempt: Attempt, last: postmortem.Outcome, restarts: int) -> Attempt | None:
    """Return the next attempt after the outcome `last`, or None to end the job."""
    settings = attempt.settings
    if last.kind == "out of memory" and settings.on_oom != "fail":
        smaller = next_settings.next_smaller_setting(settings, job.resolve, last.phase)
        if smaller and (settings.on_oom == "retry" or _confirmed(last, smaller[0])):
            change, settings = smaller
            return replace(attempt, settings=settings, change=change, is_restart=False)
    if change := without_copies_between_gpus(job, last, settings):
        return replace(attempt, change=change, is_restart=False)
    if last.kind in ("lost rank", "hang") and restarts < settings.max_restarts:
        change = f"the same settings (restart {restarts + 1} of {settings.max_restarts}){_degradation(job)}"
        return replace(attempt, change=change, is_restart=True)
    return None


def _archive(job: Supervised, endings: list[postmortem.Outcome], records: Path) -> Path | None:
    """Archive an attempt before the next one; return the checkpoint to resume, or None to start over."""
    with contextlib.suppress(OSError):  # the job continues on a full disk
        postmortem.write(job.folder, endings, "", continues=True)
    return retry.archive_attempt(job.folder, records)


def _degradation(job: Supervised) -> str:
    """Return how this node degraded since the job began, as part of a sentence; "" if it did not."""
    worse = health.degradations(job.initial_health, health.read()) if job.initial_health else ""
    return f"; on this node {worse}" if worse else ""


def without_copies_between_gpus(job: Supervised, last: postmortem.Outcome, settings: Settings) -> str:
    """Disable NCCL's direct GPU-to-GPU copies if GPUs of a node could not communicate with them.

    Returns: the change for the next attempt, "" if nothing changes.
    """
    already_off = network_check.NO_P2P in os.environ | job.env
    if last.phase != BrokenLinks.phase or already_off or settings.use_cpu:
        return ""
    job.env |= {network_check.NO_P2P: "1", network_check.P2P_FAILED: "1"}
    return f"the same settings with {network_check.NO_P2P}=1, without direct copies between GPUs"


def _resumed(settings: Settings, checkpoint: Path | None, job: Supervised) -> Settings:
    """Return the settings of an attempt that resumes a checkpoint; None: from the start."""
    requested = job.settings.resume_from_checkpoint  # the user's flag; its checkpoint may have been archived
    if checkpoint is not None:  # ranks verify its hashes, and may fall back to an older checkpoint
        request = settings.request.put(resume_from_checkpoint="auto")
    elif requested and requested.lower() not in next_settings.NEWEST and not Path(requested).exists():
        request = settings.request.drop("resume_from_checkpoint")
    else:
        return settings
    return job.resolve(request, settings.world_size)


def _confirmed(last, change: str) -> bool:
    if not sys.stdin.isatty():
        print("zerofit: --on_oom ask: no terminal for the question", file=sys.stderr)
        return False
    return input(f"{last.sentence}\nrestart with {change}? [y/N] ").strip().lower() in ("y", "yes")


def _end_job(job: Supervised, attempt: Attempt, endings: list[postmortem.Outcome], records: Path, opened: bool) -> int:
    """End the job after its last attempt; return its exit code."""
    last = endings[-1]
    if last.kind == "stopped" and attempt.settings.save_only_model:
        last.code = EXIT_CODES["interrupted"]  # with 75, SLURM would requeue the job forever
    _write_report(job, attempt, endings, records, opened)
    job.page.stop()
    if opened:
        run_page.write(job.folder, next_printed=last.kind not in ("finished", "out of memory", "diverged"))
    return last.code


def _write_report(
    job: Supervised, attempt: Attempt, endings: list[postmortem.Outcome], records: Path, opened: bool
) -> None:
    """Write report.json and report.md and print the cause.

    Write nothing before the run folder is opened, or if the only attempt ended as intended or by a user error.
    """
    last = endings[-1]
    if last.kind == "interrupted":
        _report_interruption(job.folder, last, opened)
    is_unreported = last.kind == "crash" or (job.node and last.kind in ("lost rank", "hang", "out of memory"))
    if not opened and is_unreported and not last.traceback:
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
    # Remove an incomplete checkpoint: on a full disk the report needs the space.
    shutil.rmtree(job.folder / STAGING, ignore_errors=True)
    try:
        postmortem.write(job.folder, endings, advice)
        if last.kind != "finished" and not job.node:  # on several nodes, the agents do it
            retry.archive_records(job.folder, records)
    except OSError as error:  # e.g. a full disk
        report_note = f" (report.md could not be written: {error.strerror})"
    if last.kind == "finished":
        return
    if last.kind not in ("user error", "unavailable", "stopped"):
        print(f"zerofit: {_cause(last, alone=not job.node)}{report_note}", file=sys.stderr)
    if advice:
        print(f"zerofit: try: {advice}", file=sys.stderr)


def _cause(last: postmortem.Outcome, alone: bool) -> str:
    """Return why the job ended, without the cause if rank 0 has already printed it."""
    kinds = ("out of memory", "disk full", "diverged")
    if alone and last.rank == 0 and last.kind in kinds and not last.signal:
        return last.sentence.partition(":")[0]
    return last.sentence


def _report_interruption(folder: Path, last: postmortem.Outcome, opened: bool) -> None:
    """Print how to resume, and write "interrupted" into result.json.

    The ranks may not have written it: they may be killed, or end with a broken connection.
    """
    ended = "interrupted" if last.signal == "SIGINT" else f"stopped by {last.signal}"
    print(f"zerofit: {resumable.how_to_continue(ended, folder, last.step)}", file=sys.stderr)
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
    restarts_ranks: bool = False,
) -> tuple[int, list[int], int | None]:
    """Run the command in a new session, forward signals to it, and end all its processes.

    The first SIGTERM, SIGUSR1 (SLURM's warning before a time limit) or SIGHUP (a closed terminal) makes the ranks of
    all nodes save and end; a second signal kills them.

    Args: limit: seconds without a step on any rank until the job is killed, 0 for no limit; count: ranks that must have
        made a step before `limit` or a save applies; stdout: output file; restarts_ranks: the command itself restarts
        ended ranks, so a hang only ends the ranks.
    Returns: exit code (128 + n for signal n), signals received, the rank furthest behind if the job hung, else None.
    """
    env = env | {rank_status.SUPERVISOR: str(os.getpid())}
    nohup_handler = signal.signal(signal.SIGHUP, lambda *_: None)  # ranks would inherit nohup's ignored SIGHUP
    try:
        child = subprocess.Popen(command, env=env, start_new_session=True, stdout=stdout)
    finally:
        signal.signal(signal.SIGHUP, nohup_handler)
    signals: list[int] = []
    hung = None
    last_poll = awake = time.monotonic()

    def forward(number: int) -> None:
        if len(signals) > 1:
            number = signal.SIGKILL
        elif number in rank_status.SAVE_SIGNALS and _request_save(records, count):
            return
        signal_group(child.pid, number)

    before = rank_status.handle_signals(rank_status.receiver(signals, forward))
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
                    if restarts_ranks:
                        rank_status.write_json(records / rank_status.HUNG_FILE, {"rank": hung, "limit": limit})
                        rank_status.kill_ranks(records)
                    else:
                        signal_group(child.pid, signal.SIGKILL)
                elif restarts_ranks and not (records / rank_status.HUNG_FILE).exists():  # the agent has moved it
                    hung = None
                last_poll = time.monotonic()
    finally:
        _end_ranks(records)
        for number, handler in before.items():
            signal.signal(number, handler)
        if signal.SIGHUP in signals:
            _leave_terminal()
    return (code if code >= 0 else 128 - code), signals, hung


def _request_save(records: Path, count: int) -> bool:
    """Request the ranks to save and end; return False if a rank has not made a step yet and cannot save."""
    if len(rank_status.heartbeats(records)) < count:
        return False
    (records / rank_status.SAVE_REQUESTED_FILE).touch()
    rank_status.request_save(records)
    return True


def _end_ranks(records: Path) -> None:
    """End the ranks that outlived the launcher. They have separate sessions, so a signal to its group misses them."""
    remaining = []
    for process in psutil.process_iter():
        try:
            if rank_status.belongs_to_attempt(process, records):
                remaining.append(process)
                process.send_signal(rank_status.TORCHRUN_END_SIGNAL)
        except psutil.Error:
            continue
    for process in psutil.wait_procs(remaining, timeout=0.5)[1]:
        process.kill()
    psutil.wait_procs(remaining, timeout=5)


def _hung(records: Path, limit: float, count: int, awake: float = 0.0) -> int | None:
    """Return the rank furthest behind if no rank has made a step for `limit` seconds, else None.

    Args: awake: time.monotonic() of the end of a suspension, from which the limit counts.
    """
    heartbeats = rank_status.heartbeats(records) if limit else {}
    beats = [beat_time for _, _, beat_time in heartbeats.values()]
    if len(beats) < count or time.monotonic() - max(*beats, awake) < limit:
        return None
    return min(heartbeats, key=lambda rank: heartbeats[rank][1:])


def _leave_terminal() -> None:
    """Redirect output to /dev/null if the terminal is gone, since each write would fail."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def signal_group(group: int, number: int) -> None:
    if number in rank_status.BROADCAST_SIGNALS:  # launch/torchrun.py ignores these; ranks would save
        number = signal.SIGHUP
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
