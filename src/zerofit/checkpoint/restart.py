"""Continue in the run folder after torchrun's agent or SLURM has restarted the job."""

import hashlib
import os
import socket
import sys
from pathlib import Path

import psutil

from zerofit.base import distributed
from zerofit.checkpoint import next_settings
from zerofit.config import parse, resolve
from zerofit.job import job, parallel_dims, run_folder
from zerofit.job.recipe import Recipe
from zerofit.job.request import Request
from zerofit.job.settings import Settings


def starters() -> list[str]:
    """Return an id of each node's torchrun agent; [] without agents. Collective.

    torchrun counts a restart (TORCHELASTIC_RESTART_COUNT) only on the node whose rank has failed, and never when a
    node joins, so a restart is recognized by the agent's process.
    """
    return [agent for agent in distributed.gather_nodes(_agent()) if agent]


def _agent() -> str:
    if distributed.BY_AGENT not in os.environ:
        return ""
    parent = psutil.Process(os.getppid())
    return hashlib.sha256(f"{socket.gethostname()} {parent.pid} {parent.create_time()}".encode()).hexdigest()[:16]


def resume_after_restart(settings: Settings) -> None:
    """Default to --resume_from_checkpoint auto in a restart, to continue from the newest checkpoint.

    It also replaces the checkpoint that the job started from, once the job has saved a newer one.
    """
    value = settings.resume_from_checkpoint
    if job.running() is not None or not settings.output_dir or str(value).lower() in ("false", "auto"):
        return
    folder = run_folder.name_folder(settings)
    known = run_folder.read_record(folder / "run.json")
    is_restart = set(known.get("started_by", [])) & set(settings.started_by) or distributed.queued_again()
    if known and is_restart and not run_folder.finished(folder) and (value is None or run_folder.checkpoints(folder)):
        print(f"note: the job was restarted and continues in {folder}", flush=True)
        settings.resume_from_checkpoint = "auto"


def earlier_run(settings: Settings) -> Path | None:
    """Return the folder of the run that a job will continue; None for a new run.

    It may be called before rank 0 has looked for the checkpoint.
    """
    value, folder = settings.resume_from_checkpoint, settings.output_dir and run_folder.name_folder(settings)
    if value is None:
        starters = run_folder.read_record(folder / "run.json").get("started_by", []) if folder else []
        return folder if starters and (_agent() in starters or distributed.queued_again()) else None
    if str(value).lower() in next_settings.NEWEST:
        return folder or None
    return None if str(value).lower() == "false" else Path(value).parent


def resolve_settings(recipe: Recipe) -> Settings:
    """Return the settings of this process's command line, adapted if torchrun's agent has restarted the job.

    After out of memory they need less memory; on another number of ranks they keep the run's effective batch.
    Raises: UserError for invalid arguments, and if the ranks do not divide the effective batch.
    """
    request, ranks = parse.request(recipe, sys.argv[1:]), distributed.size()
    if distributed.BY_AGENT not in os.environ or not request.get("output_dir"):
        return resolve.settings_for_process(lambda: resolve.resolve(request, ranks))
    folder = Path(request.get("output_dir")).expanduser()
    record = run_folder.read_record(folder / run_folder.NEXT_START)
    is_smaller = bool(record) and (distributed.RESTARTED in os.environ or _agent() in record.get("started_by", []))
    if is_smaller:
        request = next_settings.with_decisions(request, record.get("decided", {}), str(folder / run_folder.NEXT_START))
    if batch := _effective_batch_of_run(folder, ranks, request):
        request = request.drop(*next_settings.BATCH).put(**batch)
    settings = resolve.settings_for_process(lambda: resolve.resolve(request, ranks))
    if is_smaller:
        settings.decisions.append(
            f"{record.get('change')}: the run was out of GPU memory ({folder / run_folder.NEXT_START})"
        )
    return settings


def _effective_batch_of_run(folder: Path, ranks: int, request: Request) -> dict[str, int]:
    """Return the arguments for the run's effective batch on another number of ranks.

    {}: the same number of ranks, no run, or another effective batch is requested.
    """
    run = run_folder.read_record(folder / "run.json")
    values = {name: entry.get("value") for name, entry in run.get("arguments", {}).items()}
    effective, micro = (values.get(name) for name in next_settings.BATCH[:2])
    if run.get("world_size", ranks) == ranks or {type(effective), type(micro)} != {int}:
        return {}
    if request.get("effective_batch_size", effective) != effective:
        return {}
    micro = min(micro, request.get("per_device_train_batch_size", micro))
    return next_settings.keep_effective_batch(effective, micro, ranks, parallel_dims.ranks_per_row(values))


def record_smaller_settings(settings: Settings, phase: str) -> str:
    """Record in the run folder how a restart by torchrun's agent reduces memory, after this rank ran out of it.

    Nothing is recorded without a further restart, under a launcher (which chooses the change), or if other nodes would
    not see the file. Args: phase: of errors.OutOfMemory. Returns: the change, "" without one.
    """
    restarts = [int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    is_restarted = job.running() is None and restarts[0] < restarts[1] and settings.on_oom == "retry"
    if not is_restarted or settings.node_local_storage:
        return ""
    if following := next_settings.next_smaller_setting(settings, resolve.resolve, phase):
        change, smaller = following
        decided = next_settings.decisions(smaller.request)
        record = {"started_by": settings.started_by, "change": change, "decided": decided}
        run_folder.write_json(Path(settings.output_dir) / run_folder.NEXT_START, record)
        return change
    return ""
