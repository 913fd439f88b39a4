"""--node_local_storage: each machine of a job keeps its own ranks' part of a checkpoint on a disk of its own.

The weights and what the trainer knows are on node 0; the small files among them go to the others too, so that each machine
can go on from its own disk. On another number of ranks or another stage the parts have to be put together first:
their names differ, so one folder can take all of them (rsync).
"""

from pathlib import Path

from . import links, world
from .errors import UserError

WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json")
SMALL_BYTES = 64 * 2**20


def resolve(settings) -> None:
    """Raises: UserError at stage 0, whose one optimizer file every rank reads."""
    if not settings.node_local_storage:
        return
    if settings.deepspeed is None:
        raise UserError("--node_local_storage: at ZeRO stage 0 every rank reads the same files; use --zero 1, 2 or 3.")
    settings.deepspeed.setdefault("checkpoint", {})["use_node_local_storage"] = True


def spread(folder: Path) -> None:
    """Give each machine node 0's small files of a checkpoint that is being saved: what the trainer knows. Collective."""
    files = None
    if world.rank() == 0:
        files = {
            f.name: f.read_bytes()
            for f in folder.iterdir()
            if f.is_file()
            and not f.name.endswith(WEIGHTS)
            and not f.name.startswith("rng_state")
            and f.stat().st_size < SMALL_BYTES
        }
    files = world.broadcast(files)
    if links.first_of_node() and world.rank():
        for name, content in files.items():
            (folder / name).write_bytes(content)


def agree(settings, folder: Path) -> None:
    """Go on from the newest checkpoint that is whole on every machine, where node 0 has chosen one. Collective.

    Raises: UserError for one outside the run folder that is not whole on every machine.
    """
    from . import checkpoint, report

    chosen = settings.resume_from_checkpoint
    if not chosen:
        return
    if Path(chosen).parent.absolute() == folder.absolute():
        found = report.checkpoints(folder) if links.first_of_node() else {}
        good = [step for step, there in found.items() if not checkpoint.fault(there)]
        everywhere = set.intersection(*map(set, links.of_nodes(good)))
        settings.values["resume_from_checkpoint"] = (
            str(folder / f"checkpoint-{max(everywhere)}") if everywhere else None
        )
        return
    reason = checkpoint.fault(Path(chosen)) if links.first_of_node() else ""
    if wrong := [f"node {i}: {text}" for i, text in enumerate(links.of_nodes(reason)) if text]:
        raise UserError(f"--resume_from_checkpoint {chosen}: is not whole on every machine: {wrong[0]}.")
