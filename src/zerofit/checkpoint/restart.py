"""Continue in the run folder when torchrun's agent or SLURM restarts the job."""

import hashlib
import os
import socket
from pathlib import Path

import psutil

from zerofit.base import distributed, rank_status
from zerofit.checkpoint import next_settings
from zerofit.config import resolve
from zerofit.job import job, run_folder
from zerofit.job.request import Request
from zerofit.job.settings import Settings

SMALLER = "next.json"  # in the run folder: what the next start changes after out of memory


def starters() -> list[str]:
    """Return an id of each node's agent, under which this job runs; [] without one. Collective.

    torchrun counts a restart (TORCHELASTIC_RESTART_COUNT) only on the node whose rank has failed, and none when a node
    joins, so a restart is recognized by the agent's process.
    """
    return [agent for agent in distributed.of_nodes(_agent()) if agent]


def _agent() -> str:
    if distributed.BY_AGENT not in os.environ:
        return ""
    parent = psutil.Process(os.getppid())
    return hashlib.sha256(f"{socket.gethostname()} {parent.pid} {parent.create_time()}".encode()).hexdigest()[:16]


def go_on(settings: Settings) -> None:
    """Make --resume_from_checkpoint auto the default of a restart, to continue from the newest checkpoint.

    It also replaces the checkpoint that the job began from, once the job has saved one.
    """
    asked = settings.resume_from_checkpoint
    if job.running() is not None or not settings.output_dir or str(asked).lower() in ("false", "auto"):
        return
    folder = run_folder.name_folder(settings)
    known = run_folder.read_record(folder / "run.json")
    is_restart = set(known.get("started_by", [])) & set(settings.started_by) or distributed.queued_again()
    if known and is_restart and not run_folder.finished(folder) and (asked is None or run_folder.checkpoints(folder)):
        print(f"note: the job was restarted and continues in {folder}", flush=True)
        settings.resume_from_checkpoint = "auto"


def earlier_run(settings: Settings) -> Path | None:
    """Return the folder of the run that a job will go on with; None: it begins one.

    It may be asked before rank 0 has looked for the checkpoint.
    """
    asked, folder = settings.resume_from_checkpoint, settings.output_dir and run_folder.name_folder(settings)
    if asked is None:
        starters = run_folder.read_record(folder / "run.json").get("started_by", []) if folder else []
        return folder if starters and (_agent() in starters or distributed.queued_again()) else None
    if str(asked).lower() in next_settings.NEWEST:
        return folder or None
    return None if str(asked).lower() == "false" else Path(asked).parent


def as_the_run_goes_on(settings: Settings) -> Settings:
    """Return the settings of a job that torchrun's agent restarts.

    They are smaller after out of memory, and keep the run's effective batch on other ranks.
    Raises: UserError if the ranks do not divide it.
    """
    if distributed.BY_AGENT not in os.environ or not settings.output_dir:
        return settings
    folder = run_folder.name_folder(settings)
    left = run_folder.read_record(folder / SMALLER)
    is_smaller = _agent() in left.get("started_by", [])
    asked = settings.request
    if is_smaller:
        asked = next_settings.with_decisions(asked, left.get("decided", {}), folder, str(folder / SMALLER))
    batch = _batch_of_run(folder, settings, asked) if is_smaller or "effective_batch_size" not in settings.given else {}
    if not is_smaller and not batch:
        return settings
    if batch:
        asked = asked.drop(*next_settings.BATCH).put(**batch)
    again = resolve.of_this_process(lambda: resolve.resolve(asked, settings.world_size))
    if is_smaller:
        again.decisions.append(f"{left.get('change')}: the run was out of GPU memory ({folder / SMALLER})")
    return again


def _batch_of_run(folder: Path, settings: Settings, asked: Request) -> dict[str, int]:
    """Return the arguments for the run's effective batch on other ranks; {} on as many as before, or without a run."""
    run = run_folder.read_record(folder / "run.json")
    whole, micro = (run.get("arguments", {}).get(name, {}).get("value") for name in next_settings.BATCH[:2])
    if run.get("world_size", settings.world_size) == settings.world_size or {type(whole), type(micro)} != {int}:
        return {}
    micro = min(micro, asked.get("per_device_train_batch_size", micro))
    return next_settings.same_batch(whole, micro, settings.world_size, settings.ranks_per_row)


def leave_smaller(settings: Settings, phase: str) -> None:
    """Write what a restart by torchrun's agent changes, after this rank was out of memory, to the run folder.

    With a supervisor nothing is written: it chooses the change itself. Args: phase: of errors.OutOfMemory.
    """
    restarts = [int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    if rank_status.folder() or restarts[0] >= restarts[1] or settings.on_oom != "retry":
        return
    if following := next_settings.next_smaller_setting(settings, resolve.resolve, phase):
        change, smaller = following
        decided = next_settings.decisions(smaller.request)
        left = {"started_by": settings.started_by, "change": change, "decided": decided}
        run_folder.write_json(Path(settings.output_dir) / SMALLER, left)
