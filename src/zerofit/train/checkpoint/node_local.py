"""--node_local_storage: each node keeps its ranks' part of a checkpoint on its own disk.

The weights and what the trainer knows are on node 0; the small files among them go to the others too, so that each machine
can go on from its own disk. On another number of ranks or another stage the parts have to be put together first:
their names differ, so one folder can take all of them (rsync).
"""

from pathlib import Path

from zerofit import distributed
from zerofit.errors import UserError

WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json")

SMALL_BYTES = 64 * 2**20


def copy_small_files(folder: Path) -> None:
    """Give each machine node 0's small files of a checkpoint that is being saved: what the trainer knows. Collective."""
    files = None
    if distributed.rank() == 0:
        files = {
            f.name: f.read_bytes()
            for f in folder.iterdir()
            if f.is_file()
            and not f.name.endswith(WEIGHTS)
            and not f.name.startswith("rng_state")
            and f.stat().st_size < SMALL_BYTES
        }
    files = distributed.broadcast(files)
    if distributed.first_of_node() and distributed.rank():
        for name, content in files.items():
            (folder / name).write_bytes(content)


def agree(settings, folder: Path) -> None:
    """Go on from the newest checkpoint that is whole on every machine, where node 0 has chosen one. Collective.

    Raises: UserError for one outside the run folder that is not whole on every machine.
    """
    from zerofit import run_folder
    from zerofit.train.checkpoint import integrity

    chosen = settings.resume_from_checkpoint
    if not chosen:
        return
    if Path(chosen).parent.absolute() == folder.absolute():
        found = run_folder.checkpoints(folder) if distributed.first_of_node() else {}
        good = [step for step, there in found.items() if not integrity.find_corruption(there)]
        everywhere = set.intersection(*map(set, distributed.of_nodes(good)))
        settings.values["resume_from_checkpoint"] = (
            str(folder / f"checkpoint-{max(everywhere)}") if everywhere else None
        )
        return
    reason = integrity.find_corruption(Path(chosen)) if distributed.first_of_node() else ""
    if wrong := [f"node {i}: {text}" for i, text in enumerate(distributed.of_nodes(reason)) if text]:
        raise UserError(f"--resume_from_checkpoint {chosen}: is not whole on every machine: {wrong[0]}.")
