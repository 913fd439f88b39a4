"""Verify the checkpoint to resume from on all ranks: each hashes a share of its files, once in a start."""

from collections.abc import Iterator
from pathlib import Path

from zerofit.base import distributed
from zerofit.checkpoint import integrity
from zerofit.checkpoint.facts import read_facts


def by_hashes(checkpoints: list[Path], local: bool) -> Iterator[tuple[Path, str]]:
    """Yield each of rank 0's checkpoints with the reason why no run can resume from it; "" if one can. Collective.

    One rank of a disk compares names and sizes first, which takes no time. While hashing, a rank
    waits for others about as long as the largest file takes, which --ddp_timeout must allow.
    Args: local: each node has a disk of its own (--node_local_storage).
    """
    place, first = "", distributed.rank() == 0
    if local:
        place, first = f"node {distributed.node()}: ", distributed.first_of_node()
    for checkpoint in distributed.broadcast(checkpoints):
        reason = integrity.find_corruption(checkpoint, hashes=False) if first else ""
        if not any(reasons := distributed.all_gather(reason and place + reason)):
            reason = integrity.changed(checkpoint, _own_share(checkpoint, local))
            reasons = distributed.all_gather(reason and place + reason)
        yield checkpoint, next(filter(None, reasons), "")


def _own_share(checkpoint: Path, local: bool) -> dict[str, list]:
    """Return {file: [bytes, hash]} of what this rank hashes: about as many bytes as the others of its disk. Collective.

    Without zerofit.json (of another program) nothing has a hash. A rank that reads another one than the others, e.g.
    from a cache of NFS, hashes all that its own names.
    """
    known = read_facts(checkpoint) or {"files": {}}
    views = distributed.all_gather((distributed.node() if local else "", known.get("digest")))
    ranks = [rank for rank, view in enumerate(views) if view == views[distributed.rank()]]
    own, dealt = {}, dict.fromkeys(ranks, 0)
    for name, entry in sorted(known["files"].items(), key=lambda item: (-item[1][0], item[0])):
        rank = min(ranks, key=dealt.get)  # the largest files first, each to the rank with the fewest bytes
        dealt[rank] += entry[0]
        if rank == distributed.rank():
            own[name] = entry
    return own
