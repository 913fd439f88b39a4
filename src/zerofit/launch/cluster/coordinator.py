"""Decide on node 0 what each attempt of a job on several nodes does next, and carry it out on every node.

Node 0 orders an attempt, and may order a stop (all ranks save after the same step and end) or a kill; the other nodes
follow. transport.py carries the orders and the nodes' states, membership.py knows which nodes are here. Every wait has
a timeout.
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
from zerofit.launch.cluster import node_options
from zerofit.launch.cluster.documents import (
    End,
    JobState,
    Kill,
    NodeState,
    Order,
    Progress,
    Report,
    Stop,
    read_files,
    write_files,
)
from zerofit.launch.cluster.membership import Membership
from zerofit.launch.cluster.transport import HEARTBEAT_SECONDS, Transport

GRACE_SECONDS = 5.0  # for ranks to end by themselves after those of another node have failed


@dataclass
class AttemptState:
    """What a supervisor knows of the running attempt; the next attempt gets a new one."""

    order: Order = field(default_factory=lambda: Order(attempt=0, nodes={}, decided={}, addresses={}))
    asked_to_save: bool = False
    killed: bool = False
    # the rest on node 0 only
    supervisors: dict[int, str] = field(default_factory=dict)  # {node rank: id of its supervisor} at the start
    lost: list[int] = field(default_factory=list)  # nodes that the attempt has lost
    failing_since: float | None = None  # when ranks of some, but not all nodes had failed
    signaled_since: float | None = None  # since when a signal waits for ranks without a step
    change: str = ""  # why the next attempt of an elastic job has other nodes


class Coordinator:
    """One supervisor's part in a job on several nodes."""

    def __init__(self, place: node_options.Place, gpus: int, facts: dict, secret: bytes):
        """Join the job; arguments and errors as of Transport."""
        self.transport = Transport(place, gpus, facts, secret)
        self.membership = Membership(self.transport)
        self.attempt = AttemptState()
        self.effective_batch_size: int | None = None  # of the job, once it is known

    def __enter__(self):
        def end(number, _frame):
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, end)  # until ranks run: then supervisor.watch has its own handler
        return self

    def __exit__(self, kind, error, _traceback) -> None:
        """Leave the job; tell the other nodes an error that ends this one."""
        if kind is None or issubclass(kind, SystemExit):
            self.membership.leave()
        else:
            self.membership.leave(str(error) if issubclass(kind, UserError) else kind.__name__)

    @property
    def place(self) -> node_options.Place:
        return self.transport.place

    @property
    def name(self) -> str:
        return self.transport.name

    @property
    def leads(self) -> bool:
        return self.transport.leads

    @property
    def job(self) -> JobState:
        return self.transport.job

    @property
    def world_size(self) -> int:
        """Number of ranks of the attempt; before the first, of the nodes that the job begins with.

        A node that joins later prepares with the same number.
        """
        return sum((self.attempt.order.nodes or self.job.nodes or self.membership.processes()).values())

    # --- node 0: orders ---

    def begin_with(self, nodes: dict[int, int], asked: Request) -> None:
        """Publish the job's nodes, {node rank: its processes}, and the arguments that node 0 decides."""
        self.transport.update_job(nodes=nodes, decided=next_settings.decisions(asked))

    def order(self, number: int, nodes: dict[int, int], asked: Request) -> None:
        """Order attempt `number` on these nodes, {node rank: its processes}."""
        addresses = {rank: self.transport.nodes[rank].address for rank in nodes}
        order = Order(number, nodes, next_settings.decisions(asked), addresses)
        self.begin(order)
        self.attempt.supervisors = {rank: self.transport.nodes[rank].id for rank in nodes}
        self.transport.update_job(order=order)

    def end(self, code: int, sentence: str) -> None:
        """Publish the end of the job."""
        self.transport.update_job(end=End(code, sentence))

    # --- each node: an attempt ---

    def begin(self, order: Order) -> None:
        """Start this node's record of the ordered attempt."""
        self.attempt = AttemptState(order)
        self.transport.update_node(report=None, progress=Progress(), signal=None)

    def next_order(self) -> Order | End:
        """Wait for node 0; return the next order with this node in it, or the end of the job."""
        while True:
            job = self.job
            if job.end:
                return job.end
            if job.order and job.order.attempt > self.attempt.order.attempt:
                if self.place.rank in job.order.nodes:
                    return job.order
                if self.transport.node.signal:
                    return End(EXIT_CODES["stopped"], "")
                self.attempt = AttemptState(job.order)
                print(f"{self.name}: not needed for attempt {job.order.attempt}; waiting", flush=True)
            if sentence := self.membership.loss_of_node_0():
                return End(1, f"{sentence}; start again with --resume_from_checkpoint auto")
            time.sleep(HEARTBEAT_SECONDS / 2)

    def poll(self, records: Path, signals: list[int], end_ranks: Callable[[int], None]) -> None:
        """Report the ranks' progress and carry out node 0's stop and kill; called at each poll of the supervisor.

        Args: records: the attempt's folder; signals: those that this supervisor received; end_ranks: called with the
            signal that shall end the ranks.
        """
        steps = [step for _, step, _ in rank_status.heartbeats(records).values()]
        progress = Progress(len(steps), max(steps, default=0))
        self.transport.update_node(progress=progress, signal=signals[0] if signals else None)
        if self.leads:
            self.decide()
        attempt, stop, kill = self.attempt, self._of_attempt(self.job.stop), self._of_attempt(self.job.kill)
        if stop and not attempt.asked_to_save:
            attempt.asked_to_save = True
            rank_status.ask_to_save(records)
        if kill and not attempt.killed:
            attempt.killed = True
            if kill.stacks:
                rank_status.write_stacks(records)
            end_ranks(kill.signal)
        is_orphaned = self.job.end is not None or self.membership.loss_of_node_0() != ""
        if not self.leads and is_orphaned and not attempt.killed:
            attempt.killed = True
            end_ranks(signal.SIGKILL)

    def report(self, code: int, signals: list[int], hung: int | None, records: Path) -> None:
        """Send node 0 the exit code of this node's ranks and the files that they wrote."""
        report = Report(self.attempt.order.attempt, code, hung, self.attempt.killed, read_files(records))
        self.transport.update_node(signal=signals[0] if signals else None, report=report)

    def _of_attempt(self, document: Stop | Kill | Report | None):
        """Return the document if it is about the running attempt, else None."""
        return document if document and document.attempt == self.attempt.order.attempt else None

    # --- node 0: during an attempt ---

    def decide(self) -> None:
        """Handle lost nodes, failed ranks, signals and newcomers, in this order."""
        attempt, states, reports, now = self.attempt, self._states(), self._reports(), time.monotonic()
        lost = [r for r in states if r and r not in reports and self.membership.is_lost(r, attempt.supervisors.get(r))]
        failed = [report for report in reports.values() if report.code not in (0, EXIT_CODES["stopped"])]
        if lost:
            attempt.lost = lost
            self._kill(signal.SIGKILL)
            return
        if failed and len(reports) < len(attempt.order.nodes):
            attempt.failing_since = attempt.failing_since or now
            hung = failed[0].hung is not None
            if hung or now - attempt.failing_since > GRACE_SECONDS:
                self._kill(signal.SIGKILL, stacks=hung)
                return
        self._order_stop_or_kill(states, has_ended=bool(reports))

    def _states(self) -> dict[int, NodeState]:
        """Return the states of the attempt's nodes, by node rank."""
        nodes = self.transport.nodes
        return {rank: nodes[rank] for rank in sorted(self.attempt.order.nodes)} | {0: self.transport.node}

    def _reports(self) -> dict[int, Report]:
        """Return the reports about this attempt, by node rank."""
        reports = {rank: state.report for rank, state in self._states().items()}
        return {rank: report for rank, report in reports.items() if self._of_attempt(report)}

    def _order_stop_or_kill(self, states: dict[int, NodeState], has_ended: bool) -> None:
        """Order a stop or a kill if a node received a signal, a stop if a node joins.

        Asked to stop, the ranks agree on the step. Ranks that have not all made one cannot save: they get the signal
        itself, after GRACE_SECONDS (other nodes' progress is a second old).
        A signal that does not ask for a save (SIGINT) is passed on at once.
        """
        attempt = self.attempt
        signals = {rank: state.signal for rank, state in states.items() if state.signal}
        newcomers = self._newcomers()
        if (not signals and not newcomers) or self._of_attempt(self.job.stop) or self._of_attempt(self.job.kill):
            return
        number = next(iter(signals.values()), signal.SIGTERM)
        now = time.monotonic()
        is_training = sum(state.progress.ranks for state in states.values()) >= sum(attempt.order.nodes.values())
        if number not in rank_status.ASKS_TO_SAVE:
            self._kill(number)
        elif signals and not is_training:
            attempt.signaled_since = attempt.signaled_since or now
            if now - attempt.signaled_since > GRACE_SECONDS:
                self._kill(number)
        elif is_training and not has_ended:
            self.transport.update_job(stop=Stop(attempt.order.attempt))
            attempt.change = self._change(signals, newcomers)

    def _change(self, signals: dict[int, int], newcomers: list[int]) -> str:
        """Return why the next attempt of an elastic job has other nodes; "" if the job ends."""
        remaining = len(self.attempt.order.nodes) - len(signals)
        if newcomers and not signals:
            return f"{', '.join(map(self.membership.host, newcomers))} joined"
        if signals and 0 not in signals and remaining >= self.place.least < self.place.most:
            return f"{', '.join(map(self.membership.host, signals))} was asked to leave"
        return ""

    def _newcomers(self) -> list[int]:
        """Return nodes that wait to join an elastic job and would enlarge it."""
        if self.place.least == self.place.most:
            return []
        nodes = self.attempt.order.nodes
        ready = {
            rank: gpus for rank, gpus in self.membership.processes().items()
            if rank not in nodes and self.membership.could_join(rank)
        }  # fmt: skip
        return list(ready) if len(self.usable(nodes | ready)) > len(nodes) else []

    def _kill(self, number: int, stacks: bool = False) -> None:
        if not self._of_attempt(self.job.kill):
            self.transport.update_job(kill=Kill(self.attempt.order.attempt, int(number), stacks))

    # --- node 0: after an attempt ---

    def collect(self, records: Path) -> tuple[int, list[int], int | None]:
        """Wait for the other nodes' reports and write their ranks' files into `records`.

        Returns: (exit code, signals received, rank furthest behind if the job hung, else None) of the whole job.
        """
        while True:
            self.decide()
            reports = self._reports()
            if set(self.attempt.order.nodes) <= {*reports, *self.attempt.lost}:
                break
            time.sleep(HEARTBEAT_SECONDS / 2)
        for rank, report in reports.items():
            if rank:
                write_files(report.files, records)
        nodes = self.transport.nodes | {0: self.transport.node}
        signals = [node.signal for node in nodes.values() if node.signal]
        hung = next((report.hung for report in reports.values() if report.hung is not None), None)
        return self._exit_code(list(reports.values())), signals, hung

    def _exit_code(self, reports: list[Report]) -> int:
        """Return the exit code of the first failure.

        That is preferably of a node whose ranks failed by themselves, and among those of one with an error other than
        a broken connection to another rank.
        """
        failures = [r for r in reports if r.code and not r.killed] or [r for r in reports if r.code]
        failures.sort(key=lambda report: not any('"of_a_peer": false' in text for text in report.files.values()))
        if failures:
            return failures[0].code
        return 1 if self.attempt.lost else 0

    def usable(self, nodes: dict[int, int]) -> dict[int, int]:
        """Return the longest beginning of {node rank: processes} whose processes divide the effective batch size."""
        ranks = list(nodes)
        for count in range(len(ranks), 0, -1):
            kept = {rank: nodes[rank] for rank in ranks[:count]}
            if self.effective_batch_size is None or self.effective_batch_size % sum(kept.values()) == 0:
                return kept
        return {rank: nodes[rank] for rank in ranks[:1]}

    def next_nodes(self) -> dict[int, int] | None:
        """Return the nodes of the next attempt, {node rank: processes}; None if too few.

        With fewer than the minimum, waits --join_timeout for lost nodes to be started again.
        """
        leaving = {rank for rank, node in self.transport.nodes.items() if node.signal and rank}
        deadline, is_printed = time.monotonic() + self.place.timeout, False
        while True:
            nodes = {
                rank: gpus for rank, gpus in self.membership.processes().items()
                if rank not in leaving and (rank == 0 or self.membership.could_join(rank))
            }  # fmt: skip
            if len(nodes) >= self.place.least:
                return self.usable(nodes)
            if time.monotonic() > deadline:
                return None
            if not is_printed:
                is_printed = True
                gone = ", ".join(self.membership.host(rank) for rank in self.job.nodes if rank not in nodes)
                message = (
                    f"zerofit: {len(nodes)} of {self.place.least} nodes are here; waiting {self.place.timeout:.0f} s "
                    f"for {gone} to be started again, by the same command"
                )
                print(message, file=sys.stderr, flush=True)
            time.sleep(HEARTBEAT_SECONDS / 2)
