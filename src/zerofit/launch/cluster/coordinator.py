"""Coordinate one supervisor per node through a TCPStore: node 0 decides, every wait has a timeout.

Every supervisor keeps a small document, and node 0 a board, in a store of torch's on node 0 (TCPStore); a thread of
each exchanges them twice a second, so that the supervisor itself never hangs on the network. A node that is not heard
of for LOST_SECONDS is lost. Whoever reaches the store can write to it, so every document is signed (documents.py).
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
from zerofit.errors import EXIT_CODES, UserError
from zerofit.launch.cluster import node_options
from zerofit.launch.cluster.documents import FILES, decisions, read, signed
from zerofit.train import consistency

BEAT_SECONDS = 0.5

LOST_SECONDS = 15.0

LAST_CALL_SECONDS = 10.0  # an elastic job that has enough nodes waits so long for one more

GRACE_SECONDS = 5.0  # that ranks get to end by themselves when those of another node have failed

STOP_SECONDS = 3.0  # in which every node has certainly heard of the step after which all save and end

KEPT_BYTES = 100_000  # of each stack that a hanging attempt's ranks wrote on another node


class Coordinator:
    """This supervisor's view of the job. `board` and `documents` are replaced whole by the thread, never changed."""

    def __init__(self, mine: node_options.Place, gpus: int, facts: dict, secret: bytes):
        """Come to the store of node 0 (on node 0: open it) and begin to exchange.

        Args: gpus: processes on this node; facts: what must be the same on all nodes (peers.software); secret: the job's
            (job_secret.of_job), which signs the documents.
        Raises: UserError when node 0 is not there in time, or has this node already.
        """
        self.place, self.name = mine, f"node {mine.rank} ({socket.gethostname()})"
        self.mine = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "gpus": gpus, "facts": facts, "beat": 0}
        self.secret, self.said_of = secret, set()  # keys of the store whose content was said to be ignored
        self.board: dict = {}
        self.documents: dict[int, dict] = {}  # of all nodes, by rank; on node 0 only
        self.earlier: set[str] = set()  # ids of supervisors whose node was started anew
        self.news: dict[int, float] = {}  # when a node's document last changed, seconds of time.monotonic()
        self.board_news = time.monotonic()
        self.number, self.members, self.lost = 0, [], []
        self.stop_written = self.killed = self.asked_to_end = False
        self.failing_since: float | None = None
        self.heard_since: float | None = None  # that a signal waits for ranks that have not made a step
        self.change = ""  # why an elastic job goes on with other nodes
        self.seen: deque = deque(maxlen=20)  # (time, step) of the polls
        self.batch: int | None = None  # the job's effective batch, once it is known
        self.ids: dict[int, str] = {}  # which process each node of the attempt is: one that was started anew is another
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
                f"({str(error).splitlines()[0]}); start the same command on that machine with NODE_RANK=0."
            ) from None
        if not self.leads:
            self._check_not_taken(store)
        return store

    def _serve(self):
        """Return the store, opened on MASTER_ADDR's interface where that is this machine's, else on all."""
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
                f"NODE_RANK={self.place.rank} is taken by {before['host']}, which is running; give each machine its own "
                "number."
            )

    def _read(self, store, key: str) -> dict | None:
        """Return the document under a key; None where there is none, or one that is to be ignored, which is said once."""
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
        """The thread: this node's document out, the board (on node 0: the other documents) in."""
        while True:
            last = self.closing.is_set()
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
                pass  # node 0 is gone or cannot be reached: board_news tells
            if last:
                return
            self.closing.wait(BEAT_SECONDS)

    def _write(self, key: str, document: dict) -> None:
        self.store.set(key, signed(self.secret, key, document))

    def _read_board(self) -> None:
        """Take node 0's board, unless it is of before this node came: an old one may have been put back."""
        board = self._read(self.store, "board")
        if (
            board
            and board["nodes"].get(str(self.place.rank)) == self.mine["id"]
            and board["beat"] > self.board.get("beat", 0)
        ):
            self.board, self.board_news = board, time.monotonic()

    def _read_documents(self) -> None:
        found = {0: json.loads(json.dumps(self.mine))}
        for rank in range(1, self.place.most):
            document, before = self._read(self.store, f"node/{rank}"), self.documents.get(rank)
            if document and self._is_old(document, before):
                document = None
            if document or before:
                found[rank] = document or before
            if document and before and document["id"] != before.get("id"):
                self.earlier.add(before.get("id"))
        for rank, document in found.items():
            before = self.documents.get(rank, {})
            if (document["id"], document["beat"]) != (before.get("id"), before.get("beat")):
                self.news[rank] = time.monotonic()
        self.documents = found

    def _is_old(self, document: dict, before: dict | None) -> bool:
        """Return whether this is a document of another job, or of an earlier time: somebody may have put it back."""
        same = before is not None and document["id"] == before.get("id")
        return (
            document["leader"] != self.mine["id"]
            or document["id"] in self.earlier
            or (same and document["beat"] < before["beat"])
        )

    def say(self, **facts) -> None:
        """Put facts into this node's document."""
        self.mine = self.mine | facts

    def announce(self, **facts) -> None:
        """Put facts on the board. Node 0 only."""
        self.board = self.board | facts

    @contextlib.contextmanager
    def telling(self):
        """What ends this node before the job does is told to the others."""

        def ended(number, _frame):
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, ended)  # until ranks run: supervise.watch then listens
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
        """Leave. reason: what the others are told where this node ends before the job does."""
        if reason and self.leads:
            self.announce(
                end={"code": 2, "sentence": reason if reason.startswith("node ") else f"{self.name}: {reason}"}
            )
        elif reason:
            self.say(refused=reason)
        else:
            self.say(left=True)
        if self.leads:  # they read the end first
            deadline = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < deadline and any(
                not self.documents[r].get("left") and not self.documents[r].get("refused") for r in self.present() if r
            ):
                time.sleep(BEAT_SECONDS / 2)
        self.closing.set()
        self.thread.join(2 * BEAT_SECONDS + 2)

    # --- who is here ---

    def present(self) -> list[int]:
        """The nodes that are heard of. Node 0 only."""
        now = time.monotonic()
        return [r for r in sorted(self.documents) if now - self.news[r] < LOST_SECONDS and not self.documents[r].get("left")]  # fmt: skip

    def host(self, rank: int) -> str:
        return f"node {rank} ({self.documents[rank]['host']})" if rank in self.documents else f"node {rank}"

    def gather(self) -> None:
        """Wait at the start for all nodes (an elastic job: for enough of them, and a last call for more); on another node
        than 0, until that has all.

        Raises: UserError, naming who did not come, or whose software is another.
        """
        deadline, said = time.monotonic() + self.place.timeout, 0.0
        while not (self._is_gathered() if self.leads else "members" in self.board):
            self._heed_ends()
            if self.leads and time.monotonic() > deadline:
                raise UserError(self._who_is_missing())
            if time.monotonic() - said > 10:
                said = time.monotonic()
                print(f"{self.name}: waiting for the other nodes", flush=True)
            time.sleep(BEAT_SECONDS / 2)
        if self.leads:
            self._compare("facts")

    def here(self) -> list[tuple[int, int]]:
        """(node, its processes) of those that are here, node 0 first. Node 0 only."""
        return [(r, self.documents[r]["gpus"]) for r in self.present()]

    def begin_with(self, members: list[tuple[int, int]], flags: list[str]) -> None:
        """Say who the job's nodes are, and what of the recipe's flags was decided. Node 0 only."""
        self.announce(members={str(r): gpus for r, gpus in members}, flags=decisions(flags))

    @property
    def processes(self) -> int:
        """Of the attempt; before it, of the nodes that the job began with. A node that comes later prepares as those did."""
        if self.number:
            return sum(self.board["order"]["members"].values())
        if "members" in self.board:
            return sum(self.board["members"].values())
        return sum(gpus for _, gpus in self.here())

    def _is_gathered(self) -> bool:
        here = self.present()
        if len(here) == self.place.most:
            return True
        self.arrived = {r: self.arrived.get(r, time.monotonic()) for r in here}
        last_call = max(self.arrived.values(), default=0.0) + LAST_CALL_SECONDS
        return len(here) >= self.place.least < self.place.most and time.monotonic() > last_call

    def _who_is_missing(self) -> str:
        here, mine = self.present(), self.place
        gone = [str(r) for r in range(mine.most) if r not in here]
        return (
            f"node {', '.join(gone)} of {mine.most} did not come within {mine.timeout:.0f} s (here: "
            f"{', '.join(self.host(r) for r in here)}): start the same command there with its NODE_RANK, and see that it "
            f"reaches {mine.address}:{mine.port}."
        )

    def _heed_ends(self) -> None:
        """Raises: UserError when another node has ended the job."""
        if self.leads:
            for rank, document in self.documents.items():
                if document.get("refused"):
                    raise UserError(f"{self.host(rank)}: {document['refused']}")
        elif self.board.get("end"):
            raise UserError(self.board["end"].get("sentence") or "node 0 has ended the job.")
        elif time.monotonic() - self.board_news > LOST_SECONDS:
            raise UserError(f"node 0 ({self.place.address}) is not heard of for {LOST_SECONDS:.0f} s.")

    def _compare(self, key: str) -> None:
        here = [r for r in self.present() if key in self.documents[r]]
        if sentence := consistency.difference([(self.host(r), self.documents[r].get(key) or {}) for r in here]):
            raise UserError(sentence)

    def agree(self, facts: dict, folder: Path | None) -> Path:
        """When this node is ready: wait until all are, with the same job. Returns: the run folder, which node 0 has chosen.

        Args: facts: what must be the same (peers.of_job). Raises: UserError, naming who differs.
        """
        self.say(ready=facts)
        said = time.monotonic()
        while True:
            self._heed_ends()
            waits_for = self._not_ready() if self.leads else []
            if self.leads and not waits_for and "folder" not in self.board:
                self._compare("ready")
                self.announce(folder=str(folder.absolute()))
            if "folder" in self.board:
                return Path(self.board["folder"])
            if time.monotonic() - said > 10:
                said = time.monotonic()
                who = ", ".join(self.host(r) for r in waits_for) or "the other nodes"
                print(f"{self.name}: waiting for {who} to prepare model and data", flush=True)
            time.sleep(BEAT_SECONDS / 2)

    def _not_ready(self) -> list[int]:
        """The job's nodes that are still preparing. Raises: UserError for one that is gone."""
        members, here = [int(r) for r in self.board["members"]], self.present()
        for rank in members:
            if rank not in here:
                raise UserError(f"{self.host(rank)} has gone, or was not heard of for {LOST_SECONDS:.0f} s.")
        return [r for r in members if "ready" not in self.documents[r]]

    # --- attempts ---

    def order(self, number: int, members: dict[int, int], flags: list[str]) -> None:
        """Begin an attempt on these nodes. Node 0 only."""
        addresses = {str(r): self.documents[r]["address"] for r in members}
        self.lost, self.change, self.failing_since, self.heard_since = [], "", None, None
        self.ids = {r: self.documents[r]["id"] for r in members}
        self.announce(order={"number": number, "members": {str(r): g for r, g in members.items()},
                             "flags": decisions(flags), "addresses": addresses})  # fmt: skip
        self.begin()

    def begin(self) -> None:
        """Take up the board's order."""
        order = self.board["order"]
        self.number, self.members = order["number"], sorted(map(int, order["members"]))
        self.stop_written = self.killed = False
        self.seen.clear()
        self.say(ended=None, pulse=None, heard=None, missed=False)

    def next_order(self) -> dict:
        """Wait for what node 0 wants next: {"order": ...} of this node, or {"end": {"code", "sentence"}}."""
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
        """The command that starts this node's ranks for the order."""
        return torchrun(self.place, {int(r): g for r, g in self.board["order"]["members"].items()}, script)

    def environment(self) -> dict[str, str]:
        """The interface between the nodes, for gloo and NCCL, where the user has not named one."""
        name = self.interface()
        chosen = {"GLOO_SOCKET_IFNAME": name} | ({"NCCL_SOCKET_IFNAME": f"={name}"} if name != "lo" else {})
        return {key: value for key, value in chosen.items() if name and (self.place.interface or key not in os.environ)}

    def interface(self) -> str:
        """The network interface that leads from this node to the others; "": it was not found out."""
        if self.place.interface:
            return self.place.interface
        others = [a for r, a in self.board["order"]["addresses"].items() if int(r) != self.place.rank and a]
        return node_options.interface_towards(
            others[0] if self.leads and others else self.place.address, self.place.port
        )

    def look(self, records: Path, heard: list[int], end) -> None:
        """Once a poll while ranks run: tell how they are, do what the board says.

        Args: heard: signals that this supervisor was sent; end: called with the signal to end the ranks by.
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
        gone = time.monotonic() - self.board_news > LOST_SECONDS or "end" in self.board
        if not self.leads and gone and not self.killed:
            self.killed = True
            end(signal.SIGKILL)

    def decide(self) -> None:
        """Node 0's part of an attempt: who is lost, who has failed, who was asked to stop, who has come."""
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
            return self._kill(signal.SIGTERM)  # the step was over before a node heard of it
        self.seen.append((now, max(pulse["step"] for pulse in self._pulses(documents))))
        self._heed_signals(documents, ended)
        return None

    @staticmethod
    def _pulses(documents: dict[int, dict]) -> list[dict]:
        """How the ranks of each node are: {"ranks": that have made a step, "step": the furthest}."""
        return [d.get("pulse") or {"ranks": 0, "step": 0} for d in documents.values()]

    def _is_lost(self, rank: int) -> bool:
        document = self.documents.get(rank)
        return (
            document is None
            or time.monotonic() - self.news[rank] > LOST_SECONDS
            or bool(document.get("left") or document.get("refused"))
            or document["id"] != self.ids.get(rank, document["id"])
        )

    def _heed_signals(self, documents: dict, ended: dict) -> None:
        heard = {r: d["heard"] for r, d in documents.items() if d.get("heard")}
        newcomers = self._newcomers()
        if (not heard and not newcomers) or self._is_stopping():
            return
        first = next(iter(heard.values()), signal.SIGTERM)
        pulses, step = self._pulses(documents), self.seen[-1][1]
        running = sum(p["ranks"] for p in pulses) >= sum(self.board["order"]["members"].values())
        if first not in rank_status.ASKS_TO_SAVE:
            self._kill(first)
        elif heard and not running:
            self.heard_since = self.heard_since or self.seen[-1][0]
            if self.seen[-1][0] - self.heard_since > GRACE_SECONDS:  # what other nodes tell is a second old
                self._kill(first)
        elif running and not ended and len(self.seen) > 1:
            polls = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(self.seen)]
            pace = max((steps / seconds for seconds, steps in polls if seconds > 0.1), default=0.0)  # at its fastest
            margin = 2 + math.ceil(pace * STOP_SECONDS)
            self.announce(stop={"number": self.number, "step": step + margin})
            self._remember_change(heard, newcomers)

    def _remember_change(self, heard: dict, newcomers: list[int]) -> None:
        """An elastic job goes on without a node that was asked to end, and with one that has come."""
        rest = len(self.members) - len(heard)
        if newcomers and not heard:
            self.change = f"{', '.join(self.host(r) for r in newcomers)} joined"
        elif heard and 0 not in heard and rest >= self.place.least < self.place.most:
            self.change = f"{', '.join(self.host(r) for r in heard)} was asked to leave"

    def _newcomers(self) -> list[int]:
        """Nodes that have come to an elastic job and would be of use. Node 0 only."""
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
        """Tell node 0 how this node's ranks have ended, with what they left."""
        files = {}
        for file in records.iterdir():
            kept = KEPT_BYTES if file.suffix == ".txt" else None
            if FILES.fullmatch(file.name) and (content := file.read_bytes()[:kept]):
                files[file.name] = content.decode("latin-1")
        self.say(heard=heard[0] if heard else None, ended={
            "number": self.number, "code": code, "hung": hung, "files": files, "killed": self.killed})  # fmt: skip

    def collect(self, records: Path) -> tuple[int, list[int], int | None]:
        """Wait for the other nodes' reports, and put what their ranks left beside this node's. Node 0 only.

        Returns: (exit code, signals heard, rank that held up a job that hung) of the whole job.
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
        for one in present[1:]:
            _put(one["files"], records)
        by_itself = [one for one in present if one["code"] and not one["killed"]] or [o for o in present if o["code"]]
        by_itself.sort(key=lambda one: not any('"of_a_peer": false' in text for text in one["files"].values()))
        code = by_itself[0]["code"] if by_itself else (1 if self.lost else 0)
        heard = [d["heard"] for d in self.documents.values() if d.get("heard")]
        hung = next((one["hung"] for one in present if one["hung"] is not None), None)
        return code, heard, hung

    def usable(self, members: list[int]) -> list[int]:
        """The most of these nodes among which the effective batch can be dealt out evenly; node 0 is one of them."""
        gpus = {r: self.documents[r]["gpus"] for r in members}
        for count in range(len(members), 0, -1):
            kept = members[:count]
            if self.batch is None or self.batch % sum(gpus[r] for r in kept) == 0:
                return kept
        return members[:1]

    def muster(self) -> dict[int, int] | None:
        """The nodes of the next attempt, {node: processes}; waits for lost ones to come back where they are too few. None:
        they did not come. Node 0 only."""
        leaving = {r for r, d in self.documents.items() if d.get("heard") and r}
        deadline, said = time.monotonic() + self.place.timeout, False
        while True:
            here = [r for r in self.present() if r not in leaving and (r == 0 or self._fits_in(r))]
            if len(here) >= self.place.least:
                return {r: self.documents[r]["gpus"] for r in self.usable(here)}
            if time.monotonic() > deadline:
                return None
            if not said:
                said = True
                print(f"zerofit: {len(here)} of {self.place.least} nodes are here; waiting {self.place.timeout:.0f} s for "
                      f"{self._gone(here)} to be started again, by the same command", file=sys.stderr, flush=True)  # fmt: skip
            time.sleep(BEAT_SECONDS / 2)

    def _gone(self, here: list[int]) -> str:
        return ", ".join(self.host(r) for r in map(int, self.board["members"]) if r not in here)


def torchrun(here: node_options.Place, members: dict[int, int], script: list[str]) -> list[str]:
    """The command that starts one node's ranks. members: {node: its processes}."""
    return [
        sys.executable, "-m", "zerofit.launch.torchrun", "--nnodes", str(len(members)),
        "--node_rank", str(sorted(members).index(here.rank)), "--nproc_per_node", str(members[here.rank]),
        "--master_addr", here.address, "--master_port", str(here.port + 1), "--rdzv_conf", f"timeout={int(here.timeout)}",
        *script,
    ]  # fmt: skip


def _put(files: dict[str, str], records: Path) -> None:
    """Write what another node's ranks left; a name that is not one of theirs is passed over."""
    for name, content in files.items():
        if not FILES.fullmatch(name):
            continue
        target = records / name
        if name == "exits.json" and target.exists():
            merged = json.loads(target.read_text()) | json.loads(content)
            target.write_text(json.dumps(merged))
        else:
            target.write_bytes(content.encode("latin-1", errors="replace"))
