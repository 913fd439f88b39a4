"""--node_local_storage: each node keeps the files of its ranks on its own disk.

Weights and trainer state are on node 0; the small files are copied to the other nodes, so that each node can resume
from its own disk. To resume with another rank count or stage, first copy the parts into one folder (rsync); their file
names differ.
"""

from pathlib import Path

from zerofit.base import distributed

WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json")

SMALL_BYTES = 64 * 2**20


def copy_small_files(folder: Path) -> None:
    """Copy rank 0's small files (trainer state) of a new checkpoint to the other nodes. Collective.

    Args: folder: with the files of this rank.
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
