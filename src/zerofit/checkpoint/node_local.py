"""--node_local_storage: each node keeps its ranks' part of a checkpoint on its own disk.

Weights and trainer state are on node 0; the small files among them are copied to the other nodes, so that each node can
resume from its own disk. To resume with another rank count or stage, first copy the parts into one folder (rsync);
their names differ.
"""

from pathlib import Path

from zerofit.base import distributed
from zerofit.base.errors import UserError

WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json")

SMALL_BYTES = 64 * 2**20


def copy_small_files(folder: Path) -> None:
    """Copy rank 0's small files (trainer state) of a new checkpoint to the other nodes. Collective.

    Args: folder: what this rank has written.
    """
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
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)


def agree(settings, folder: Path) -> None:
    """Resume from the newest checkpoint that is whole on every node, if one was chosen. Collective.

    Raises: UserError for a chosen one outside the run folder that is not whole on every node.
    """
    from zerofit.checkpoint import integrity
    from zerofit.job import run_folder

    chosen = settings.resume_from_checkpoint
    if not chosen:
        return
    if Path(chosen).parent.absolute() == folder.absolute():
        checkpoints = run_folder.checkpoints(folder) if distributed.first_of_node() else {}
        valid_steps = [step for step, checkpoint in checkpoints.items() if not integrity.find_corruption(checkpoint)]
        common_steps = set.intersection(*map(set, distributed.of_nodes(valid_steps)))
        settings.resume_from_checkpoint = str(folder / f"checkpoint-{max(common_steps)}") if common_steps else None
        return
    reason = integrity.find_corruption(Path(chosen)) if distributed.first_of_node() else ""
    if reasons := [f"node {i}: {text}" for i, text in enumerate(distributed.of_nodes(reason)) if text]:
        raise UserError(f"--resume_from_checkpoint {chosen}: is not whole on every node: {reasons[0]}.")
