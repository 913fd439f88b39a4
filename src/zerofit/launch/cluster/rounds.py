"""Join the other nodes of a job in rounds of torchrun's c10d rendezvous, and exchange messages within a round.

Node 0 has the store. Within a round each supervisor writes its NodeState and reads node 0's RoundState; node 0 does the
reverse. A thread does so twice a second, so that the supervisor itself never blocks on the network.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic import rendezvous

from zerofit.base.errors import UserError, first_line
from zerofit.launch.cluster import messages, node_options
from zerofit.launch.cluster.messages import NodeState, RoundState

HEARTBEAT_SECONDS = 0.5  # between exchanges

LAST_CALL_SECONDS = 10.0  # how long an elastic job with enough nodes waits for one more

LEAVE_SECONDS = 5.0  # for the other nodes to read the job's end before the store ends with node 0

JOB = "zerofit"  # the rendezvous's id; a job has its store for itself


class Meeting:
    """This node's connection to node 0's store, with the rendezvous and the few values that outlive a round."""

    def __init__(self, place: node_options.Place):
        """Connect to node 0's store; node 0 opens it.

        Raises: UserError if node 0 is not reached in time, or another running node has this rank.
        """
        self.place, self.host = place, socket.gethostname()
        self.address = node_options.reach(place) if place.rank else ""
        self.store = self._connect() if place.rank else self._open()
        self._check_rank_is_free()
        self.store.set(f"here/{place.rank}", self.host)
        self._rendezvous = self._of_torch()

    def next(self) -> tuple[object, int]:
        """Wait for the next round; return (a store for it, its number of nodes).

        Raises: TimeoutError if too few nodes join; ConnectionError if the job or node 0 has ended.
        """
        try:
            found = self._rendezvous.next_rendezvous()
        except rendezvous.RendezvousTimeoutError:
            raise TimeoutError from None
        except (rendezvous.RendezvousError, RuntimeError) as error:
            raise ConnectionError(first_line(error)) from None
        return found.store, found.world_size

    def waiting(self) -> int:
        """Return how many nodes wait for the next round."""
        try:
            return self._rendezvous.num_nodes_waiting()
        except Exception as error:  # RendezvousError is one, no RuntimeError
            raise ConnectionError(first_line(error)) from None

    def told(self, key: str, kind: type):
        """Return the message of node 0 under a key; None if there is none."""
        try:
            return messages.read(kind, self.store.get(key)) if self.store.check([key]) else None
        except RuntimeError:  # node 0 is gone
            return None
        except ValueError as error:
            raise UserError(f"node 0: {key}: {error}; use the same zerofit on all nodes.") from None

    def end(self, end: messages.End, others: int) -> None:
        """Publish the end of the job, and wait LEAVE_SECONDS for this many nodes to leave. Node 0 only."""
        self.store.set("end", messages.text(end))
        self._rendezvous.set_closed()
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline and self.store.add("left", 0) < others:
            time.sleep(HEARTBEAT_SECONDS / 2)

    def who_is_missing(self) -> str:
        """Return the error message for a round that too few nodes joined."""
        place = self.place
        here = {rank: self.host_of(rank) for rank in range(place.most) if self.store.check([f"here/{rank}"])}
        missing = ", ".join(str(rank) for rank in range(place.most) if rank not in here) or "some"
        return (
            f"node {missing} of {place.most} did not come within {place.timeout:.0f} s (here: "
            f"{', '.join(here.values())}): start the same command there with its NODE_RANK, and see that it reaches "
            f"{place.address}:{place.port} and that the nodes' clocks agree."
        )

    def host_of(self, rank: int) -> str:
        """Return a node's name for messages."""
        key = f"here/{rank}"
        return f"node {rank} ({self.store.get(key).decode()})" if self.store.check([key]) else f"node {rank}"

    def _of_torch(self):
        from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # it would open one more store for the ranks
        place, third = self.place, max(1, int(self.place.lost / 3))
        return dynamic_rendezvous.DynamicRendezvousHandler.from_backend(
            JOB, self.store, c10d_rendezvous_backend.C10dRendezvousBackend(self.store, JOB), place.least, place.most,
            local_addr=f"{self.host}-{place.rank}",
            timeout=dynamic_rendezvous.RendezvousTimeout(
                join=timedelta(seconds=place.timeout), last_call=timedelta(seconds=LAST_CALL_SECONDS)
            ),
            keep_alive_interval=third, keep_alive_max_attempt=3,
        )  # fmt: skip

    def _open(self):
        """Open the store on the address of MASTER_ADDR if it is one of this node's, else on all interfaces."""
        node_options.check_ports(self.place)
        address = node_options.own_address(self.place)
        descriptor = node_options.listen(address, self.place.port).detach() if address else None
        try:
            return TCPStore(
                address or "127.0.0.1", self.place.port, None, True, timedelta(seconds=10), wait_for_workers=False,
                master_listen_fd=descriptor,
            )  # fmt: skip
        except RuntimeError as error:
            raise self._no_answer(error) from None

    def _connect(self):
        try:
            store = TCPStore(
                self.place.address, self.place.port, None, False, timedelta(seconds=10), wait_for_workers=False
            )
            store.wait(["here/0"], timedelta(seconds=5))
        except RuntimeError as error:
            raise self._no_answer(error) from None
        return store

    def _no_answer(self, error: RuntimeError) -> UserError:
        return UserError(
            f"MASTER_ADDR={self.place.address} PORT={self.place.port}: no zerofit launch answers there "
            f"({first_line(error)}); start the same command on that node with NODE_RANK=0."
        )

    def _check_rank_is_free(self) -> None:
        """Refuse the rank of another node that still sends heartbeats. Raises: UserError."""
        rank, key = self.place.rank, f"beats/{self.place.rank}"
        before = self.store.add(key, 0)
        if before and (time.sleep(4 * HEARTBEAT_SECONDS) or self.store.add(key, 0) != before):
            raise UserError(
                f"NODE_RANK={rank} is taken by {self.host_of(rank)}, which is running; give each node its own number."
            )


class Round:
    """The nodes of a round and the latest message of each.

    The main thread replaces what is written (`update_node`, `update_round`); the exchange thread replaces what is read,
    and notes when it changed. No message is changed in place.
    """

    def __init__(self, meeting: Meeting, store, size: int, node: NodeState):
        """Start the exchange. Args: as of Meeting.next; node: this node's first message."""
        self.place, self.size, self.node, self.state = meeting.place, size, node, RoundState()
        self.nodes: dict[int, NodeState] = {}  # of all nodes, by node rank; on node 0 only
        self.end: messages.End | None = None  # of the job; on the other nodes only
        self.waiting = 0  # nodes that wait for the next round; on node 0 of an elastic job
        self._last_seen = dict.fromkeys(range(self.place.most), time.monotonic())  # by node rank; others: node 0 only
        self._meeting, self._store = meeting, store
        self._heartbeat = 0
        self._reported: set[str] = set()  # keys whose content was reported as ignored
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._exchange, daemon=True)
        self._thread.start()

    def update_node(self, **fields) -> None:
        """Replace fields of this node's message."""
        self.node = replace(self.node, **fields)

    def update_round(self, **fields) -> None:
        """Replace fields of node 0's message. Node 0 only."""
        self.state = replace(self.state, **fields)

    def is_silent(self, rank: int) -> bool:
        """Return whether a node has sent no heartbeat for too long."""
        return time.monotonic() - self._last_seen[rank] > self.place.lost

    def restart_clocks(self) -> None:
        """Restart the timeouts of the other nodes: this one was suspended, and perhaps they were too."""
        self._last_seen = dict.fromkeys(self._last_seen, time.monotonic())

    def close(self) -> None:
        """Exchange once more, then end the thread."""
        self._closing.set()
        self._thread.join(2 * HEARTBEAT_SECONDS + 2)

    def _exchange(self) -> None:
        exchange = self._of_others if self.place.rank else self._of_node_0
        while True:
            is_last = self._closing.is_set()
            self._heartbeat += 1
            try:
                exchange()
                self._meeting.store.add(f"beats/{self.place.rank}", 1)
            except (RuntimeError, ConnectionError):  # node 0 is gone or unreachable: _last_seen grows old
                pass
            if is_last:
                return
            self._closing.wait(HEARTBEAT_SECONDS)

    def _of_node_0(self) -> None:
        nodes = {0: replace(self.node, heartbeat=self._heartbeat)}
        for rank in range(1, self.place.most):
            before = self.nodes.get(rank)
            if found := self._read(f"node/{rank}", NodeState) or before:
                nodes[rank] = found
            if found and (before is None or found.heartbeat != before.heartbeat):
                self._last_seen[rank] = time.monotonic()
        self.nodes, self._last_seen[0] = nodes, time.monotonic()
        self._store.set("round", messages.text(replace(self.state, heartbeat=self._heartbeat)))
        if self.place.least < self.place.most:
            self.waiting = self._meeting.waiting()

    def _of_others(self) -> None:
        self._store.set(f"node/{self.place.rank}", messages.text(replace(self.node, heartbeat=self._heartbeat)))
        state = self._read("round", RoundState)
        if state and state.heartbeat != self.state.heartbeat:
            self.state, self._last_seen[0] = state, time.monotonic()
        self.end = self._meeting.told("end", messages.End)

    def _read(self, key: str, kind: Callable):
        """Return the message under a key; None if there is none, or an invalid one, which is reported once."""
        if not self._store.check([key]):
            return None
        try:
            return messages.read(kind, self._store.get(key))
        except ValueError as error:
            if key not in self._reported:
                self._reported.add(key)
                sentence = f"zerofit: {key} is ignored: {error}; use the same zerofit on all nodes"
                print(sentence, file=sys.stderr, flush=True)
            return None
