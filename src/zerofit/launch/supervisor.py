"""Supervise a job: forward signals, end hangs, restart after out-of-memory errors and lost ranks."""

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
from zerofit.base.errors import EXIT_CODES, BrokenLinks
from zerofit.base.phases import SUSPENDED_SECONDS
from zerofit.checkpoint import next_settings, resumable
from zerofit.checkpoint.facts import ASIDE
from zerofit.job import run_folder
from zerofit.job.request import Request
from zerofit.job.settings import Settings
from zerofit.launch import postmortem, retry
from zerofit.launch.cluster.coordinator import Coordinator
from zerofit.plan import preflight
from zerofit.report import live, run_page
from zerofit.train import network_check

POLL_SECONDS = 0.5


@dataclass
class Job:
    """What `run` needs to start attempts.

    start: (settings, folder, facts, trial) -> argv, whose job.json it has written into the folder; resolve: (request,
    ranks) -> Settings; settings: with --output_dir; count: processes of this node; coordinator: None for a job on one
    node; facts: found before the first attempt, for run.json (job/job.py).
    """

    start: Callable[[Settings, Path, dict, dict], list[str]]
    resolve: Callable[[Request, int], Settings]
    settings: Settings
    folder: Path
    env: dict[str, str]
    count: int
    coordinator: Coordinator | None = None
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
            if following and job.coordinator:
                following = _on_present_nodes(job, following)
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


def follow(job: Job) -> None:
    """Run this node's part of each attempt that node 0 orders. Raises: SystemExit with the job's exit code."""
    coordinator = job.coordinator
    while True:
        order = coordinator.next_order()
        ranks, folder = sum(order.nodes.values()), Path(order.folder)
        asked = next_settings.with_decisions(job.settings.request, order.decided, folder)
        settings = job.resolve(asked.put(output_dir=order.folder), ranks)
        print(f"{coordinator.name}: {ranks} processes on {len(order.nodes)} nodes; run folder {folder}", flush=True)
        with tempfile.TemporaryDirectory(prefix="zerofit-attempt-") as records:
            coordinator.report(*_watch(job, settings, Path(records)), Path(records))


def _run_attempt(job: Job, attempt: Attempt, records: Path) -> postmortem.Outcome:
    if job.coordinator:
        job.coordinator.order(attempt.settings.request, job.folder)
    kills = _host_kills()
    code, signals, hung = _watch(job, attempt.settings, records)
    kills = _host_kills() - kills
    if job.coordinator:
        job.coordinator.report(code, signals, hung, records)
        code, signals, hung = job.coordinator.collect(records)
        if lost := job.coordinator.attempt.lost:
            return postmortem.lost_node(", ".join(map(job.coordinator.meeting.host_of, lost)), records)
    last = postmortem.ending(code, records, signals, hung, attempt.settings.hang_timeout, kills)
    if last.kind == "out of memory":
        preflight.publish(None)  # the next attempt has other settings
    return last


def _watch(job: Job, settings: Settings, records: Path) -> tuple[int, list[int], int | None]:
    command = job.start(settings, records, job.facts, {})
    added_env = {rank_status.FOLDER: str(records)}
    if job.coordinator:
        added_env |= job.coordinator.environment()
    env = os.environ | job.env | added_env
    return watch(command, env, records, settings.hang_timeout, job.count, coordinator=job.coordinator)


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
    if last.kind == "stopped" and job.coordinator and (change := job.coordinator.attempt.change):
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
    on_one_node = job.coordinator is None and not settings.use_cpu
    tried = network_check.WITHOUT_PEERS in os.environ | job.env
    if last.phase != BrokenLinks.phase or tried or not on_one_node:
        return ""
    job.env |= {network_check.WITHOUT_PEERS: "1", network_check.PEERS_FAILED: "1"}
    return f"the same with {network_check.WITHOUT_PEERS}=1, without copies from GPU to GPU"


def _on_present_nodes(job: Job, attempt: Attempt) -> Attempt | None:
    """Return the attempt on the present nodes, with the same effective batch; None if they are too few."""
    nodes = job.coordinator.next_nodes()
    if not nodes:
        return None
    settings, ranks = attempt.settings, sum(nodes.values())
    if ranks != settings.world_size:
        batch = next_settings.same_batch(
            settings.effective_batch_size, settings.per_device_train_batch_size, ranks, settings.ranks_per_row
        )
        kept = replace(settings.request, notes=())  # why a plan has chosen what is changed here
        asked = kept.drop(*next_settings.BATCH).put(**batch, zero=settings.zero, gpus=ranks)
        settings = job.resolve(asked, ranks)
    place = f"{len(nodes)} node{'s' * (len(nodes) > 1)} with {ranks} processes"
    change = f"{attempt.change}, on {place}" if attempt.change else place
    return replace(attempt, settings=settings, change=change)


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
    """End the job after its last attempt, on the other nodes too; return its exit code."""
    last = endings[-1]
    if last.kind == "stopped" and attempt.settings.save_only_model:
        last.code = EXIT_CODES["interrupted"]  # with 75, SLURM would requeue it forever
    _write_report(job, attempt, endings, records, opened)
    job.page.stop()
    if opened:
        run_page.write(job.folder, told=last.kind not in ("finished", "out of memory", "diverged"))
    if job.coordinator:
        job.coordinator.end(last.code, "" if last.kind == "finished" else last.sentence)
    return last.code


def _write_report(job: Job, attempt: Attempt, endings: list[postmortem.Outcome], records: Path, opened: bool) -> None:
    """Write report.json and report.md and print the cause, if there is something to report.

    Nothing is written before the run folder is opened, or if the only attempt ended as intended or by a user error.
    """
    last = endings[-1]
    if last.kind == "interrupted":
        _tell_interrupted(job.folder, last, opened)
    if not opened and last.kind == "crash" and not last.traceback:
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
        if last.kind != "finished":
            retry.archive_records(job.folder, records)
    except OSError as error:  # such as the full disk that ended the job
        report_note = f" (report.md could not be written: {error.strerror})"
    if last.kind == "finished":
        return
    if last.kind not in ("user error", "unavailable", "stopped"):
        print(f"zerofit: {_cause(last, alone=job.coordinator is None)}{report_note}", file=sys.stderr)
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
    coordinator: Coordinator | None = None,
) -> tuple[int, list[int], int | None]:
    """Run the command in a new session, forward signals to it, leave no process behind.

    The first SIGTERM, SIGUSR1 (SLURM's warning before a time limit) or SIGHUP (a terminal that closes) makes training
    ranks save and end, on several nodes those of all; a second signal kills them.

    Args: limit: seconds without a step of any rank after which the job is killed, 0 for no limit; count: ranks that
        must have made a step before `limit` or a save applies; stdout: a file instead of this process's;
        coordinator: None on one node.
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
    before = rank_status.handle_signals(_receiver(signals, child.pid, records, count))
    try:
        while True:
            try:
                code = child.wait(POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() - last_poll > SUSPENDED_SECONDS:
                    awake = time.monotonic()
                    if coordinator:
                        coordinator.round.restart_clocks()
                if coordinator:
                    coordinator.poll(records, lambda number: signal_group(child.pid, number))
                if not signals and hung is None and (hung := _hung(records, limit, count, awake)) is not None:
                    rank_status.write_stacks(records)
                    signal_group(child.pid, signal.SIGKILL)
                last_poll = time.monotonic()
    finally:
        _end_ranks(records)
        for number, handler in before.items():
            signal.signal(number, handler)
        if signal.SIGHUP in signals:
            _leave_terminal()
    return (code if code >= 0 else 128 - code), signals, hung


def _receiver(signals: list[int], group: int, records: Path, count: int):
    """Return a handler that adds the signals to a list and passes them on to the process group."""
    first = None

    def pass_on(number, _frame):
        nonlocal first
        if rank_status.is_repeated(number, first):
            return
        first = first or time.monotonic()
        signals.append(number)
        if len(signals) == 1 and number in rank_status.ASKS_TO_SAVE and _asked_to_save(records, count):
            return
        signal_group(group, signal.SIGKILL if len(signals) > 1 else number)

    return pass_on


def _asked_to_save(records: Path, count: int) -> bool:
    """Ask the ranks to save and end; return False if some rank has made no step yet, and cannot."""
    if len(rank_status.heartbeats(records)) < count:
        return False
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


def _host_kills() -> int:
    """Return how many processes of this control group the kernel has killed for lack of memory so far."""
    try:
        lines = Path("/sys/fs/cgroup/memory.events").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
