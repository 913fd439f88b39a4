"""Decide on node 0 what the nodes of a job do next, and carry it out on every node.

An attempt of the job is one round (rounds.py). Node 0 orders it once all nodes are ready, and ends it for all once a
node is lost or ranks have failed. A signal is passed to the ranks of its own node only: all ranks agree to save
(train/stop.py). Every wait has a timeout.
"""

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from zerofit.base import rank_status
from zerofit.base.errors import EXIT_CODES, UserError
from zerofit.checkpoint import next_settings
from zerofit.job.request import Request
from zerofit.launch.cluster import messages, node_options, rounds
from zerofit.launch.cluster.messages import Begun, End, NodeState, Order, Report

GRACE_SECONDS = 5.0  # for ranks to end by themselves after those of another node have failed


@dataclass
class AttemptState:
    """A supervisor's state of the running attempt; the next attempt gets a new one."""

    order: Order = field(default_factory=lambda: Order(nodes={}, decided={}, folder=""))
    killed: bool = False  # this supervisor has ended its ranks
    # the rest on node 0 only
    lost: list[int] = field(default_factory=list)  # nodes that the attempt has lost
    failing_since: float | None = None  # when ranks of some, but not all nodes had failed
    change: str = ""  # why the next attempt of an elastic job has other nodes


class Coordinator:
    """One supervisor's part in a job on several nodes."""

    def __init__(self, place: node_options.Place, gpus: int):
        """Join the job. Args: gpus: processes of this node. Raises: UserError as rounds.Meeting."""
        self.place, self.leads, self._gpus = place, place.rank == 0, gpus
        self.meeting = rounds.Meeting(place)
        self.name = f"node {place.rank} ({self.meeting.host})"
        self.round: rounds.Round | None = None
        self.attempt = AttemptState()
        self.nodes: dict[int, int] = {}  # of the next attempt: {node rank: its processes}; on node 0 only
        self.effective_batch_size: int | None = None  # of the job, once it is known; on node 0 only
        self._begun: Begun | None = None
        self._is_ready = self._has_ended = False

    def __enter__(self):
        def end(number, _frame):
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, end)  # until ranks run: then supervisor.watch has its own handler
        return self

    def __exit__(self, kind, error, _traceback) -> None:
        """Leave the job; send the other nodes an error that ends this one."""
        sentence = str(error) if isinstance(error, UserError) else "was ended"
        if self.leads and not self._has_ended:
            code = error.code if isinstance(error, SystemExit) else rank_status.exit_code(rank_status.kind(error))
            self.end(code, sentence if sentence.startswith("node ") else f"{self.name}: {sentence}")
        elif self.round and not self._has_ended:
            self.round.update_node(error=sentence)
        if self.round:
            self.round.close()
        if not self.leads and self._has_ended:
            self.meeting.store.add("left", 1)

    # --- rounds ---

    def meet(self) -> None:
        """Join the next round. Raises: UserError if too few nodes join in time; SystemExit if the job has ended."""
        while True:
            if self.round:
                self.round.close()
            try:
                store, size = self.meeting.next()
            except TimeoutError:
                if not self.leads and self._begun and self.place.least < self.place.most:
                    continue  # until the batch can be divided with this node
                raise UserError(self.meeting.who_is_missing()) from None
            except ConnectionError as error:
                self._end_if_told(self.meeting.told("end", End))
                raise UserError(f"node 0 ({self.place.address}) has left: {error}.") from None
            node = NodeState(self.meeting.host, self.meeting.address, self._gpus, is_ready=self._is_ready)
            self.round = rounds.Round(self.meeting, store, size, node)
            if not self.leads or self._all_have_come():
                return
            self.round.update_round(is_over=True, is_closed=True)

    def _all_have_come(self) -> bool:
        """Wait until each node of the round has written; return False if one does not in time."""
        self.round.update_round(begun=self._begun)
        deadline = time.monotonic() + self.place.lost
        while len(self.round.nodes) < self.round.size and time.monotonic() < deadline:
            time.sleep(rounds.HEARTBEAT_SECONDS / 2)
        return len(self.round.nodes) == self.round.size

    def processes(self) -> dict[int, int]:
        """Return {node rank: its processes} of the round. Node 0 only."""
        return {rank: self.round.nodes[rank].gpus for rank in sorted(self.round.nodes)}

    def _wait_for(self, ready: Callable[[], object], what: Callable[[], str]):
        """Poll `ready` until it returns a true value and return it; print every ten seconds what this node waits for.

        Raises: UserError for the error of another node; SystemExit at the end of the job, or if node 0 is lost.
        """
        last_print = time.monotonic()
        while not (value := ready()):
            if self.leads:
                for rank, node in self.round.nodes.items():
                    if node.error:
                        raise UserError(f"{self.meeting.host_of(rank)}: {node.error}")
            else:
                self._end_if_told(self.round.end)
                self._end_without_node_0()
            if time.monotonic() - last_print > 10:
                last_print = time.monotonic()
                print(f"{self.name}: waiting for {what()}", flush=True)
            time.sleep(rounds.HEARTBEAT_SECONDS / 2)
        return value

    def _end_if_told(self, end: End | None) -> None:
        if end:
            self._has_ended = True
            if end.sentence and end.code:
                print(f"{self.name}: zerofit: {end.sentence}", file=sys.stderr)
            raise SystemExit(end.code)

    def _end_without_node_0(self) -> None:
        if self.round.is_silent(0):
            print(
                f"{self.name}: zerofit: node 0 ({self.place.address}) has sent no heartbeat for "
                f"{self.place.lost:.0f} s; start again with --resume_from_checkpoint auto",
                file=sys.stderr,
            )
            raise SystemExit(1)

    # --- node 0: the start, orders and the end ---

    def begin_with(self, nodes: dict[int, int], asked: Request) -> None:
        """Publish what the other nodes need to check their data. nodes: {node rank: its processes}."""
        self.nodes = nodes
        self._begun = Begun(next_settings.decisions(asked), sum(nodes.values()))
        self.round.update_round(begun=self._begun)
        self.meeting.store.set("job", messages.text(self._begun))

    def wait_until_ready(self) -> None:
        """Wait until all nodes of the round have checked their model and data, or are lost. Raises: UserError."""
        self._is_ready = True
        self.round.update_node(is_ready=True)

        def busy() -> list[int]:
            nodes = self.round.nodes
            return [rank for rank in nodes if not nodes[rank].is_ready and not self.round.is_silent(rank)]

        self._wait_for(lambda: not busy(), lambda: f"{self._hosts(busy())} to prepare model and data")

    def order(self, asked: Request, folder: Path) -> None:
        """Order the next attempt, on the nodes `self.nodes`. folder: the run folder."""
        self.wait_until_ready()
        order = Order(self.nodes, next_settings.decisions(asked), str(folder))
        self.attempt = AttemptState(order)
        self.round.update_round(order=order)

    def end(self, code: int, sentence: str) -> None:
        """Publish the end of the job."""
        self._has_ended = True
        others = sum(self.meeting.store.check([f"here/{rank}"]) for rank in range(1, self.place.most))
        self.meeting.end(End(code, sentence), others)

    # --- the other nodes ---

    def begun(self) -> Begun:
        """Return node 0's decisions for the start; join the first round, unless the job runs already."""
        self._begun = self.meeting.told("job", Begun)
        while not self._begun:
            self.meet()
            self._wait_for(lambda: self.round.state.begun or self.round.state.is_closed, lambda: "node 0")
            self._begun = self.round.state.begun
        return self._begun

    def next_order(self) -> Order:
        """Return node 0's next order, in the next round, with this node in it. Raises: SystemExit as `_wait_for`."""
        self._is_ready = True
        if self.round:
            self.round.update_node(is_ready=True)
        if self.attempt.order.nodes:
            self._wait_for(lambda: self.round.state.is_closed, lambda: "the other nodes")
            if self.round.node.report.signals:
                raise SystemExit(EXIT_CODES["stopped"])
        while True:
            if not self.round or self.round.state.is_closed:
                self.meet()
            self._wait_for(lambda: self.round.state.order or self.round.state.is_closed, lambda: "node 0")
            if order := self.round.state.order:
                if self.place.rank in order.nodes:
                    self.attempt = AttemptState(order)
                    return order
                print(f"{self.name}: not needed now; waiting", flush=True)
                self._wait_for(lambda: self.round.state.is_closed, lambda: "a place in the job")

    # --- each node: an attempt ---

    def environment(self) -> dict[str, str]:
        """Return the variables of the interface to the other nodes."""
        others = [node.address for rank, node in self.round.nodes.items() if rank]  # known to node 0 only
        return node_options.interface_variables(self.place, others[0] if others else self.place.address)

    def poll(self, records: Path, end_ranks: Callable[[int], None]) -> None:
        """Carry out node 0's decisions; called at each poll of the supervisor.

        Args: records: the attempt's folder; end_ranks: called with the signal that ends the ranks.
        """
        if self.leads:
            self.decide(records)
        is_orphaned = not self.leads and (self.round.end is not None or self.round.is_silent(0))
        if (self.round.state.is_over or is_orphaned) and not self.attempt.killed:
            self.attempt.killed = True
            end_ranks(signal.SIGKILL)

    def report(self, code: int, signals: list[int], hung: int | None, records: Path) -> None:
        """Send node 0 the exit code of this node's ranks and the files that they wrote."""
        files = messages.read_files(records)
        report = Report(code, [int(number) for number in signals], hung, self.attempt.killed, files)
        self.round.update_node(report=report)

    # --- node 0: during an attempt ---

    def decide(self, records: Path | None = None) -> None:
        """Handle lost nodes, failed ranks and newcomers, in this order. records: of ranks that run on this node."""
        attempt, reports, nodes = self.attempt, self._reports(), self.attempt.order.nodes
        lost = [rank for rank in nodes if rank and rank not in reports and self._is_lost(rank)]
        failed = [report for report in reports.values() if report.code not in (0, EXIT_CODES["stopped"])]
        if lost:
            attempt.lost = lost
            self.round.update_round(is_over=True)
        elif failed and len(reports) < len(nodes):
            attempt.failing_since = attempt.failing_since or time.monotonic()
            if time.monotonic() - attempt.failing_since > GRACE_SECONDS:
                self.round.update_round(is_over=True)
        elif records and not reports and not attempt.change and self._joining() and self._is_training(records):
            attempt.change = f"{self._joining()} more joined"
            rank_status.ask_to_save(records)

    def _is_training(self, records: Path) -> bool:
        return len(rank_status.heartbeats(records)) == self._gpus

    def _is_lost(self, rank: int) -> bool:
        return self.round.is_silent(rank) or self.round.nodes[rank].error != ""

    def _joining(self) -> int:
        """Return how many nodes wait to join an elastic job, if they would enlarge it."""
        waiting = {self.place.most + i: self._gpus for i in range(self.round.waiting)}
        return len(waiting) if len(self.usable(self.processes() | waiting)) > len(self.attempt.order.nodes) else 0

    def _reports(self) -> dict[int, Report]:
        """Return the reports about this attempt, by node rank."""
        states = self.round.nodes | {0: self.round.node}
        return {rank: states[rank].report for rank in self.attempt.order.nodes if states[rank].report}

    def _hosts(self, ranks: list[int]) -> str:
        return ", ".join(map(self.meeting.host_of, ranks))

    # --- node 0: after an attempt ---

    def collect(self, records: Path) -> tuple[int, list[int], int | None]:
        """Wait for the other nodes' reports and write their ranks' files into `records`.

        Returns: (exit code, signals received, rank furthest behind if the job hung, else None) of the whole job.
        """
        while not set(self.attempt.order.nodes) <= {*self._reports(), *self.attempt.lost}:
            self.decide()
            time.sleep(rounds.HEARTBEAT_SECONDS / 2)
        reports = self._reports()
        for rank, report in reports.items():
            if rank:
                messages.write_files(report.files, records)
        leaving = [rank for rank, report in reports.items() if report.signals]
        is_elastic = len(reports) - len(leaving) >= self.place.least < self.place.most
        if leaving and 0 not in leaving and is_elastic:
            self.attempt.change = f"{self._hosts(leaving)} was asked to leave"
        signals = [number for report in reports.values() for number in report.signals]
        hung = next((report.hung for report in reports.values() if report.hung is not None), None)
        return self._exit_code(list(reports.values())), signals, hung

    def _exit_code(self, reports: list[Report]) -> int:
        """Return the exit code of the first failure.

        Nodes whose ranks failed by themselves come first, and among them those with an error other than a broken
        connection to another rank.
        """
        failures = [r for r in reports if r.code and not r.killed] or [r for r in reports if r.code]
        failures.sort(key=lambda report: not any('"of_a_peer": false' in text for text in report.files.values()))
        if failures:
            return failures[0].code
        return 1 if self.attempt.lost else 0

    def usable(self, nodes: dict[int, int]) -> dict[int, int]:
        """Return the longest prefix of {node rank: processes} whose processes divide the effective batch size."""
        ranks = list(nodes)
        for count in range(len(ranks), 0, -1):
            kept = {rank: nodes[rank] for rank in ranks[:count]}
            if self.effective_batch_size is None or self.effective_batch_size % sum(kept.values()) == 0:
                return kept
        return {rank: nodes[rank] for rank in ranks[:1]}

    def next_nodes(self) -> dict[int, int]:
        """Wait for the next round, --join_timeout for lost nodes; return its usable nodes, {} if too few join."""
        if self.attempt.lost and len(self.round.nodes) - len(self.attempt.lost) < self.place.least:
            print(
                f"zerofit: {len(self.round.nodes) - len(self.attempt.lost)} of {self.place.least} nodes are here; "
                f"waiting {self.place.timeout:.0f} s for {self._hosts(self.attempt.lost)} to be started again, by the "
                "same command",
                file=sys.stderr,
                flush=True,
            )
        self.round.update_round(is_closed=True)
        try:
            self.meet()
        except UserError:
            return {}
        self.nodes = self.usable(self.processes())
        return self.nodes
