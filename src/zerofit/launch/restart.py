"""Go on in the run folder when torchrun's agent or SLURM starts the same job again."""

import hashlib
import os
import socket

from zerofit.base import distributed
from zerofit.config import resolve
from zerofit.job import job, run_folder
from zerofit.job.settings import Settings
from zerofit.launch import retry


def starters() -> list[str]:
    """Return an id of each node's agent, under which this job runs; [] without one. Collective.

    torchrun counts a restart (TORCHELASTIC_RESTART_COUNT) only on the node whose rank has failed, and none when a node
    joins: the agent's process is what tells a restart from a new job.
    """
    return [agent for agent in distributed.of_nodes(_agent()) if agent]


def _agent() -> str:
    import psutil

    if distributed.BY_AGENT not in os.environ:
        return ""
    parent = psutil.Process(os.getppid())
    return hashlib.sha256(f"{socket.gethostname()} {parent.pid} {parent.create_time()}".encode()).hexdigest()[:16]


def go_on(settings: Settings, started_by: list[str]) -> None:
    """Make --resume_from_checkpoint auto the default of a restart: the job goes on from its newest checkpoint.

    It is also instead of the checkpoint that the job began from, once the job has one of its own.
    Args: started_by: of this start, from `starters`.
    """
    asked = settings.resume_from_checkpoint
    if job.running() is not None or not settings.output_dir or str(asked).lower() in ("false", "auto"):
        return
    folder = run_folder.name_folder(settings)
    known = run_folder.read_record(folder / "run.json")
    is_restart = set(known.get("started_by", [])) & set(started_by) or distributed.queued_again()
    if known and is_restart and not run_folder.finished(folder) and (asked is None or run_folder.checkpoints(folder)):
        print(f"note: the job was started again: it goes on in {folder}", flush=True)
        settings.resume_from_checkpoint = "auto"


def with_batch_of_run(settings: Settings) -> Settings:
    """Return the settings with the effective batch of the run that this elastic job goes on with on other ranks.

    Raises: UserError if the ranks do not divide it.
    """
    if distributed.BY_AGENT not in os.environ or not settings.output_dir or "effective_batch_size" in settings.given:
        return settings
    run = run_folder.read_record(run_folder.name_folder(settings) / "run.json")
    before = [run.get("arguments", {}).get(name, {}).get("value") for name in retry.BATCH[:2]]
    if run.get("world_size", settings.world_size) == settings.world_size or not all(type(n) is int for n in before):
        return settings
    batch = retry.same_batch(*before, settings.world_size, settings.ranks_per_row)
    asked = settings.request.drop(*retry.BATCH).put(**batch)
    return resolve.of_this_process(lambda: resolve.resolve(asked, settings.world_size))
