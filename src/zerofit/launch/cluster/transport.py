"""Exchange documents between a job's supervisors through a TCPStore on node 0.

Each supervisor writes its NodeState under node/<rank> and reads node 0's JobState under job; node 0 does the reverse
(documents.py has both). A thread does so twice a second, so that the supervisor itself never blocks on the network.
Any process that reaches the store can write to it, so documents are signed.
"""

import socket
import sys
import threading
import time
import uuid
from dataclasses import replace
from datetime import timedelta

from zerofit.base.errors import UserError, first_line
from zerofit.launch.cluster import node_options
from zerofit.launch.cluster.documents import JOB_KEY, JobState, NodeState, read, signed

HEARTBEAT_SECONDS = 0.5  # between exchanges


class Transport:
    """One supervisor's connection to node 0's store.

    The main thread replaces what is written (`update_node`, `update_job`); the exchange thread replaces what is read,
    and notes when it changed. No document is changed in place.
    """

    def __init__(self, place: node_options.Place, gpus: int, facts: dict, secret: bytes):
        """Connect to node 0's store (node 0 opens it) and start the exchange thread.

        Args: place: this node's; gpus: processes on this node; facts: must be equal on all nodes
            (consistency.software); secret: of the job (job_secret.of_job), signs the documents.
        Raises: UserError if node 0 is not reached in time, or another running node has this rank.
        """
        self.place, self.name = place, f"node {place.rank} ({socket.gethostname()})"
        self.node = NodeState(
            id=uuid.uuid4().hex, leader="", heartbeat=0, host=socket.gethostname(),
            address="" if self.leads else node_options.reach(place), gpus=gpus, facts=facts,
        )  # fmt: skip
        self.job = JobState(leader="", heartbeat=0, supervisors={})
        self.job_changed = time.monotonic()
        self.nodes: dict[int, NodeState] = {}  # of all nodes, by node rank; on node 0 only
        self.node_changed: dict[int, float] = {}  # time.monotonic() by node rank; on node 0 only
        self._secret = secret
        self._heartbeat = 0
        self._leader = ""  # id of node 0's supervisor, once it is read; on the other nodes only
        self._replaced: set[str] = set()  # ids of supervisors that were started again since
        self._reported: set[str] = set()  # keys whose content was reported as ignored
        self._store = self._open_store() if self.leads else self._connect()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._exchange, daemon=True)
        self._thread.start()

    @property
    def leads(self) -> bool:
        """Whether this is node 0."""
        return self.place.rank == 0

    def update_node(self, **fields) -> None:
        """Replace fields of this node's state."""
        self.node = replace(self.node, **fields)

    def update_job(self, **fields) -> None:
        """Replace fields of the job's state. Node 0 only."""
        self.job = replace(self.job, **fields)

    def restart_clocks(self) -> None:
        """Count the silence of the other nodes from now on: this one was suspended, and they perhaps with it."""
        self.job_changed = time.monotonic()
        self.node_changed.update(dict.fromkeys([*self.node_changed], self.job_changed))

    def close(self) -> None:
        """Exchange once more, then end the thread."""
        self._closing.set()
        self._thread.join(2 * HEARTBEAT_SECONDS + 2)

    # --- the store ---

    def _open_store(self):
        """Open the store on the address of MASTER_ADDR if it is one of this node's, else on all interfaces."""
        from torch.distributed import TCPStore

        node_options.check_ports(self.place)
        address = node_options.own_address(self.place)
        descriptor = node_options.listen(address, self.place.port).detach() if address else None
        self.update_node(leader=self.node.id)
        try:
            store = TCPStore(
                address or "127.0.0.1", self.place.port, None, True, timedelta(seconds=10), wait_for_workers=False,
                master_listen_fd=descriptor,
            )  # fmt: skip
        except RuntimeError as error:
            raise self._no_answer(error) from None
        return store

    def _connect(self):
        from torch.distributed import TCPStore

        try:
            store = TCPStore(
                self.place.address, self.place.port, None, False, timedelta(seconds=10), wait_for_workers=False
            )
            store.wait([JOB_KEY], timedelta(seconds=5))
        except RuntimeError as error:
            raise self._no_answer(error) from None
        self._check_rank_is_free(store)
        return store

    def _no_answer(self, error: RuntimeError) -> UserError:
        return UserError(
            f"MASTER_ADDR={self.place.address} PORT={self.place.port}: no zerofit launch answers there "
            f"({first_line(error)}); start the same command on that node with NODE_RANK=0."
        )

    def _check_rank_is_free(self, store) -> None:
        """Refuse the rank of another node whose heartbeat goes on. Raises: UserError."""
        key = f"node/{self.place.rank}"
        before = self._read(store, key)
        if before is None:
            return
        time.sleep(4 * HEARTBEAT_SECONDS)
        now = self._read(store, key)
        if now and (now.id, now.heartbeat) != (before.id, before.heartbeat):
            raise UserError(
                f"NODE_RANK={self.place.rank} is taken by {before.host}, which is running; give each node its own "
                "number."
            )

    def _write(self, key: str, document: NodeState | JobState) -> None:
        self._store.set(key, signed(self._secret, key, document))

    def _read(self, store, key: str) -> NodeState | JobState | None:
        """Return the document under a key; None if there is none or an invalid one, which is reported once."""
        if not store.check([key]):
            return None
        try:
            return read(self._secret, key, store.get(key))
        except ValueError as error:
            if key not in self._reported:
                self._reported.add(key)
                message = f"{self.name}: what port {self.place.port} holds as {key!r} is ignored: {error}"
                print(message, file=sys.stderr, flush=True)
            return None

    # --- the thread ---

    def _exchange(self) -> None:
        while True:
            is_last = self._closing.is_set()
            self._heartbeat += 1
            try:
                if self.leads:
                    self._read_nodes()
                    supervisors = {rank: node.id for rank, node in self.nodes.items()}
                    job = replace(self.job, leader=self.node.id, heartbeat=self._heartbeat, supervisors=supervisors)
                    self._write(JOB_KEY, job)
                else:
                    self._read_job()
                    node = replace(self.node, leader=self._leader, heartbeat=self._heartbeat)
                    self._write(f"node/{self.place.rank}", node)
            except RuntimeError:
                pass  # node 0 is gone or unreachable: job_changed grows old
            if is_last:
                return
            self._closing.wait(HEARTBEAT_SECONDS)

    def _read_job(self) -> None:
        """Read the job's state; of one from before this node joined only who leads, of an older one (replayed) nothing.

        Until node 0 has seen this node, it writes to each leader that it reads of: node 0 overwrites every other one.
        """
        job = self._read(self._store, JOB_KEY)
        if job and not self.job.heartbeat:
            self._leader = job.leader
        if job and job.supervisors.get(self.place.rank) == self.node.id and job.heartbeat > self.job.heartbeat:
            self.job, self.job_changed = job, time.monotonic()

    def _read_nodes(self) -> None:
        """Read the other nodes' states; keep the last valid one of each."""
        nodes = {0: replace(self.node, heartbeat=self._heartbeat)}
        for rank in range(1, self.place.most):
            state, before = self._read(self._store, f"node/{rank}"), self.nodes.get(rank)
            if state and self._is_old(state, before):
                state = None
            if state and before and state.id != before.id:
                self._replaced.add(before.id)
            if state or before:
                nodes[rank] = state or before
        for rank, state in nodes.items():
            before = self.nodes.get(rank)
            if before is None or (state.id, state.heartbeat) != (before.id, before.heartbeat):
                self.node_changed[rank] = time.monotonic()
        self.nodes = nodes

    def _is_old(self, state: NodeState, before: NodeState | None) -> bool:
        """Return whether a state is of another job, a replaced supervisor or an earlier time (replayed)."""
        is_same_supervisor = before is not None and state.id == before.id
        return (
            state.leader != self.node.id
            or state.id in self._replaced
            or (is_same_supervisor and state.heartbeat < before.heartbeat)
        )
