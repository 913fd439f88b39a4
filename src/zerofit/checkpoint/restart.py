"""Continue in the run folder when torchrun's agent or SLURM restarts the job."""

import hashlib
import os
import socket
import sys
from pathlib import Path

import psutil

from zerofit.base import distributed
from zerofit.checkpoint import next_settings
from zerofit.config import parse, resolve
from zerofit.job import groups, job, run_folder
from zerofit.job.recipe import Recipe
from zerofit.job.request import Request
from zerofit.job.settings import Settings


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


def settings_of(recipe: Recipe) -> Settings:
    """Return the settings of this process's command line; of a job that torchrun's agent restarts, as the run goes on.

    They are smaller after out of memory, and keep the run's effective batch on other ranks.
    Raises: UserError for the user's mistakes, and if the ranks do not divide the effective batch.
    """
    asked, ranks = parse.request(recipe, sys.argv[1:]), distributed.size()
    if distributed.BY_AGENT not in os.environ or not asked.get("output_dir"):
        return resolve.of_this_process(lambda: resolve.resolve(asked, ranks))
    folder = Path(asked.get("output_dir")).expanduser()
    left = run_folder.read_record(folder / run_folder.SMALLER)
    is_smaller = bool(left) and (distributed.RESTARTED in os.environ or _agent() in left.get("started_by", []))
    if is_smaller:
        asked = next_settings.with_decisions(asked, left.get("decided", {}), str(folder / run_folder.SMALLER))
    if batch := _batch_of_run(folder, ranks, asked):
        asked = asked.drop(*next_settings.BATCH).put(**batch)
    settings = resolve.of_this_process(lambda: resolve.resolve(asked, ranks))
    if is_smaller:
        settings.decisions.append(
            f"{left.get('change')}: the run was out of GPU memory ({folder / run_folder.SMALLER})"
        )
    return settings


def _batch_of_run(folder: Path, ranks: int, asked: Request) -> dict[str, int]:
    """Return the arguments for the run's effective batch on other ranks.

    {}: on as many as before, without a run, or where another effective batch is asked for.
    """
    run = run_folder.read_record(folder / "run.json")
    values = {name: entry.get("value") for name, entry in run.get("arguments", {}).items()}
    whole, micro = (values.get(name) for name in next_settings.BATCH[:2])
    if run.get("world_size", ranks) == ranks or {type(whole), type(micro)} != {int}:
        return {}
    if asked.get("effective_batch_size", whole) != whole:
        return {}
    micro = min(micro, asked.get("per_device_train_batch_size", micro))
    return next_settings.same_batch(whole, micro, ranks, groups.per_row(values))


def leave_smaller(settings: Settings, phase: str) -> str:
    """Write what a restart by torchrun's agent changes, after this rank was out of memory, to the run folder.

    Nothing is written if no restart comes, if a launcher has resolved the job and chooses the change itself, and if
    other nodes would not see it. Args: phase: of errors.OutOfMemory. Returns: the change, "" if there is none.
    """
    restarts = [int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    is_restarted = job.running() is None and restarts[0] < restarts[1] and settings.on_oom == "retry"
    if not is_restarted or settings.node_local_storage:
        return ""
    if following := next_settings.next_smaller_setting(settings, resolve.resolve, phase):
        change, smaller = following
        decided = next_settings.decisions(smaller.request)
        left = {"started_by": settings.started_by, "change": change, "decided": decided}
        run_folder.write_json(Path(settings.output_dir) / run_folder.SMALLER, left)
        return change
    return ""
