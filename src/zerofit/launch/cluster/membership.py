"""Track which nodes of a job are present: who has come, who is ready, who has left, whose heartbeat has stopped."""

import time
from pathlib import Path

from zerofit.base.errors import UserError
from zerofit.launch.cluster.documents import End
from zerofit.launch.cluster.transport import HEARTBEAT_SECONDS, Transport
from zerofit.train import consistency

LOST_SECONDS = 15.0  # without a heartbeat, after which a node is lost

LAST_CALL_SECONDS = 10.0  # how long an elastic job with enough nodes waits for one more

LEAVE_SECONDS = 5.0  # for the other nodes to read the job's end before the store ends with node 0


class Membership:
    """The nodes of a job, as far as their states tell."""

    def __init__(self, transport: Transport):
        self.transport, self.place = transport, transport.place
        self._arrived: dict[int, float] = {}  # when a node was first seen; on node 0 only

    # --- who is here: node 0 only, but for the last one ---

    def present(self) -> list[int]:
        """Return the ranks of the nodes with a recent heartbeat that have not left."""
        nodes, now = self.transport.nodes, time.monotonic()
        return [r for r in sorted(nodes) if now - self.transport.node_changed[r] < LOST_SECONDS and not nodes[r].left]

    def processes(self) -> dict[int, int]:
        """Return {node rank: its processes} of the nodes present, node 0 first."""
        return {rank: self.transport.nodes[rank].gpus for rank in self.present()}

    def host(self, rank: int) -> str:
        """Return a node's name for messages."""
        node = self.transport.nodes.get(rank)
        return f"node {rank} ({node.host})" if node else f"node {rank}"

    def is_lost(self, rank: int, supervisor: str | None) -> bool:
        """Return whether a node is gone. supervisor: the id that it had; another one means it was started again."""
        node = self.transport.nodes.get(rank)
        return (
            node is None
            or time.monotonic() - self.transport.node_changed[rank] > LOST_SECONDS
            or node.left
            or node.error != ""
            or supervisor not in (None, node.id)
        )

    def could_join(self, rank: int) -> bool:
        """Return whether a node is ready, with the same data and arguments as node 0."""
        facts = self.transport.nodes[rank].ready
        return facts is not None and not consistency.difference(
            [(self.host(0), self.transport.node.ready), (self.host(rank), facts)]
        )

    def loss_of_node_0(self) -> str:
        """Return a sentence if node 0's heartbeat has stopped, else "". For the other nodes."""
        if time.monotonic() - self.transport.job_changed <= LOST_SECONDS:
            return ""
        return f"node 0 ({self.place.address}) has sent no heartbeat for {LOST_SECONDS:.0f} s"

    # --- the start ---

    def gather(self) -> None:
        """Wait until all nodes are present; on the others, until node 0 has chosen the nodes to begin with.

        An elastic job waits for its minimum, then LAST_CALL_SECONDS for more.
        Raises: UserError, naming the nodes that are missing or whose software differs.
        """
        deadline, last_print = time.monotonic() + self.place.timeout, 0.0
        while not (self._is_gathered() if self.transport.leads else self.transport.job.nodes):
            self._check_job()
            if self.transport.leads and time.monotonic() > deadline:
                raise UserError(self._who_is_missing())
            if time.monotonic() - last_print > 10:
                last_print = time.monotonic()
                print(f"{self.transport.name}: waiting for the other nodes", flush=True)
            time.sleep(HEARTBEAT_SECONDS / 2)
        if self.transport.leads:
            self._compare({rank: self.transport.nodes[rank].facts for rank in self.present()})

    def agree(self, facts: dict, folder: Path | None) -> Path:
        """Report this node ready, wait until all are, and return the run folder that node 0 has chosen.

        Args: facts: must be equal on all nodes (consistency.of_job); folder: the run folder, on node 0.
        Raises: UserError, naming the node that differs.
        """
        self.transport.update_node(ready=facts)
        last_print = time.monotonic()
        while True:
            self._check_job()
            not_ready = self._not_ready() if self.transport.leads else []
            if self.transport.leads and not not_ready:
                ready = {rank: self.transport.nodes[rank].ready for rank in self.present()}
                self._compare({rank: theirs for rank, theirs in ready.items() if theirs is not None})
                self.transport.update_job(folder=str(folder.absolute()))
            if self.transport.job.folder:
                return Path(self.transport.job.folder)
            if time.monotonic() - last_print > 10:
                last_print = time.monotonic()
                names = ", ".join(map(self.host, not_ready)) or "the other nodes"
                print(f"{self.transport.name}: waiting for {names} to prepare model and data", flush=True)
            time.sleep(HEARTBEAT_SECONDS / 2)

    def _is_gathered(self) -> bool:
        nodes = self.present()
        if len(nodes) == self.place.most:
            return True
        self._arrived = {rank: self._arrived.get(rank, time.monotonic()) for rank in nodes}
        last_call = max(self._arrived.values(), default=0.0) + LAST_CALL_SECONDS
        return len(nodes) >= self.place.least < self.place.most and time.monotonic() > last_call

    def _who_is_missing(self) -> str:
        nodes, place = self.present(), self.place
        missing = [str(rank) for rank in range(place.most) if rank not in nodes]
        return (
            f"node {', '.join(missing)} of {place.most} did not come within {place.timeout:.0f} s (here: "
            f"{', '.join(map(self.host, nodes))}): start the same command there with its NODE_RANK, and see that "
            f"it reaches {place.address}:{place.port}."
        )

    def _not_ready(self) -> list[int]:
        """Return the job's nodes that are still preparing. Raises: UserError for a lost one."""
        nodes, present_nodes = self.transport.job.nodes, self.present()
        for rank in nodes:
            if rank not in present_nodes:
                raise UserError(f"{self.host(rank)} has left, or has sent no heartbeat for {LOST_SECONDS:.0f} s.")
        return [rank for rank in nodes if self.transport.nodes[rank].ready is None]

    def _check_job(self) -> None:
        """Raise if another node has ended the job, or node 0 is lost. Raises: UserError."""
        if self.transport.leads:
            for rank, node in self.transport.nodes.items():
                if node.error:
                    raise UserError(f"{self.host(rank)}: {node.error}")
        elif self.transport.job.end:
            raise UserError(self.transport.job.end.sentence or "node 0 has ended the job.")
        elif sentence := self.loss_of_node_0():
            raise UserError(f"{sentence}.")

    def _compare(self, facts: dict[int, dict]) -> None:
        """Check that these facts, by node rank, are equal. Raises: UserError, naming the first difference."""
        if sentence := consistency.difference([(self.host(rank), theirs) for rank, theirs in facts.items()]):
            raise UserError(sentence)

    # --- the end ---

    def leave(self, error: str = "") -> None:
        """Leave the job. error: sent to the other nodes if this node ends before the job does."""
        if error and self.transport.leads:
            sentence = error if error.startswith("node ") else f"{self.transport.name}: {error}"
            self.transport.update_job(end=End(2, sentence))
        elif error:
            self.transport.update_node(error=error)
        else:
            self.transport.update_node(left=True)
        if self.transport.leads:
            deadline = time.monotonic() + LEAVE_SECONDS
            while time.monotonic() < deadline and any(rank and not self._has_left(rank) for rank in self.present()):
                time.sleep(HEARTBEAT_SECONDS / 2)
        self.transport.close()

    def _has_left(self, rank: int) -> bool:
        return self.transport.nodes[rank].left or self.transport.nodes[rank].error != ""
