"""torch's c10d rendezvous, in which torchrun's agents of several nodes meet, with what a job of zerofit knows more.

`torchrun --rdzv_backend zerofit`: the nodes, their rounds and their heartbeats are torch's. Added are:

- a failure that no restart mends closes the rendezvous, which ends the job on all nodes;
- a node without heartbeats is reason for a restart: torch's agents wait for their own ranks to fail;
- before a restart for a node that joins the ranks save, and a node with which the batch cannot be divided waits;
- rank 0 is on the node with NODE_RANK=0, and nodes that are missing are named.

What the ranks of an attempt have written (base/rank_status.py) is moved into the run folder before the next round, so
that all agents judge the attempt by the same files.
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

NAME = "zerofit"  # of the rendezvous backend, and the id of its rounds: a job has its store for itself

ENDINGS = "endings.json"  # in the launch's records: how its attempts ended, for the supervisor's report

LAST_CALL_SECONDS = 10  # how long an elastic job with enough nodes waits for one more

LEAVE_SECONDS = 3.0  # for the other nodes to see that the rendezvous is closed, before its store ends with node 0

GRACE_SECONDS = 5.0  # for ranks to end by themselves after those of another node have

LOOK_SECONDS = 1.0  # between looks at the other nodes

WAITING_SECONDS = 30.0  # between lines about nodes that are missing

_RESTARTED = ("lost rank", "hang")  # kinds of outcomes after which the same settings are tried again


class Ended(Exception):
    """The job ends on this node. outcome: why."""

    def __init__(self, outcome: Outcome):
        super().__init__(outcome.sentence)
        self.outcome = outcome


def register() -> None:
    """Add this rendezvous to those of torchrun."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # the ranks' store has a port of its own
    rendezvous.rendezvous_handler_registry.register(NAME, meet)


_own: list["Rendezvous"] = []  # of this process


def own() -> "Rendezvous | None":
    """Return the rendezvous of this process's agent; None under another one."""
    return _own[0] if _own else None


def meet(given: rendezvous.RendezvousParameters) -> "Rendezvous":
    """Connect to node 0's store, which node 0 opens, and return this node's part in the rendezvous.

    Args: given: the options of `prepare.node_command`. Raises: UserError; also for a rank that is taken.
    """
    rank, lost = int(given.get("node_rank")), float(given.get("lost"))
    address, _, port = given.endpoint.rpartition(":")
    store = _open(address, int(port), lost) if rank == 0 else _connect(address, int(port), lost)
    backend = c10d_rendezvous_backend.C10dRendezvousBackend(store, given.run_id)
    _check_rank_is_free(rank, backend, lost)
    join, last_call = timedelta(seconds=int(given.get("join_timeout"))), timedelta(seconds=LAST_CALL_SECONDS)
    # torch ranks the nodes by it; "-": node 0, which needs no way to itself
    node = f"{rank:05d} {given.get('gpus')} {given.get('own_address', '-')} {socket.gethostname()}"
    meeting = Rendezvous.from_backend(
        given.run_id, store, backend, given.min_nodes, given.max_nodes, node,
        dynamic_rendezvous.RendezvousTimeout(join, last_call), keep_alive_interval=max(1, int(lost / 3)),
    )  # fmt: skip
    meeting.given, meeting.backend = given, backend
    meeting.rank, meeting.lost, meeting.address, meeting.port = rank, lost, address, int(port)
    meeting.address_of_node, meeting.name = node, _name(node)
    _own[:] = [meeting]
    return meeting


class Rendezvous(dynamic_rendezvous.DynamicRendezvousHandler):
    """torch's rendezvous, as this node takes part in it; from `meet`."""

    given: rendezvous.RendezvousParameters
    backend: c10d_rendezvous_backend.C10dRendezvousBackend
    rank: int  # NODE_RANK
    lost: float  # seconds without a heartbeat
    address: str  # of node 0
    port: int
    address_of_node: str  # what torch knows this node by
    name: str  # of this node, for messages

    def __init__(self, *args):
        super().__init__(*args)
        self.folder, self.records = Path(os.environ[rank_status.RUN_FOLDER]), rank_status.folder() or Path()
        self.attempt = 0  # number of the attempt whose ranks run here or ran last; 0: none did
        self.nodes: set = set()  # of the last round, as torch describes them
        self._awaited: set = set()  # those among them without which this node does not go on
        self._is_short = False  # whether one has left before this node has seen it
        self.endings: list[Outcome] = []
        self._restarts, self._asked = 0, False
        self._leaves = self._is_over = self._lingers = False
        self._last_look, self._kills, self._healthy = 0.0, postmortem.host_kills(), health.look()
        self._left_since: float | None = None  # seconds of time.monotonic()

    # --- torchrun's agent asks ---

    def get_backend(self) -> str:
        return NAME

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        """Judge the attempt that has ended, and wait for the next round. Raises: Ended, UserError."""
        self._lingers = self.rank == 0  # if this raises, the others are to see that the rendezvous is closed
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
            self._awaited = set(sorted(self.nodes)[:count]) if info.rank < count else self.nodes
            self._is_short = len(self.nodes) < info.world_size
            if info.rank < count:
                break
            print(f"{self.name}: not needed now; waiting", flush=True)
            while not super().num_nodes_waiting() and not self._left():
                time.sleep(LOOK_SECONDS)
        self.attempt, self._asked, self._lingers, self._left_since = attempt, False, False, None
        others = [node.addr.split()[2] for node in sorted(self.nodes)[1:]]
        towards = self.address if self.rank or not others else others[0]
        os.environ |= node_options.interface_variables(self.given.get("interface", ""), towards, self.port)
        place = f"{self._ranks(count)} process{'es' * (self._ranks(count) > 1)} on {count} node{'s' * (count > 1)}"
        print(f"{self.name}: {place}; run folder {self.folder}", flush=True)
        where_ranks_meet = rendezvous.RendezvousStoreInfo(self.address, self.port + 1)
        return rendezvous.RendezvousInfo(info.store, info.rank, count, where_ranks_meet)

    def num_nodes_waiting(self) -> int:
        """Return how many nodes are reason to end the ranks of this one and to meet again: lost ones.

        For those that wait to join, the ranks are asked to save and end first.
        """
        if time.monotonic() - self._last_look < LOOK_SECONDS:
            return 0
        self._last_look = time.monotonic()
        try:
            waiting = super().num_nodes_waiting()
            if left := self._left():
                return left if self._is_time_to_end() else 0
            if waiting and not self._asked and self._grows(waiting) and self._is_training():
                self._asked = True
                rank_status.ask_to_save(self.records)
        except rendezvous.RendezvousError:  # node 0 is lost
            return 1
        return 0

    def _is_time_to_end(self) -> bool:
        """Return whether ranks here, whose peers have left, have had their time to end by themselves.

        Those that save and end, as their peers have, are given all the time that they need.
        """
        records = [*rank_status.records(self.records), *rank_status.records(self._where())]
        self._left_since = self._left_since or time.monotonic()
        is_saving = any(record["kind"] == "stopped" for record in records)
        return not is_saving and time.monotonic() - self._left_since > GRACE_SECONDS

    def shutdown(self) -> bool:
        """Close the rendezvous for all nodes, or leave it if this node alone is to end."""
        if self._leaves:
            self._expire()
        if self._leaves or self._is_over:
            return True
        with contextlib.suppress(rendezvous.RendezvousError, RuntimeError):
            super().shutdown()
            if self._lingers:
                time.sleep(LEAVE_SECONDS)
        return True

    def interrupted(self, number: int) -> None:
        """End the job after a signal to torchrun; an elastic job goes on without this node, but after Ctrl-C."""
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

    # --- the store, and the nodes in it ---

    def _state(self):
        """Return torch's state of the rendezvous as all nodes see it; None before its first round."""
        return _state_of(self.backend)

    def _check_clocks(self) -> None:
        """Refuse a node whose clock is far ahead: torch tells by it which nodes are dead. Raises: UserError."""
        for node, beat in self._state().last_heartbeats.items():
            ahead = (beat - datetime.now(UTC)).total_seconds()
            if ahead > self.lost / 2 and node.addr != self.address_of_node:
                raise UserError(
                    f"the clock of {_name(node.addr)} is {ahead:.0f} s ahead of that of {self.name}: by their clocks "
                    "nodes know which of them are alive; set them by NTP."
                )

    def _left(self) -> int:
        """Return how many of the nodes that this one goes on with have left; 1 if the rendezvous is closed."""
        state = self._state()
        return 1 if state.closed else len(self._awaited - set(state.participants)) + self._is_short

    def _expire(self) -> None:
        """Let the other nodes see at once that this one has left: its last heartbeat is old."""
        with contextlib.suppress(rendezvous.RendezvousError):
            for _ in range(10):
                content, token = self.backend.get_state()
                state = pickle.loads(content)
                for node in state.last_heartbeats:
                    if node.addr == self.address_of_node and node.pid == os.getpid():
                        state.last_heartbeats[node] = datetime.min.replace(tzinfo=UTC)
                if (answer := self.backend.set_state(pickle.dumps(state), token)) and answer[2]:
                    return

    # --- a round ---

    def _join(self, where: Path | None) -> rendezvous.RendezvousInfo:
        """Wait for torch's next round. where: the records of the attempt before it, None: there is none."""
        here: set[str] = set()
        done = threading.Event()
        thread = threading.Thread(target=self._tell_who_is_missing, args=(here, done), daemon=True)
        thread.start()
        try:
            return super().next_rendezvous()
        except rendezvous.RendezvousTimeoutError:
            if where:
                gone = {node for node in self.nodes if node.addr not in here}
                raise self._ended(self._named(self._outcome(where), gone, where)) from None
            raise UserError(self._who_is_missing(here)) from None
        except (rendezvous.RendezvousError, RuntimeError) as error:
            self._is_over = True
            is_closed = isinstance(error, rendezvous.RendezvousClosedError | rendezvous.RendezvousGracefulExitError)
            if not self.nodes and len(here) < self.given.min_nodes:  # another one waits no longer
                raise UserError(self._who_is_missing(here)) from None
            raise self._ended(self._ended_elsewhere(where, is_closed)) from None
        finally:
            done.set()
            thread.join(2 * LOOK_SECONDS)

    def _tell_who_is_missing(self, here: set[str], done: threading.Event) -> None:
        """Print now and then for which nodes this one waits. here: becomes the addresses of those that have come."""
        began, first, wait = time.monotonic(), 3.0, self._number("join_timeout")
        with contextlib.suppress(rendezvous.RendezvousError, RuntimeError):
            while not done.wait(LOOK_SECONDS):
                seconds, state = time.monotonic() - began, self._state()
                if state is None or done.is_set() or seconds > wait - 2:  # then the others give up and leave
                    continue
                here.clear()
                here |= {node.addr for node in {*state.participants, *state.wait_list} if node in state.last_heartbeats}
                if seconds > first and len(here) < self.given.min_nodes:
                    first = seconds + WAITING_SECONDS
                    present = f"{len(here)} of {self.given.min_nodes} nodes are here"
                    missing = f"waiting {wait} s for {self._missing(here)}, to be started by the same command"
                    print(f"{self.name}: {present}; {missing}", flush=True)

    def _number(self, name: str) -> int:
        """Return one of the numbers among the options."""
        return int(self.given.get(name))

    def _missing(self, here: set[str]) -> str:
        missing = set(range(self.given.max_nodes)) - {int(address[:5]) for address in here}
        return f"node {', '.join(map(str, sorted(missing)))}"

    def _who_is_missing(self, here: set[str]) -> str:
        wait = self._number("join_timeout")
        return (
            f"{self._missing(here)} of {self.given.max_nodes} did not come within {wait} s (here: "
            f"{', '.join(map(_name, sorted(here)))}): start the same command there with its NODE_RANK, and see that it "
            f"reaches {self.address}:{self.port} and that the nodes' clocks agree."
        )

    def _agreed(self, info: rendezvous.RendezvousInfo) -> tuple[int, int]:
        """Return (number of the attempt, its nodes), which rank 0 writes into the round's store."""
        if info.rank == 0:
            if not self.attempt:
                (self.folder / run_folder.SMALLER).unlink(missing_ok=True)  # an earlier job's
            earlier = [int(file.name) for file in (self.folder / "attempts").glob("[0-9]*") if file.name.isdigit()]
            agreed = max([self.attempt, *earlier]) + 1, self._usable(self._gpus(self.nodes)), self.attempt > 0
            info.store.set(NAME, json.dumps(agreed))
        attempt, count, is_restart = json.loads(info.store.get(NAME))
        if is_restart:
            os.environ[distributed.RESTARTED] = "1"
        return attempt, count

    def _gpus(self, nodes: set) -> list[int]:
        """Return the processes of each node, by rank."""
        return [int(node.addr.split()[1]) for node in sorted(nodes)]

    def _usable(self, gpus: list[int]) -> int:
        """Return with how many of the nodes, from the first on, the effective batch can be divided.

        Args: gpus: processes of each. All, if the batch is not known yet, or none divides it: then the ranks say it.
        """
        of_run = run_folder.read_json(self.folder / "run.json").get("arguments", {}).get("effective_batch_size", {})
        whole = of_run.get("value") or self._number("effective_batch_size")
        for count in range(len(gpus), 0, -1) if whole else ():
            groups, rest = divmod(sum(gpus[:count]), self._number("ranks_per_row"))
            if groups and not rest and whole % groups == 0:
                return count
        return len(gpus)

    def _grows(self, waiting: int) -> bool:
        """Return whether the job would have more nodes with those that wait."""
        gpus = self._gpus(self.nodes)
        return self._usable([*gpus, *[gpus[0]] * waiting]) > self._usable(gpus)

    def _is_training(self) -> bool:
        return len(rank_status.heartbeats(self.records)) == self._number("gpus")

    def _is_elastic(self) -> bool:
        return self.given.min_nodes < self.given.max_nodes

    def _ranks(self, count: int) -> int:
        """Return the number of ranks on the first `count` nodes of the round."""
        return sum(self._gpus(self.nodes)[:count])

    # --- the end of an attempt ---

    def _end_attempt(self) -> Path:
        """Return the records of the attempt that has ended. Raises: Ended, if this node's ranks ended it for good."""
        asked = (self.records / rank_status.ASKED).exists()
        where = self._archive()
        last = self._outcome(where)
        if last.kind in _RESTARTED and self._restarts == self._number("max_restarts"):
            time.sleep(GRACE_SECONDS)  # another node may have to tell of an error that a change mends
            last = self._outcome(where)
            try:
                last = self._named(last, self._awaited - set(self._state().participants), where)
            except rendezvous.RendezvousError:
                raise self._ended(self._ended_elsewhere(where, is_closed=False)) from None
        elif last.kind in _RESTARTED:
            return where
        if last.what_next or (last.kind == "stopped" and not asked):  # another node is asked to end, or one joins
            return where
        self._leaves = last.kind == "stopped" and self._is_elastic() and self.rank != 0
        raise self._ended(last)

    def _named(self, last: Outcome, gone: set, where: Path) -> Outcome:
        """Return an outcome with the names of the nodes that have gone, if that is why ranks were lost."""
        if last.kind not in _RESTARTED or not gone:
            return last
        return postmortem.lost_node(", ".join(_name(node.addr) for node in sorted(gone)), where)

    def _where(self) -> Path:
        """Return the attempt's folder, attempts/<n> of the run folder.

        Before the run folder is opened, and where it is another node's, it is among this launch's records.
        """
        is_opened = (self.folder / "run.json").exists()
        return (self.folder if is_opened else self.records) / "attempts" / str(self.attempt)

    def _archive(self) -> Path:
        """Move what this node's ranks have written to the attempt's folder; return that."""
        where = self._where()
        where.mkdir(parents=True, exist_ok=True)
        for file in [file for file in self.records.iterdir() if file.is_file() and file.name != ENDINGS]:
            of_each_node = file.name in (postmortem.EXITS, rank_status.HUNG)
            name = f"{file.stem}{self.rank}{file.suffix}" if of_each_node else file.name
            shutil.move(file, where / f".{name}")  # a copy to another disk, which other nodes may read meanwhile
            (where / f".{name}").rename(where / name)
        return where

    def _outcome(self, where: Path) -> Outcome:
        """Return how an attempt ended, by what its nodes' ranks have written so far."""
        records = rank_status.records(where)
        if not records and not [*where.glob(postmortem.EXITS.replace(".", "*."))]:  # agents have ended the ranks
            return postmortem.lost_node("a node", where)
        stops = [signal.SIGTERM] if records and records[0]["kind"] == "stopped" else []
        before, self._kills = self._kills, postmortem.host_kills()
        return postmortem.ending(None, where, stops, None, 0.0, self._kills - before)

    def _ended_elsewhere(self, where: Path | None, is_closed: bool) -> Outcome:
        """Return why the job has ended, as this node sees it. is_closed: by another node; else node 0 is gone."""
        if where is None and run_folder.finished(self.folder):  # this node was not needed
            return Outcome("finished", 0)
        last = self._outcome(where) if where else None
        if last is None or last.kind in _RESTARTED:
            reason = "the job has ended on another node" if is_closed else (
                f"node 0 ({self.address}) has left, or does not answer within {self.lost:.0f} s; start again with "
                "--resume_from_checkpoint auto"
            )  # fmt: skip
            return Outcome("lost rank", 1, error=f"lost: {reason}", step=last and last.step)
        return last

    def _conclude(self, where: Path, gone: set, count: int, attempt: int, leads: bool) -> None:
        """Note how an attempt ended, now that all its nodes have told. Raises: Ended after --max_restarts."""
        last = self._named(self._outcome(where), gone, where)
        if last.kind == "stopped":
            names = ", ".join(_name(node.addr) for node in sorted(gone))
            change = f"{names} was asked to leave" if gone else "more nodes joined"
        elif last.kind in _RESTARTED:
            self._restarts += 1
            most, worse = self._number("max_restarts"), health.worse(self._healthy, health.look())
            if self._restarts > most:
                raise self._ended(last)
            change = f"the same settings (restart {self._restarts} of {most})"
            change += f"; on {self.name} {worse}" if worse else ""
        else:
            change = last.what_next
        ranks = self._ranks(count)
        last.what_next = f"{change}, on {count} node{'s' * (count > 1)} with {ranks} process{'es' * (ranks > 1)}"
        self.endings.append(last)
        self._tell_supervisor()
        if leads:
            if (self.folder / "run.json").exists():
                with contextlib.suppress(OSError):  # a full disk: the job goes on without
                    postmortem.write(self.folder, self.endings, "", goes_on=True)
            print(f"zerofit: {last.sentence}\nzerofit: attempt {attempt}: {last.what_next}", flush=True)

    def _ended(self, outcome: Outcome) -> Ended:
        self.endings.append(replace(outcome, what_next=""))
        self._tell_supervisor()
        return Ended(outcome)

    def refused(self, error: UserError) -> None:
        """Tell the supervisor of a mistake that is printed already."""
        self.endings.append(Outcome("user error", EXIT_CODES["user error"], error=f"UserError: {error}"))
        self._tell_supervisor()

    def _tell_supervisor(self) -> None:
        rank_status.write_json(self.records / ENDINGS, {"endings": [asdict(ending) for ending in self.endings]})


def _open(address: str, port: int, lost: float) -> TCPStore:
    """Open node 0's store, on its own address if MASTER_ADDR is that, else on all. lost: seconds for each call."""
    own_address = node_options.own_address(address, port)
    return TCPStore(
        own_address or "127.0.0.1", port, None, True, timedelta(seconds=lost), wait_for_workers=False,
        master_listen_fd=node_options.listen(own_address, port).detach() if own_address else None,
    )  # fmt: skip


def _connect(address: str, port: int, lost: float) -> TCPStore:
    """Connect to node 0's store. Raises: UserError if something else answers there."""
    try:
        store = TCPStore(address, port, None, False, timedelta(seconds=lost), wait_for_workers=False)
    except RuntimeError as error:
        raise UserError(
            f"MASTER_ADDR={address} PORT={port}: no zerofit launch answers there ({first_line(error)}); start the same "
            "command on that node with NODE_RANK=0."
        ) from None
    _give_up(port, timedelta(seconds=lost))
    return store


def _state_of(backend: c10d_rendezvous_backend.C10dRendezvousBackend):
    """Return torch's state of the rendezvous; None before its first round."""
    content = backend.get_state()
    return pickle.loads(content[0]) if content else None


def _check_rank_is_free(rank: int, backend, lost: float) -> None:
    """Refuse the rank of a node that sends heartbeats. Raises: UserError."""

    def beats() -> dict:
        last = state.last_heartbeats if (state := _state_of(backend)) else {}
        return {node: beat for node, beat in last.items() if int(node.addr[:5]) == rank}

    if not (before := beats()):
        return
    deadline = time.monotonic() + 2 * lost / 3 + 1  # torch may leave one heartbeat out
    while time.monotonic() < deadline:
        if taken := [node for node, beat in beats().items() if before.get(node, beat) != beat]:
            name = _name(taken[0].addr)
            raise UserError(f"NODE_RANK={rank} is taken by {name}, which is running; give each node its own number.")
        time.sleep(LOOK_SECONDS)


def _give_up(port: int, after: timedelta) -> None:
    """Let this process's connections to a port end when nothing is acknowledged for so long.

    A link that is cut is silence, and most calls of torch's store wait without a timeout. What a suspended process is
    sent, its machine still acknowledges.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux only
        return
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            with socket.socket(fileno=os.dup(connection.fd)) as own:
                milliseconds = round(after.total_seconds() * 1000)
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def endings(records: Path) -> list[Outcome]:
    """Return how the attempts of a launch ended, as its agent has told; [] if it has told nothing."""
    return [Outcome(**ending) for ending in run_folder.read_json(records / ENDINGS).get("endings", [])]


def _name(address: str) -> str:
    """Return a node's name for messages."""
    rank, _, _, host = address.split(" ", 3)
    return f"node {int(rank)} ({host})"
