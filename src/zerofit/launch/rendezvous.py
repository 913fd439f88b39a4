"""torch's c10d rendezvous of torchrun's agents on several nodes, extended for zerofit jobs.

Used by `torchrun --rdzv_backend zerofit`. It keeps torch's rounds and heartbeats and adds:

- A failure that a restart cannot fix closes the rendezvous, which ends the job on all nodes.
- Missing heartbeats of a node cause a restart; torch's agents wait for their own ranks to fail.
- Ranks save before a restart for a joining node. A node that does not divide the effective batch waits.
- Rank 0 is on the node with NODE_RANK=0. Messages list missing nodes.

The files of an attempt's ranks (base/rank_status.py) move into the run folder before the next round, so that all agents
classify the attempt from the same files.
"""

import contextlib
import json
import os
import pickle
import shutil
import signal
import socket
import threading
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
from torch.distributed import TCPStore
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

from zerofit.base import distributed, health, rank_status
from zerofit.base.errors import EXIT_CODES, UserError, first_line
from zerofit.job import run_folder
from zerofit.launch import node_options, postmortem
from zerofit.launch.postmortem import Outcome

NAME = "zerofit"  # backend and id of its rounds; each job uses a separate store

ENDINGS = "endings.json"  # in the launch's records: outcomes of its attempts, for the supervisor's report

LAST_CALL_SECONDS = 10  # an elastic job with enough nodes waits this long for more

CLOSE_SECONDS = 3.0  # node 0 keeps the store this long, so that the other nodes see the closed rendezvous

GRACE_SECONDS = 5.0  # for ranks to exit on their own after the ranks of another node have ended

POLL_SECONDS = 1.0  # between checks of the other nodes

WAITING_SECONDS = 30.0  # between messages about missing nodes

_RESTARTABLE = ("lost rank", "hang")  # kinds of outcomes that restart with the same settings


class Ended(Exception):
    """The job has ended on this node. outcome: the reason."""

    def __init__(self, outcome: Outcome):
        super().__init__(outcome.sentence)
        self.outcome = outcome


def register() -> None:
    """Register this rendezvous with torchrun."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # the ranks' store uses another port
    rendezvous.rendezvous_handler_registry.register(NAME, meet)


_current: list["Rendezvous"] = []  # at most one, this process's rendezvous


def current() -> "Rendezvous | None":
    """Return the rendezvous of this process's agent, or None if it uses another backend."""
    return _current[0] if _current else None


def meet(options: rendezvous.RendezvousParameters) -> "Rendezvous":
    """Open node 0's store or connect to it, and return this node's rendezvous handler.

    Args: options: from `prepare.node_command`. Raises: UserError, e.g. for a NODE_RANK that is already in use.
    """
    rank, lost = int(options.get("node_rank")), float(options.get("lost"))
    address, _, port = options.endpoint.rpartition(":")
    store = _open(address, int(port), lost) if rank == 0 else _connect(address, int(port), lost)
    backend = c10d_rendezvous_backend.C10dRendezvousBackend(store, options.run_id)
    _check_rank_is_free(rank, backend, lost)
    join, last_call = timedelta(seconds=int(options.get("join_timeout"))), timedelta(seconds=LAST_CALL_SECONDS)
    # torch sorts the nodes by this string; "-" for node 0
    node = f"{rank:05d} {options.get('gpus')} {options.get('local_address', '-')} {socket.gethostname()}"
    handler = Rendezvous.from_backend(
        options.run_id, store, backend, options.min_nodes, options.max_nodes, node,
        dynamic_rendezvous.RendezvousTimeout(join, last_call), keep_alive_interval=max(1, int(lost / 3)),
    )  # fmt: skip
    handler.options, handler.backend = options, backend
    handler.rank, handler.lost, handler.address, handler.port = rank, lost, address, int(port)
    handler.node_key, handler.name = node, _name(node)
    _current[:] = [handler]
    return handler


class Rendezvous(dynamic_rendezvous.DynamicRendezvousHandler):
    """This node's rendezvous handler, created by `meet`."""

    options: rendezvous.RendezvousParameters
    backend: c10d_rendezvous_backend.C10dRendezvousBackend
    rank: int  # NODE_RANK
    lost: float  # seconds without a heartbeat until a node is lost
    address: str  # node 0
    port: int
    node_key: str  # torch's identifier of this node
    name: str  # this node, for messages

    def __init__(self, *args):
        super().__init__(*args)
        self.folder, self.records = Path(os.environ[rank_status.RUN_FOLDER]), rank_status.folder() or Path()
        self.attempt = 0  # number of the current or last attempt; 0 before the first
        self.nodes: set = set()  # the last round, as torch's descriptions
        self._required: set = set()  # nodes without which this node cannot continue
        self._is_short = False  # whether a node left before this node saw it
        self.endings: list[Outcome] = []
        self._restarts, self._save_requested = 0, False
        self._leaves = self._is_over = self._lingers = False
        self._last_poll, self._kills, self._healthy = 0.0, postmortem.host_kills(), health.read()
        self._left_since: float | None = None  # time.monotonic()

    # --- called by torchrun's agent ---

    def get_backend(self) -> str:
        return NAME

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        """Classify the ended attempt, and wait for the next round. Raises: Ended, UserError."""
        self._lingers = self.rank == 0  # if this raises, the other nodes must see the closed rendezvous
        where = self._end_attempt() if self.attempt else None
        before = self.nodes
        while True:
            info = self._join(where)
            self.nodes = set(self._state().participants)
            self._check_clocks()
            attempt, count = self._agreed(info)
            if where:
                self._conclude(where, before - self.nodes, count, attempt, info.rank == 0)
                where = None
            self._required = set(sorted(self.nodes)[:count]) if info.rank < count else self.nodes
            self._is_short = len(self.nodes) < info.world_size
            if info.rank < count:
                break
            print(f"{self.name}: not needed now; waiting", flush=True)
            while not super().num_nodes_waiting() and not self._left():
                time.sleep(POLL_SECONDS)
        self.attempt, self._save_requested, self._lingers, self._left_since = attempt, False, False, None
        others = [node.addr.split()[2] for node in sorted(self.nodes)[1:]]
        peer = self.address if self.rank or not others else others[0]
        os.environ |= node_options.interface_variables(self.options.get("interface", ""), peer, self.port)
        place = f"{self._ranks(count)} process{'es' * (self._ranks(count) > 1)} on {count} node{'s' * (count > 1)}"
        print(f"{self.name}: {place}; run folder {self.folder}", flush=True)
        rank_store = rendezvous.RendezvousStoreInfo(self.address, self.port + 1)
        return rendezvous.RendezvousInfo(info.store, info.rank, count, rank_store)

    def num_nodes_waiting(self) -> int:
        """Return the number of lost nodes, for which torchrun ends this node's ranks and starts a new round.

        For nodes that wait to join, request the ranks to save and end first.
        """
        if time.monotonic() - self._last_poll < POLL_SECONDS:
            return 0
        self._last_poll = time.monotonic()
        try:
            waiting = super().num_nodes_waiting()
            if left := self._left():
                return left if self._is_time_to_end() else 0
            if waiting and not self._save_requested and self._grows(waiting) and self._is_training():
                self._save_requested = True
                rank_status.request_save(self.records)
        except rendezvous.RendezvousError:  # node 0 is lost
            return 1
        return 0

    def _is_time_to_end(self) -> bool:
        """Return whether this node's ranks have had time to exit on their own after their peers left.

        The time for a save is unlimited.
        """
        records = [*rank_status.records(self.records), *rank_status.records(self._where())]
        self._left_since = self._left_since or time.monotonic()
        is_saving = any(record["kind"] == "stopped" for record in records)
        return not is_saving and time.monotonic() - self._left_since > GRACE_SECONDS

    def shutdown(self) -> bool:
        """Close the rendezvous for all nodes, or leave it if only this node ends."""
        if self._leaves:
            self._expire()
        if self._leaves or self._is_over:
            return True
        with contextlib.suppress(rendezvous.RendezvousError, RuntimeError):
            super().shutdown()
            if self._lingers:
                time.sleep(CLOSE_SECONDS)
        return True

    def interrupted(self, number: int) -> None:
        """End the job after a signal to torchrun. Except for Ctrl-C, an elastic job continues without this node."""
        if self.attempt:
            record = {
                "rank": None, "time": time.time(), "kind": "interrupted", "traceback": "", "of_a_peer": False,
                "error": f"KeyboardInterrupt: {self.name} was ended by {signal.Signals(number).name}", "phase": "",
            }  # fmt: skip
            rank_status.write_json(self.records / f"rank-of-node{self.rank}.json", record)
            self._archive()
        self._lingers = self.rank == 0
        self._leaves = self._is_elastic() and number != signal.SIGINT and self.rank != 0
        self.shutdown()

    # --- the store and its nodes ---

    def _state(self):
        """Return torch's shared state of the rendezvous, or None before its first round."""
        return _state_of(self.backend)

    def _check_clocks(self) -> None:
        """Check the nodes' clocks, by which torch detects dead nodes. Raises: UserError."""
        for node, beat in self._state().last_heartbeats.items():
            ahead = (beat - datetime.now(UTC)).total_seconds()
            if ahead > self.lost / 2 and node.addr != self.node_key:
                raise UserError(
                    f"the clock of {_name(node.addr)} is {ahead:.0f} s ahead of the clock of {self.name}; nodes use "
                    "their clocks to detect dead nodes: synchronize them with NTP."
                )

    def _left(self) -> int:
        """Return how many required nodes have left; 1 if the rendezvous is closed."""
        state = self._state()
        return 1 if state.closed else len(self._required - set(state.participants)) + self._is_short

    def _expire(self) -> None:
        """Make the other nodes see immediately that this node has left, by an old heartbeat."""
        with contextlib.suppress(rendezvous.RendezvousError):
            for _ in range(10):
                content, token = self.backend.get_state()
                state = pickle.loads(content)
                for node in state.last_heartbeats:
                    if node.addr == self.node_key and node.pid == os.getpid():
                        state.last_heartbeats[node] = datetime.min.replace(tzinfo=UTC)
                if (result := self.backend.set_state(pickle.dumps(state), token)) and result[2]:
                    return

    # --- a round ---

    def _join(self, where: Path | None) -> rendezvous.RendezvousInfo:
        """Wait for torch's next round. where: records of the previous attempt, None before the first."""
        present: set[str] = set()
        done = threading.Event()
        thread = threading.Thread(target=self._print_missing_nodes, args=(present, done), daemon=True)
        thread.start()
        try:
            return super().next_rendezvous()
        except rendezvous.RendezvousTimeoutError:
            if where:
                gone = {node for node in self.nodes if node.addr not in present}
                raise self._ended(self._with_lost_nodes(self._outcome(where), gone, where)) from None
            raise UserError(self._missing_nodes_error(present)) from None
        except (rendezvous.RendezvousError, RuntimeError) as error:
            self._is_over = True
            is_closed = isinstance(error, rendezvous.RendezvousClosedError | rendezvous.RendezvousGracefulExitError)
            if not self.nodes and len(present) < self.options.min_nodes:  # another node has timed out
                raise UserError(self._missing_nodes_error(present)) from None
            raise self._ended(self._ended_elsewhere(where, is_closed)) from None
        finally:
            done.set()
            thread.join(2 * POLL_SECONDS)

    def _print_missing_nodes(self, present: set[str], done: threading.Event) -> None:
        """Print from time to time which nodes are missing. present: receives the addresses of present nodes."""
        began, first, wait = time.monotonic(), 3.0, self._number("join_timeout")
        with contextlib.suppress(rendezvous.RendezvousError, RuntimeError):
            while not done.wait(POLL_SECONDS):
                seconds, state = time.monotonic() - began, self._state()
                if state is None or done.is_set() or seconds > wait - 2:  # other nodes may already have timed out
                    continue
                present.clear()
                present |= {
                    node.addr for node in {*state.participants, *state.wait_list} if node in state.last_heartbeats
                }
                if seconds > first and len(present) < self.options.min_nodes:
                    first = seconds + WAITING_SECONDS
                    status = f"{len(present)} of {self.options.min_nodes} nodes are present"
                    missing = f"waiting {wait} s for {self._missing(present)}; start it with the same command"
                    print(f"{self.name}: {status}; {missing}", flush=True)

    def _number(self, name: str) -> int:
        """Return a numeric option."""
        return int(self.options.get(name))

    def _missing(self, present: set[str]) -> str:
        missing = set(range(self.options.max_nodes)) - {int(address[:5]) for address in present}
        return f"node {', '.join(map(str, sorted(missing)))}"

    def _missing_nodes_error(self, present: set[str]) -> str:
        wait = self._number("join_timeout")
        return (
            f"{self._missing(present)} of {self.options.max_nodes} did not join within {wait} s (present: "
            f"{', '.join(map(_name, sorted(present)))}): start the same command there with its NODE_RANK; check that "
            f"it can connect to {self.address}:{self.port} and that the nodes' clocks agree."
        )

    def _agreed(self, info: rendezvous.RendezvousInfo) -> tuple[int, int]:
        """Return (attempt number, number of nodes), which rank 0 writes into the round's store."""
        if info.rank == 0:
            if not self.attempt:
                (self.folder / run_folder.NEXT_START).unlink(missing_ok=True)  # from an earlier job
            earlier = [int(file.name) for file in (self.folder / "attempts").glob("[0-9]*") if file.name.isdigit()]
            agreed = max([self.attempt, *earlier]) + 1, self._usable(self._gpus(self.nodes)), self.attempt > 0
            info.store.set(NAME, json.dumps(agreed))
        attempt, count, is_restart = json.loads(info.store.get(NAME))
        if is_restart:
            os.environ[distributed.RESTARTED] = "1"
        return attempt, count

    def _gpus(self, nodes: set) -> list[int]:
        """Return the number of processes of each node, by rank."""
        return [int(node.addr.split()[1]) for node in sorted(nodes)]

    def _usable(self, gpus: list[int]) -> int:
        """Return the largest number of nodes, counted from the first, that divides the effective batch.

        If the batch is unknown or never divisible, return all: the ranks report the error. Args: gpus: per node.
        """
        recorded = run_folder.read_json(self.folder / "run.json").get("arguments", {}).get("effective_batch_size", {})
        batch = recorded.get("value") or self._number("effective_batch_size")
        for count in range(len(gpus), 0, -1) if batch else ():
            groups, rest = divmod(sum(gpus[:count]), self._number("ranks_per_row"))
            if groups and not rest and batch % groups == 0:
                return count
        return len(gpus)

    def _grows(self, waiting: int) -> bool:
        """Return whether the job could use more nodes together with the waiting nodes."""
        gpus = self._gpus(self.nodes)
        return self._usable([*gpus, *[gpus[0]] * waiting]) > self._usable(gpus)

    def _is_training(self) -> bool:
        return len(rank_status.heartbeats(self.records)) == self._number("gpus")

    def _is_elastic(self) -> bool:
        return self.options.min_nodes < self.options.max_nodes

    def _ranks(self, count: int) -> int:
        """Return the number of ranks on the first `count` nodes of the round."""
        return sum(self._gpus(self.nodes)[:count])

    # --- the end of an attempt ---

    def _end_attempt(self) -> Path:
        """Return the ended attempt's records. Raises: Ended if this node's ranks ended the job."""
        save_requested = (self.records / rank_status.SAVE_REQUESTED_FILE).exists()
        where = self._archive()
        last = self._outcome(where)
        if last.kind in _RESTARTABLE and self._restarts == self._number("max_restarts"):
            time.sleep(GRACE_SECONDS)  # another node may report an error that a change fixes
            last = self._outcome(where)
            try:
                last = self._with_lost_nodes(last, self._required - set(self._state().participants), where)
            except rendezvous.RendezvousError:
                raise self._ended(self._ended_elsewhere(where, is_closed=False)) from None
        elif last.kind in _RESTARTABLE:
            return where
        if last.what_next or (last.kind == "stopped" and not save_requested):  # another node ends or joins
            return where
        self._leaves = last.kind == "stopped" and self._is_elastic() and self.rank != 0
        raise self._ended(last)

    def _with_lost_nodes(self, last: Outcome, gone: set, where: Path) -> Outcome:
        """Return the outcome with the names of lost nodes if they explain the lost ranks."""
        if last.kind not in _RESTARTABLE or not gone:
            return last
        return postmortem.lost_node(", ".join(_name(node.addr) for node in sorted(gone)), where)

    def _where(self) -> Path:
        """Return the attempt's folder: attempts/<n> of the run folder, or of the launch's records before that."""
        is_opened = (self.folder / "run.json").exists()
        return (self.folder if is_opened else self.records) / "attempts" / str(self.attempt)

    def _archive(self) -> Path:
        """Move the files of this node's ranks to the attempt's folder; return the folder."""
        where = self._where()
        where.mkdir(parents=True, exist_ok=True)
        for file in [file for file in self.records.iterdir() if file.is_file() and file.name != ENDINGS]:
            is_per_node = file.name in (postmortem.EXITS, rank_status.HUNG_FILE)
            name = f"{file.stem}{self.rank}{file.suffix}" if is_per_node else file.name
            shutil.move(file, where / f".{name}")  # other nodes may read during the copy
            (where / f".{name}").rename(where / name)
        return where

    def _outcome(self, where: Path) -> Outcome:
        """Classify how an attempt ended, from the files that the ranks of all nodes have written so far."""
        records = rank_status.records(where)
        if not records and not [*where.glob(postmortem.EXITS.replace(".", "*."))]:  # agents have ended the ranks
            return postmortem.lost_node("a node", where)
        stops = [signal.SIGTERM] if records and records[0]["kind"] == "stopped" else []
        before, self._kills = self._kills, postmortem.host_kills()
        return postmortem.ending(None, where, stops, None, 0.0, self._kills - before)

    def _ended_elsewhere(self, where: Path | None, is_closed: bool) -> Outcome:
        """Return this node's view of why the job ended. is_closed: closed by another node, else node 0 is lost."""
        if where is None and run_folder.finished(self.folder):  # this node was not needed
            return Outcome("finished", 0)
        last = self._outcome(where) if where else None
        if last is None or last.kind in _RESTARTABLE:
            reason = "the job has ended on another node" if is_closed else (
                f"node 0 ({self.address}) has left or did not respond within {self.lost:.0f} s; start again with "
                "--resume_from_checkpoint auto"
            )  # fmt: skip
            return Outcome("lost rank", 1, error=f"lost: {reason}", step=last and last.step)
        return last

    def _conclude(self, where: Path, gone: set, count: int, attempt: int, leads: bool) -> None:
        """Record how an attempt ended after all its nodes have reported. Raises: Ended after --max_restarts."""
        last = self._with_lost_nodes(self._outcome(where), gone, where)
        if last.kind == "stopped":
            names = ", ".join(_name(node.addr) for node in sorted(gone))
            change = f"{names} was asked to leave" if gone else "more nodes joined"
        elif last.kind in _RESTARTABLE:
            self._restarts += 1
            most, worse = self._number("max_restarts"), health.degradations(self._healthy, health.read())
            if self._restarts > most:
                raise self._ended(last)
            change = f"the same settings (restart {self._restarts} of {most})"
            change += f"; on {self.name} {worse}" if worse else ""
        else:
            change = last.what_next
        ranks = self._ranks(count)
        last.what_next = f"{change}, on {count} node{'s' * (count > 1)} with {ranks} process{'es' * (ranks > 1)}"
        self.endings.append(last)
        self._write_endings()
        if leads:
            if (self.folder / "run.json").exists():
                with contextlib.suppress(OSError):  # the job continues on a full disk
                    postmortem.write(self.folder, self.endings, "", continues=True)
            print(f"zerofit: {last.sentence}\nzerofit: attempt {attempt}: {last.what_next}", flush=True)

    def _ended(self, outcome: Outcome) -> Ended:
        self.endings.append(replace(outcome, what_next=""))
        self._write_endings()
        return Ended(outcome)

    def refused(self, error: UserError) -> None:
        """Record a user error that has already been printed."""
        self.endings.append(Outcome("user error", EXIT_CODES["user error"], error=f"UserError: {error}"))
        self._write_endings()

    def _write_endings(self) -> None:
        """Write the outcomes for the supervisor."""
        rank_status.write_json(self.records / ENDINGS, {"endings": [asdict(ending) for ending in self.endings]})


def _open(address: str, port: int, lost: float) -> TCPStore:
    """Open node 0's store on MASTER_ADDR if it is a local address, else on all. lost: timeout of each call."""
    local_address = node_options.local_address(address, port)
    return TCPStore(
        local_address or "127.0.0.1", port, None, True, timedelta(seconds=lost), wait_for_workers=False,
        master_listen_fd=node_options.listen(local_address, port).detach() if local_address else None,
    )  # fmt: skip


def _connect(address: str, port: int, lost: float) -> TCPStore:
    """Connect to node 0's store. Raises: UserError if another program uses the port."""
    try:
        store = TCPStore(address, port, None, False, timedelta(seconds=lost), wait_for_workers=False)
    except RuntimeError as error:
        raise UserError(
            f"MASTER_ADDR={address} PORT={port}: no zerofit launch responds ({first_line(error)}); start the same "
            "command on that node with NODE_RANK=0."
        ) from None
    _set_ack_timeout(port, timedelta(seconds=lost))
    return store


def _state_of(backend: c10d_rendezvous_backend.C10dRendezvousBackend):
    """Return torch's state of the rendezvous, or None before its first round."""
    content = backend.get_state()
    return pickle.loads(content[0]) if content else None


def _check_rank_is_free(rank: int, backend, lost: float) -> None:
    """Check that no running node has this rank. Raises: UserError."""

    def beats() -> dict:
        last = state.last_heartbeats if (state := _state_of(backend)) else {}
        return {node: beat for node, beat in last.items() if int(node.addr[:5]) == rank}

    if not (before := beats()):
        return
    deadline = time.monotonic() + 2 * lost / 3 + 1  # torch may skip a heartbeat
    while time.monotonic() < deadline:
        if taken := [node for node, beat in beats().items() if before.get(node, beat) != beat]:
            name = _name(taken[0].addr)
            raise UserError(
                f"NODE_RANK={rank} is taken by {name}, which is running; use a different number on each node."
            )
        time.sleep(POLL_SECONDS)


def _set_ack_timeout(port: int, timeout: timedelta) -> None:
    """Close this process's connections to a port if data stays unacknowledged for `timeout`.

    Most calls of torch's store would wait forever on a cut link. The machine of a suspended process
    still sends acknowledgements.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux only
        return
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            with socket.socket(fileno=os.dup(connection.fd)) as duplicate:
                milliseconds = round(timeout.total_seconds() * 1000)
                duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def endings(records: Path) -> list[Outcome]:
    """Return the outcomes that a launch's agent has recorded; [] without a record."""
    return [Outcome(**ending) for ending in run_folder.read_json(records / ENDINGS).get("endings", [])]


def _name(address: str) -> str:
    """Return a node's name for messages."""
    rank, _, _, host = address.split(" ", 3)
    return f"node {int(rank)} ({host})"
