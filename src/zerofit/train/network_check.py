"""Check that all ranks have the same job and reach each other, and measure the links, before loading the model."""

import collections
import contextlib
import os
import socket
import statistics
import threading
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist

from zerofit.base import distributed, rank_status, stragglers
from zerofit.base.errors import BrokenLinks, UserError, first_line
from zerofit.base.paths import nearest_existing
from zerofit.job import program
from zerofit.train import consistency

PAYLOAD_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}

NO_P2P = "NCCL_P2P_DISABLE"  # NCCL's variable: GPUs of a node exchange data through host memory

P2P_FAILED = "ZEROFIT_PEERS_FAILED"  # set by the launcher after an attempt with peer-to-peer copies has failed

SECONDS = 60.0  # timeout for an exchange of all ranks, plus 1/4 s per rank above 256


@contextlib.contextmanager
def connecting(settings):
    """Add a hint to an error of the body if the ranks cannot connect to each other."""
    try:
        yield
    except RuntimeError as error:
        if not rank_status.caused_by_peer(error):
            raise
        raise RuntimeError(f"{first_line(error)}: {_cure(settings.use_cpu)}") from error


def answer(settings) -> None:
    """Exchange a number between all ranks, before any other exchange. Collective.

    After a timeout, a rank ends its process with a message; another collective would wait longer.
    """
    if _is_alone():
        return
    with _bounded(settings.use_cpu):
        _exchange(settings.use_cpu)


def _is_alone() -> bool:
    return not dist.is_initialized() or distributed.size() == 1


def check(settings, train_set, eval_set) -> None:
    """Compare the jobs of the ranks, and measure the links. Collective.

    Raises: UserError naming the node that differs. After a timeout, a rank ends its process with a message.
    """
    if _is_alone():
        return
    software = consistency.software(program.file_of(settings.recipe))
    facts = software | consistency.job_facts(settings, train_set, eval_set)
    with _bounded(settings.use_cpu):
        facts_by_node = dict(
            reversed(distributed.all_gather((f"node {distributed.node()} ({socket.gethostname()})", facts)))
        )  # facts of each node's first rank
        if sentence := consistency.difference([*reversed(facts_by_node.items())]):
            raise UserError(sentence)
        if distributed.several_nodes():
            settings.decisions.append(f"{len(facts_by_node)} nodes with the same software, data and arguments")
        if distributed.several_nodes() or not settings.use_cpu:
            settings.decisions += [*_speeds(settings.use_cpu), *_network_settings(settings)]
        if not settings.use_cpu:
            settings.decisions += _gpu_kinds(distributed.all_gather(torch.cuda.get_device_name()))


@contextlib.contextmanager
def _bounded(use_cpu: bool):
    """End this process with a message if the body, which may hang in a collective, takes too long or fails."""
    seconds = SECONDS + max(0, distributed.size() - 256) / 4
    timer = threading.Timer(seconds, lambda: _end(f"received no answer from all ranks in {seconds:.0f} s", use_cpu))
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        if use_cpu or rank_status.caused_by_peer(error) or rank_status.gpu_is_full(error):
            raise
        _end(f"could not exchange numbers with the other ranks ({first_line(error)})", use_cpu)
    finally:
        timer.cancel()


def _end(problem: str, use_cpu: bool) -> None:
    """End this process, whose collectives may never return."""
    place = f"rank {distributed.rank()} (node {distributed.node()}, {socket.gethostname()})"
    error = BrokenLinks(f"{place} {problem} before the first step: {_cure(use_cpu)}")
    rank_status.record(error)
    print(f"zerofit: error: {error}.", flush=True)
    os._exit(error.exit_code)


def _cure(use_cpu: bool) -> str:
    """Return a hint for ranks that do not reach each other: the network of several nodes, the GPU links of one node."""
    if distributed.several_nodes():
        hint = (
            "check that the nodes reach each other on all ports, and set the interface between them with --interface, "
            "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        )
        more = f"; NCCL_IB_DISABLE=1 disables InfiniBand, {NO_P2P}=1 disables copies from GPU to GPU"
        return hint if use_cpu else hint + more
    if use_cpu:
        return "the machine may be too busy; GLOO_SOCKET_IFNAME=lo selects the local interface"
    if os.environ.get(NO_P2P, "0") != "0":
        return (
            f"copies from GPU to GPU are off ({NO_P2P}={os.environ[NO_P2P]}), so they are not the cause; "
            "NCCL_DEBUG=INFO logs the state of NCCL, and `dmesg -T` shows whether a GPU has failed (Xid)"
        )
    return (
        f"copies from GPU to GPU may be broken on this machine (IOMMU or ACS on, or GPUs whose driver does not support "
        f"them); {NO_P2P}=1 copies through host memory instead"
    )


def _exchange(use_cpu: bool) -> None:
    """Gather every rank's number, and send a number to the next rank, in a group that is destroyed afterwards.

    An all-to-all would test each pair, but NCCL would open channels to every peer, which takes gigabytes per GPU.
    Raises: RuntimeError if a rank receives a wrong number.
    """
    count, rank = distributed.size(), distributed.rank()
    device = "cpu" if use_cpu else "cuda"
    number, gathered = torch.tensor([rank], device=device), torch.empty(count, dtype=torch.long, device=device)
    received, before = torch.empty_like(number), (rank - 1) % count
    group = dist.new_group()
    dist.all_gather_into_tensor(gathered, number, group=group)
    sent = dist.P2POp(dist.isend, number, (rank + 1) % count, group)
    for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, received, before, group)]):
        work.wait()
    if gathered.tolist() != [*range(count)] or received.item() != before:
        raise RuntimeError(
            f"rank {rank} received {gathered.tolist()} from all ranks and {received.item()} from rank {before}."
        )
    dist.destroy_process_group(group)


def _speeds(use_cpu: bool) -> list[str]:
    """Return sentences about the all-reduce speed of the ranks of a node, and of one rank per node."""
    node_of_rank = distributed.all_gather(distributed.node())
    nodes = [[rank for rank, node in enumerate(node_of_rank) if node == name] for name in dict.fromkeys(node_of_rank)]
    place = f"node {distributed.node()} ({socket.gethostname()})"
    kinds = {"within a node": nodes, "between nodes": [[ranks[0] for ranks in nodes]]}
    sentences = []
    for kind, groups in kinds.items():
        opened = [(ranks, dist.new_group(ranks)) for ranks in groups if len(ranks) > 1]
        speed = [_bus_bandwidth(group, len(ranks), use_cpu) for ranks, group in opened if distributed.rank() in ranks]
        speeds = [speed for speed in distributed.all_gather((speed[0], place) if speed else None) if speed]
        if speeds:
            sentences.append(_speed_sentence(kind, speeds, max(len(ranks) for ranks, _ in opened), dist.get_backend()))
        for ranks, group in opened:
            if distributed.rank() in ranks:
                dist.destroy_process_group(group)
    return sentences


def _speed_sentence(kind: str, speeds: list[tuple[float, str]], count: int, backend: str) -> str:
    """Return a sentence about the slowest link, with its node if the others are faster. speeds: (GB/s, node)."""
    slowest, node = min(speeds)
    uneven = slowest < statistics.median(speed for speed, _ in speeds) / (1 + stragglers.MIN_SLOWDOWN)
    where = f"; {node} is the slowest" if uneven else ""
    return f"links {kind}: {slowest:.2f} GB/s per rank ({count} ranks, {backend}, all-reduce){where}"


def _bus_bandwidth(group, count: int, use_cpu: bool) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s: bytes x 2 (n - 1) / n / s (nccl-tests, PERFORMANCE.md)."""
    device = "cpu" if use_cpu else "cuda"
    numbers = torch.ones(PAYLOAD_BYTES[device] // 4, device=device)
    dist.all_reduce(numbers[:1024], group=group)  # opens the connections
    began = time.perf_counter()
    dist.all_reduce(numbers, group=group)
    numbers[0].item()  # waits for the device
    seconds = time.perf_counter() - began
    if wrong := int((numbers[1024:] != count).sum()):
        raise RuntimeError(f"{wrong} of {numbers.numel()} summed numbers are wrong")
    return numbers.numel() * 4 * 2 * (count - 1) / count / seconds / 1e9


def _gpu_kinds(gpus: list[str]) -> list[str]:
    """Return a sentence about a job with several kinds of GPUs; [] for one kind."""
    ranks = collections.Counter(gpus)
    if len(ranks) == 1:
        return []
    counted = ", ".join(f"{count} x {name}" for name, count in ranks.most_common())
    return [f"GPUs of several kinds ({counted}): each step waits for the slowest, and the smallest limits the memory"]


def _network_settings(settings) -> list[str]:
    if os.environ.get(P2P_FAILED) and not settings.use_cpu:
        return [
            f"{NO_P2P}=1: the first attempt, with copies from GPU to GPU, received no answer or a wrong one; this "
            f"attempt copies through host memory (slower) and works. Set {NO_P2P}=1 to skip the first attempt"
        ]
    if not distributed.several_nodes():
        return []
    names = ("NCCL_SOCKET_IFNAME",) if not settings.use_cpu else ("GLOO_SOCKET_IFNAME",)
    chosen = ", ".join(f"{name}={os.environ.get(name, '(automatic)')}" for name in names)
    return [f"network of rank 0: {chosen}; collectives give up after {settings.ddp_timeout} s (--ddp_timeout)"]


def check_disk(settings, folder: Path) -> None:
    """Check that all nodes see the run folder's disk, as each rank writes checkpoint files. Collective.

    Raises: UserError naming a node that does not see it; with --node_local_storage, if all nodes see it.
    """
    if not distributed.several_nodes():
        return
    mark = distributed.broadcast(
        nearest_existing(folder) / f".zerofit-{uuid.uuid4().hex[:12]}" if distributed.rank() == 0 else None
    )
    if distributed.rank() == 0:
        mark.touch()
    distributed.barrier()
    name = None if _seen(mark) else f"node {distributed.node()} ({socket.gethostname()})"
    blind = [node for node in distributed.all_gather(name) if node]
    if distributed.rank() == 0:
        mark.unlink()
    if settings.node_local_storage and not blind:
        raise UserError(f"--node_local_storage: all nodes see the same disk at {folder}; remove this flag.")
    if blind and settings.save_strategy != "no" and not settings.node_local_storage:
        raise UserError(
            f"--output_dir {folder}: {blind[0]} does not see node 0's disk there, so its part of each checkpoint "
            "would be missing; use a folder that all nodes share, --node_local_storage true or --save_strategy no."
        )


def _seen(mark: Path, seconds: float = 10.0) -> bool:
    """Return whether the file is visible; a network disk may take a moment to show it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if any(file.name == mark.name for file in mark.parent.iterdir()):
                return True
        time.sleep(0.5)
    return False


def main() -> None:
    """Exchange numbers between ranks that torchrun has started for this check, and print the speed."""
    use_cpu = not torch.cuda.is_available()
    if not use_cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with _bounded(use_cpu):
        dist.init_process_group("gloo" if use_cpu else "nccl")
        _exchange(use_cpu)
        speed = _bus_bandwidth(None, distributed.size(), use_cpu)
    if distributed.rank() == 0:
        print(f"exchanged {speed:.2f} GB/s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
