"""Coordinate one supervisor per node through a TCPStore: node 0 decides, every wait has a timeout.

Each supervisor writes a small document under node/<rank>, and node 0 writes the board, in a TCPStore on node 0. A
thread exchanges them twice a second, so that the supervisor itself never blocks on the network. A node silent for
LOST_SECONDS is considered lost. Any process that reaches the store can write to it, so documents are signed
(documents.py, which also lists their fields).
"""

import contextlib
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections import deque
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

from zerofit import rank_status
from zerofit.errors import EXIT_CODES, UserError, first_line
from zerofit.launch.cluster import node_options
from zerofit.launch.cluster.documents import FILES, decisions, read, signed
from zerofit.train import consistency

BEAT_SECONDS = 0.5

LOST_SECONDS = 15.0

LAST_CALL_SECONDS = 10.0  # how long an elastic job with enough nodes waits for one more

GRACE_SECONDS = 5.0  # for ranks to end by themselves after those of another node have failed

STOP_SECONDS = 3.0  # until every node has certainly read the step after which all save and end

KEPT_BYTES = 100_000  # of each stack file that is sent to node 0


class Coordinator:
    """One supervisor's view of the job. `board` and `documents` are replaced, never mutated (threads)."""

    def __init__(self, mine: node_options.Place, gpus: int, facts: dict, secret: bytes):
        """Connect to node 0's store (node 0 opens it) and start the exchange thread.

        Args: mine: this node's place; gpus: processes on this node; facts: must be equal on all nodes
            (consistency.software); secret: of the job (job_secret.of_job), signs the documents.
        Raises: UserError if node 0 is not reached in time, or another running node has this rank.
        """
        self.place, self.name = mine, f"node {mine.rank} ({socket.gethostname()})"
        self.mine = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "gpus": gpus, "facts": facts, "beat": 0}
        self.secret, self.said_of = secret, set()  # keys of the store already reported as ignored
        self.board: dict = {}
        self.documents: dict[int, dict] = {}  # of all nodes, by node rank; on node 0 only
        self.earlier: set[str] = set()  # ids of supervisors that a restarted one has replaced
        self.news: dict[int, float] = {}  # time.monotonic() at which a node's document last changed
        self.board_news = time.monotonic()
        self.number, self.members, self.lost = 0, [], []
        self.stop_written = self.killed = self.asked_to_end = False
        self.failing_since: float | None = None
        self.heard_since: float | None = None  # since when a signal waits for ranks without a step
        self.change = ""  # why an elastic job continues with other nodes
        self.seen: deque = deque(maxlen=20)  # (time.monotonic(), step) of the last polls
        self.batch: int | None = None  # the job's effective batch, once it is known
        self.ids: dict[int, str] = {}  # supervisor id per node of the attempt; a restarted supervisor has a new one
        self.arrived: dict[int, float] = {}  # when a node was first seen
        self.mine["address"] = "" if self.leads else node_options.reach(mine)
        self.store = self._open()
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._exchange, daemon=True)
        self.thread.start()

    @property
    def leads(self) -> bool:
        return self.place.rank == 0

    # --- the exchange ---

    def _open(self):
        from torch.distributed import TCPStore

        address, port = self.place.address, self.place.port
        try:
            if self.leads:
                self.mine["leader"] = self.mine["id"]
                store = self._serve()
                store.set("zerofit", self.mine["id"])
            else:
                store = TCPStore(address, port, None, False, timedelta(seconds=10), wait_for_workers=False)
                store.wait(["zerofit"], timedelta(seconds=5))
                self.mine["leader"] = store.get("zerofit").decode(errors="replace")
        except RuntimeError as error:
            raise UserError(
                f"MASTER_ADDR={address} PORT={port}: no zerofit launch answers there "
                f"({first_line(error)}); start the same command on that machine with NODE_RANK=0."
            ) from None
        if not self.leads:
            self._check_not_taken(store)
        return store

    def _serve(self):
        """Open the store on the address of MASTER_ADDR if it is one of this node's, else on all interfaces."""
        from torch.distributed import TCPStore

        node_options.check_ports(self.place)
        address = node_options.own_address(self.place)
        descriptor = node_options.listen(address, self.place.port).detach() if address else None
        return TCPStore(address or "127.0.0.1", self.place.port, None, True, timedelta(seconds=10), wait_for_workers=False,
                        master_listen_fd=descriptor)  # fmt: skip

    def _check_not_taken(self, store) -> None:
        key = f"node/{self.place.rank}"
        before = self._read(store, key)
        if before is None:
            return
        time.sleep(4 * BEAT_SECONDS)
        now = self._read(store, key)
        if now and (now["id"], now["beat"]) != (before["id"], before["beat"]):
            raise UserError(
                f"NODE_RANK={self.place.rank} is taken by {before['host']}, which is running; give each machine its "
                "own number."
            )

    def _read(self, store, key: str) -> dict | None:
        """Return the document under a key; None if there is none or an invalid one, which is reported once."""
        if not store.check([key]):
            return None
        try:
            return read(self.secret, key, store.get(key))
        except ValueError as error:
            if key not in self.said_of:
                self.said_of.add(key)
                print(f"{self.name}: what port {self.place.port} holds as {key!r} is ignored: {error}", file=sys.stderr,
                      flush=True)  # fmt: skip
            return None

    def _exchange(self) -> None:
        """Loop of the thread: write this node's document and read the board; node 0 the reverse."""
        while True:
            is_last = self.closing.is_set()
            self.mine["beat"] += 1
            try:
                if self.leads:
                    self._read_documents()
                    self._write("board", self.board | {"beat": self.mine["beat"], "nodes": {
                        str(rank): document["id"] for rank, document in self.documents.items()}})  # fmt: skip
                else:
                    self._write(f"node/{self.place.rank}", self.mine)
                    self._read_board()
            except RuntimeError:
                pass  # node 0 is gone or unreachable: board_news grows old
            if is_last:
                return
            self.closing.wait(BEAT_SECONDS)

    def _write(self, key: str, document: dict) -> None:
        self.store.set(key, signed(self.secret, key, document))

    def _read_board(self) -> None:
        """Read the board; ignore one from before this node joined, or an older one (replayed)."""
        board = self._read(self.store, "board")
        if (
            board
            and board["nodes"].get(str(self.place.rank)) == self.mine["id"]
            and board["beat"] > self.board.get("beat", 0)
        ):
            self.board, self.board_news = board, time.monotonic()

    def _read_documents(self) -> None:
        documents = {0: json.loads(json.dumps(self.mine))}
        for rank in range(1, self.place.most):
            document, before = self._read(self.store, f"node/{rank}"), self.documents.get(rank)
            if document and self._is_old(document, before):
                document = None
            if document or before:
                documents[rank] = document or before
            if document and before and document["id"] != before.get("id"):
                self.earlier.add(before.get("id"))
        for rank, document in documents.items():
            before = self.documents.get(rank, {})
            if (document["id"], document["beat"]) != (before.get("id"), before.get("beat")):
                self.news[rank] = time.monotonic()
        self.documents = documents

    def _is_old(self, document: dict, before: dict | None) -> bool:
        """Return whether a document is of another job, a replaced supervisor or an earlier time (replayed)."""
        same_process = before is not None and document["id"] == before.get("id")
        return (
            document["leader"] != self.mine["id"]
            or document["id"] in self.earlier
            or (same_process and document["beat"] < before["beat"])
        )

    def say(self, **facts) -> None:
        """Put facts into this node's document."""
        self.mine = self.mine | facts

    def announce(self, **facts) -> None:
        """Put facts on the board. Node 0 only."""
        self.board = self.board | facts

    @contextlib.contextmanager
    def telling(self):
        """Report an exception of the body to the other nodes, then raise it again."""

        def ended(number, _frame):
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, ended)  # until ranks run: then supervisor.watch has its own handler
        try:
            yield
        except UserError as error:
            self.close(str(error))
            raise
        except SystemExit:
            self.close()
            raise
        except BaseException as error:
            self.close(type(error).__name__)
            raise

    def close(self, reason: str = "") -> None:
        """Leave the job. reason: sent to the other nodes if this node ends before the job does."""
        if reason and self.leads:
            self.announce(
                end={"code": 2, "sentence": reason if reason.startswith("node ") else f"{self.name}: {reason}"}
            )
        elif reason:
            self.say(refused=reason)
        else:
            self.say(left=True)
        if self.leads:  # the store ends with this process: let the others read the end first
            deadline = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < deadline and any(
                not self.documents[r].get("left") and not self.documents[r].get("refused") for r in self.present() if r
            ):
                time.sleep(BEAT_SECONDS / 2)
        self.closing.set()
        self.thread.join(2 * BEAT_SECONDS + 2)

    # --- who is here ---

    def present(self) -> list[int]:
        """Return the ranks of the nodes with a recent heartbeat. Node 0 only."""
        now = time.monotonic()
        return [r for r in sorted(self.documents) if now - self.news[r] < LOST_SECONDS and not self.documents[r].get("left")]  # fmt: skip

    def host(self, rank: int) -> str:
        return f"node {rank} ({self.documents[rank]['host']})" if rank in self.documents else f"node {rank}"

    def gather(self) -> None:
        """Wait at the start until all nodes are present, or until node 0 has them all.

        An elastic job waits for its minimum, then LAST_CALL_SECONDS for more.
        Raises: UserError, naming the nodes that are missing or whose software differs.
        """
        deadline, last_print = time.monotonic() + self.place.timeout, 0.0
        while not (self._is_gathered() if self.leads else "members" in self.board):
            self._heed_ends()
            if self.leads and time.monotonic() > deadline:
                raise UserError(self._who_is_missing())
            if time.monotonic() - last_print > 10:
                last_print = time.monotonic()
                print(f"{self.name}: waiting for the other nodes", flush=True)
            time.sleep(BEAT_SECONDS / 2)
        if self.leads:
            self._compare("facts")

    def here(self) -> list[tuple[int, int]]:
        """Return (node rank, its processes) of the nodes present, node 0 first. Node 0 only."""
        return [(r, self.documents[r]["gpus"]) for r in self.present()]

    def begin_with(self, members: list[tuple[int, int]], flags: list[str]) -> None:
        """Publish the job's nodes and the flags that node 0 decides. Node 0 only."""
        self.announce(members={str(r): gpus for r, gpus in members}, flags=decisions(flags))

    @property
    def processes(self) -> int:
        """Number of processes of the attempt; before it, of the nodes that the job began with.

        A node that joins later prepares with the same number.
        """
        if self.number:
            return sum(self.board["order"]["members"].values())
        if "members" in self.board:
            return sum(self.board["members"].values())
        return sum(gpus for _, gpus in self.here())

    def _is_gathered(self) -> bool:
        present_nodes = self.present()
        if len(present_nodes) == self.place.most:
            return True
        self.arrived = {r: self.arrived.get(r, time.monotonic()) for r in present_nodes}
        last_call = max(self.arrived.values(), default=0.0) + LAST_CALL_SECONDS
        return len(present_nodes) >= self.place.least < self.place.most and time.monotonic() > last_call

    def _who_is_missing(self) -> str:
        nodes, place = self.present(), self.place
        missing = [str(r) for r in range(place.most) if r not in nodes]
        return (
            f"node {', '.join(missing)} of {place.most} did not come within {place.timeout:.0f} s (here: "
            f"{', '.join(self.host(r) for r in nodes)}): start the same command there with its NODE_RANK, and see that "
            f"it reaches {place.address}:{place.port}."
        )

    def _heed_ends(self) -> None:
        """Raise if another node has ended the job or is lost. Raises: UserError."""
        if self.leads:
            for rank, document in self.documents.items():
                if document.get("refused"):
                    raise UserError(f"{self.host(rank)}: {document['refused']}")
        elif self.board.get("end"):
            raise UserError(self.board["end"].get("sentence") or "node 0 has ended the job.")
        elif time.monotonic() - self.board_news > LOST_SECONDS:
            raise UserError(f"node 0 ({self.place.address}) is not heard of for {LOST_SECONDS:.0f} s.")

    def _compare(self, key: str) -> None:
        nodes = [r for r in self.present() if key in self.documents[r]]
        if sentence := consistency.difference([(self.host(r), self.documents[r].get(key) or {}) for r in nodes]):
            raise UserError(sentence)

    def agree(self, facts: dict, folder: Path | None) -> Path:
        """Report this node ready, wait until all are, and return the run folder that node 0 has chosen.

        Args: facts: must be equal on all nodes (consistency.of_job); folder: the run folder, on node 0.
        Raises: UserError, naming the node that differs.
        """
        self.say(ready=facts)
        last_print = time.monotonic()
        while True:
            self._heed_ends()
            not_ready = self._not_ready() if self.leads else []
            if self.leads and not not_ready and "folder" not in self.board:
                self._compare("ready")
                self.announce(folder=str(folder.absolute()))
            if "folder" in self.board:
                return Path(self.board["folder"])
            if time.monotonic() - last_print > 10:
                last_print = time.monotonic()
                names = ", ".join(self.host(r) for r in not_ready) or "the other nodes"
                print(f"{self.name}: waiting for {names} to prepare model and data", flush=True)
            time.sleep(BEAT_SECONDS / 2)

    def _not_ready(self) -> list[int]:
        """Return the job's nodes that are still preparing. Raises: UserError for a lost one."""
        members, present_nodes = [int(r) for r in self.board["members"]], self.present()
        for rank in members:
            if rank not in present_nodes:
                raise UserError(f"{self.host(rank)} has gone, or was not heard of for {LOST_SECONDS:.0f} s.")
        return [r for r in members if "ready" not in self.documents[r]]

    # --- attempts ---

    def order(self, number: int, members: dict[int, int], flags: list[str]) -> None:
        """Order attempt `number` on these nodes, {node rank: its processes}. Node 0 only."""
        addresses = {str(r): self.documents[r]["address"] for r in members}
        self.lost, self.change, self.failing_since, self.heard_since = [], "", None, None
        self.ids = {r: self.documents[r]["id"] for r in members}
        self.announce(order={"number": number, "members": {str(r): g for r, g in members.items()},
                             "flags": decisions(flags), "addresses": addresses})  # fmt: skip
        self.begin()

    def begin(self) -> None:
        """Reset this node's state for the attempt that the board orders."""
        order = self.board["order"]
        self.number, self.members = order["number"], sorted(map(int, order["members"]))
        self.stop_written = self.killed = False
        self.seen.clear()
        self.say(ended=None, pulse=None, heard=None, missed=False)

    def next_order(self) -> dict:
        """Wait for node 0; return {"order": ...} with this node in it, or {"end": {"code", "sentence"}}."""
        while True:
            board = self.board
            if board.get("end"):
                return {"end": board["end"]}
            order = board.get("order", {"number": 0})
            if order["number"] > self.number:
                if str(self.place.rank) in order["members"]:
                    return {"order": order}
                self.number = order["number"]
                if self.asked_to_end:
                    return {"end": {"code": EXIT_CODES["stopped"], "sentence": ""}}
                print(f"{self.name}: not needed for attempt {self.number}; waiting", flush=True)
            if time.monotonic() - self.board_news > LOST_SECONDS:
                sentence = f"node 0 ({self.place.address}) is not heard of for {LOST_SECONDS:.0f} s"
                return {"end": {"code": 1, "sentence": f"{sentence}; start again with --resume_from_checkpoint auto"}}
            time.sleep(BEAT_SECONDS / 2)

    def torchrun(self, script: list[str]) -> list[str]:
        """Return the command that starts this node's ranks of the ordered attempt."""
        return torchrun(self.place, {int(r): g for r, g in self.board["order"]["members"].items()}, script)

    def environment(self) -> dict[str, str]:
        """Return the interface variables of gloo and NCCL; those of the user win, unless --interface is given."""
        name = self.interface()
        chosen = {"GLOO_SOCKET_IFNAME": name} | ({"NCCL_SOCKET_IFNAME": f"={name}"} if name != "lo" else {})
        return {key: value for key, value in chosen.items() if name and (self.place.interface or key not in os.environ)}

    def interface(self) -> str:
        """Return the network interface from this node to the others; "" if it cannot be determined."""
        if self.place.interface:
            return self.place.interface
        others = [a for r, a in self.board["order"]["addresses"].items() if int(r) != self.place.rank and a]
        return node_options.interface_towards(
            others[0] if self.leads and others else self.place.address, self.place.port
        )

    def look(self, records: Path, heard: list[int], end) -> None:
        """Report the ranks' progress and carry out the board's stop and kill; called at each poll.

        Args: heard: signals that this supervisor received; end: called with the signal that shall end the ranks.
        """
        pulses = rank_status.pulses(records)
        steps = [step for _, step, _ in pulses.values()]
        self.say(pulse={"ranks": len(steps), "step": max(steps, default=0)}, heard=heard[0] if heard else None)
        self.asked_to_end = bool(heard)
        if self.leads:
            self.decide()
        stop, kill = self.board.get("stop") or {}, self.board.get("kill") or {}
        if stop.get("number") == self.number and not self.stop_written:
            rank_status.write_stop(records, stop["step"])
            self.stop_written = True
            self.say(missed=max(steps, default=0) >= stop["step"])
        if kill.get("number") == self.number and not self.killed:
            self.killed = True
            if kill["stacks"]:
                rank_status.write_stacks(records)
            end(kill["signal"])
        is_orphaned = time.monotonic() - self.board_news > LOST_SECONDS or "end" in self.board
        if not self.leads and is_orphaned and not self.killed:
            self.killed = True
            end(signal.SIGKILL)

    def decide(self) -> None:
        """Handle lost nodes, failed ranks, missed stops, signals and newcomers, in this order. Node 0 only."""
        documents = {r: self.documents.get(r, {}) for r in self.members} | {0: self.mine}
        ended = {r: d["ended"] for r, d in documents.items() if (d.get("ended") or {}).get("number") == self.number}
        now = time.monotonic()
        if lost := [r for r in self.members if r and r not in ended and self._is_lost(r)]:
            self.lost = lost
            return self._kill(signal.SIGKILL)
        failed = [e for e in ended.values() if e["code"] not in (0, EXIT_CODES["stopped"])]
        if failed and len(ended) < len(self.members):
            self.failing_since = self.failing_since or now
            if now - self.failing_since > GRACE_SECONDS or failed[0]["hung"] is not None:
                return self._kill(signal.SIGKILL, stacks=failed[0]["hung"] is not None)
        if any(d.get("missed") for d in documents.values()):
            return self._kill(signal.SIGTERM)  # a node had passed the stop step before it read it
        self.seen.append((now, max(pulse["step"] for pulse in self._pulses(documents))))
        self._heed_signals(documents, ended)
        return None

    @staticmethod
    def _pulses(documents: dict[int, dict]) -> list[dict]:
        """Return each node's progress: {"ranks": number that have made a step, "step": the furthest}."""
        return [d.get("pulse") or {"ranks": 0, "step": 0} for d in documents.values()]

    def _is_lost(self, rank: int) -> bool:
        document = self.documents.get(rank)
        return (
            document is None
            or time.monotonic() - self.news[rank] > LOST_SECONDS
            or bool(document.get("left") or document.get("refused"))
            or document["id"] != self.ids.get(rank, document["id"])
        )

    # A training job gets a stop: a step in the future, far enough away that every node reads it in time. A job whose
    # ranks have not all made a step cannot save: it gets the signal itself, after GRACE_SECONDS (other nodes' progress
    # is a second old). Signals that do not ask for a save (SIGINT, SIGHUP) are passed on at once.
    def _heed_signals(self, documents: dict, ended: dict) -> None:
        signals_received = {r: d["heard"] for r, d in documents.items() if d.get("heard")}
        newcomers = self._newcomers()
        if (not signals_received and not newcomers) or self._is_stopping():
            return
        number = next(iter(signals_received.values()), signal.SIGTERM)
        pulses, step = self._pulses(documents), self.seen[-1][1]
        running = sum(pulse["ranks"] for pulse in pulses) >= sum(self.board["order"]["members"].values())
        if number not in rank_status.ASKS_TO_SAVE:
            self._kill(number)
        elif signals_received and not running:
            self.heard_since = self.heard_since or self.seen[-1][0]
            if self.seen[-1][0] - self.heard_since > GRACE_SECONDS:
                self._kill(number)
        elif running and not ended and len(self.seen) > 1:
            polls = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(self.seen)]
            pace = max((steps / seconds for seconds, steps in polls if seconds > 0.1), default=0.0)  # steps/s, fastest
            margin = 2 + math.ceil(pace * STOP_SECONDS)
            self.announce(stop={"number": self.number, "step": step + margin})
            self._remember_change(signals_received, newcomers)

    def _remember_change(self, heard: dict, newcomers: list[int]) -> None:
        """Note why the next attempt of an elastic job has other nodes: some joined, or were asked to leave."""
        remaining = len(self.members) - len(heard)
        if newcomers and not heard:
            self.change = f"{', '.join(self.host(r) for r in newcomers)} joined"
        elif heard and 0 not in heard and remaining >= self.place.least < self.place.most:
            self.change = f"{', '.join(self.host(r) for r in heard)} was asked to leave"

    def _newcomers(self) -> list[int]:
        """Return nodes that wait to join an elastic job and would enlarge it. Node 0 only."""
        if self.place.least == self.place.most:
            return []
        ready = [r for r in self.present() if r not in self.members and self._fits_in(r)]
        return ready if ready and len(self.usable(self.members + ready)) > len(self.members) else []

    def _fits_in(self, rank: int) -> bool:
        facts = self.documents[rank].get("ready")
        return facts is not None and not consistency.difference(
            [(self.host(0), self.mine["ready"]), (self.host(rank), facts)]
        )

    def _is_stopping(self) -> bool:
        return any((self.board.get(what) or {}).get("number") == self.number for what in ("stop", "kill"))

    def _kill(self, number: int, stacks: bool = False) -> None:
        if (self.board.get("kill") or {}).get("number") != self.number:
            self.announce(kill={"number": self.number, "signal": int(number), "stacks": stacks})

    # --- after an attempt ---

    def report(self, code: int, heard: list[int], hung: int | None, records: Path) -> None:
        """Send node 0 the exit code of this node's ranks and the files that they wrote."""
        files = {}
        for file in records.iterdir():
            kept = KEPT_BYTES if file.suffix == ".txt" else None
            if FILES.fullmatch(file.name) and (content := file.read_bytes()[:kept]):
                files[file.name] = content.decode("latin-1")
        self.say(heard=heard[0] if heard else None, ended={
            "number": self.number, "code": code, "hung": hung, "files": files, "killed": self.killed})  # fmt: skip

    def collect(self, records: Path) -> tuple[int, list[int], int | None]:
        """Wait for the other nodes' reports and write their ranks' files into `records`. Node 0 only.

        Returns: (exit code, signals received, rank furthest behind if the job hung, else None) of the whole job.
        """
        while True:
            self.decide()
            ended = {r: self.documents[r].get("ended") or {} for r in self.members if r in self.documents and r}
            ended[0] = self.mine["ended"]
            missing = [r for r in self.members if ended.get(r, {}).get("number") != self.number]
            if not set(missing) - set(self.lost):
                break
            time.sleep(BEAT_SECONDS / 2)
        present = [ended[r] for r in self.members if r not in missing]
        for report in present[1:]:
            _put(report["files"], records)
        # Prefer nodes whose ranks failed by themselves, and among them one with an error that is no broken connection.
        failures = [r for r in present if r["code"] and not r["killed"]] or [r for r in present if r["code"]]
        failures.sort(key=lambda report: not any('"of_a_peer": false' in text for text in report["files"].values()))
        code = failures[0]["code"] if failures else (1 if self.lost else 0)
        signals_received = [d["heard"] for d in self.documents.values() if d.get("heard")]
        hung = next((report["hung"] for report in present if report["hung"] is not None), None)
        return code, signals_received, hung

    def usable(self, members: list[int]) -> list[int]:
        """Return the longest prefix of `members` (node 0 first) whose processes divide the effective batch."""
        gpus = {r: self.documents[r]["gpus"] for r in members}
        for count in range(len(members), 0, -1):
            kept = members[:count]
            if self.batch is None or self.batch % sum(gpus[r] for r in kept) == 0:
                return kept
        return members[:1]

    def muster(self) -> dict[int, int] | None:
        """Return the nodes of the next attempt, {node rank: processes}; None if too few. Node 0 only.

        With fewer than the minimum, waits --join_timeout for lost nodes to be restarted.
        """
        leaving = {r for r, document in self.documents.items() if document.get("heard") and r}
        deadline, is_printed = time.monotonic() + self.place.timeout, False
        while True:
            nodes = [r for r in self.present() if r not in leaving and (r == 0 or self._fits_in(r))]
            if len(nodes) >= self.place.least:
                return {r: self.documents[r]["gpus"] for r in self.usable(nodes)}
            if time.monotonic() > deadline:
                return None
            if not is_printed:
                is_printed = True
                print(f"zerofit: {len(nodes)} of {self.place.least} nodes are here; waiting "
                      f"{self.place.timeout:.0f} s for {self._gone(nodes)} to be started again, by the same command",
                      file=sys.stderr, flush=True)  # fmt: skip
            time.sleep(BEAT_SECONDS / 2)

    def _gone(self, here: list[int]) -> str:
        return ", ".join(self.host(r) for r in map(int, self.board["members"]) if r not in here)


def torchrun(here: node_options.Place, members: dict[int, int], script: list[str]) -> list[str]:
    """Return the command that starts one node's ranks. members: {node rank: its processes}."""
    return [
        sys.executable, "-m", "zerofit.launch.torchrun", "--nnodes", str(len(members)),
        "--node_rank", str(sorted(members).index(here.rank)), "--nproc_per_node", str(members[here.rank]),
        "--master_addr", here.address, "--master_port", str(here.port + 1), "--rdzv_conf", f"timeout={int(here.timeout)}",
        *script,
    ]  # fmt: skip


def _put(files: dict[str, str], records: Path) -> None:
    """Write the files of another node's ranks; names that do not match FILES are skipped."""
    for name, content in files.items():
        if not FILES.fullmatch(name):
            continue
        target = records / name
        if name == "exits.json" and target.exists():
            merged = json.loads(target.read_text()) | json.loads(content)
            target.write_text(json.dumps(merged))
        else:
            target.write_bytes(content.encode("latin-1", errors="replace"))
