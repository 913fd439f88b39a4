"""Verify the checkpoint to resume from on all ranks: each hashes a share of its files, once per start."""

from collections.abc import Iterator
from pathlib import Path

from zerofit.base import distributed
from zerofit.checkpoint import integrity
from zerofit.checkpoint.facts import read_facts


def by_hashes(checkpoints: list[Path], local: bool) -> Iterator[tuple[Path, str]]:
    """Yield each of rank 0's checkpoints with the reason why it cannot be resumed, "" if it can. Collective.

    One rank per disk first compares names and sizes, which takes no time. While hashing, a rank waits for the others
    about as long as the largest file takes, which --ddp_timeout must allow.
    Args: local: each node has its own disk (--node_local_storage).
    """
    place, first = "", distributed.rank() == 0
    if local:
        place, first = f"node {distributed.node()}: ", distributed.first_of_node()
    for checkpoint in distributed.broadcast(checkpoints):
        reason = integrity.find_corruption(checkpoint, hashes=False) if first else ""
        if not any(reasons := distributed.all_gather(reason and place + reason)):
            reason = integrity.changed(checkpoint, _share_of_rank(checkpoint, local))
            reasons = distributed.all_gather(reason and place + reason)
        yield checkpoint, next(filter(None, reasons), "")


def _share_of_rank(checkpoint: Path, local: bool) -> dict[str, list]:
    """Return {file: [bytes, hash]} for this rank to hash: about the same bytes as other ranks of the disk. Collective.

    Without zerofit.json (another program), files lack hashes. A rank that reads a different zerofit.json than the
    others, e.g. from an NFS cache, hashes all files in it.
    """
    known = read_facts(checkpoint) or {"files": {}}
    views = distributed.all_gather((distributed.node() if local else "", known.get("digest")))
    ranks = [rank for rank, view in enumerate(views) if view == views[distributed.rank()]]
    share, assigned = {}, dict.fromkeys(ranks, 0)
    for name, entry in sorted(known["files"].items(), key=lambda item: (-item[1][0], item[0])):
        rank = min(ranks, key=assigned.get)  # largest file first, to the rank with the fewest bytes
        assigned[rank] += entry[0]
        if rank == distributed.rank():
            share[name] = entry
    return share
