"""Follow the phases of a rank, and end a job in which every rank stays in one far longer than it ever did before."""

import contextlib
import faulthandler
import json
import os
import signal
import threading
import time
import uuid
from collections import defaultdict

from zerofit.base import distributed, rank_status
from zerofit.base.errors import Hung

STEP, DATA, EVALUATION = "step", "data batch", "evaluation batch"

ELSE = ""  # saves, logs, callbacks: of no known length

TIMES = 10  # the slowest seen: how long a phase may take

# That each may take, however short it has been: a kernel may be compiled, a file server or the Hub may be away.
LEAST_SECONDS = {STEP: 300.0, DATA: 900.0, EVALUATION: 300.0}

SEEN = 10  # of a kind, before its limit is learned

LOOK_SECONDS = 1.0  # between looks at the clock

KEPT = 30  # of a group's latest collectives, in the record of a rank that hung

# A look that comes this late: the process was suspended (SIGSTOP: SLURM's gang scheduling, `docker pause`). The clock
# of a machine runs on meanwhile, so that all its ranks would seem to hang.
SUSPENDED_SECONDS = 5.0


class Phases:
    """The phase that a rank is in since when, and the slowest of each kind that it has seen."""

    def __init__(self, heartbeat: rank_status.Heartbeat):
        self.heartbeat = heartbeat
        self.current = (ELSE, time.monotonic())
        self.slowest, self.count = defaultdict(float), defaultdict(int)

    def enter(self, phase: str) -> None:
        """Begin a phase, which ends the one before."""
        before, since = self.current
        now = time.monotonic()
        if self.count[before]:  # the first opens connections, compiles kernels, skips the rows of a resumed run
            self.slowest[before] = max(self.slowest[before], now - since)
        self.count[before] += 1
        self.current = (phase, now)
        self.heartbeat.tell(phase)

    def limit(self, phase: str) -> float:
        """Return the seconds that a phase may take; infinite where that is not known."""
        if phase not in LEAST_SECONDS or self.count[phase] < SEEN:
            return float("inf")
        return max(LEAST_SECONDS[phase], TIMES * self.slowest[phase])


class Watch:
    """A thread of each rank that ends the job when all ranks, on all nodes, are over the limit of their phase.

    One rank alone may be late: others wait for it, in a step, while it saves or runs a callback of the user's.
    """

    def __init__(self, phases: Phases):
        self.phases, self.done = phases, threading.Event()
        self.key = f"zerofit/late/{distributed.broadcast(uuid.uuid4().hex)}"  # restarts may share the store
        self.late, self.store = False, None
        self.last_look = self.awake = time.monotonic()
        threading.Thread(target=self._follow, name="zerofit-watch", daemon=True).start()

    def _follow(self) -> None:
        with contextlib.suppress(RuntimeError, KeyError):  # the store is gone, and the job with it; or there is none
            while not self.done.wait(LOOK_SECONDS):
                if self.look(time.monotonic()):
                    _end(*self.phases.current, self.phases)

    def look(self, now: float) -> bool:
        """Return whether all ranks are late. now: seconds of time.monotonic()."""
        if now - self.last_look > SUSPENDED_SECONDS:
            self.awake = now
        self.last_look = now
        phase, since = self.phases.current
        late = now - max(since, self.awake) > self.phases.limit(phase)
        return (late or self.late) and self._count(late) == distributed.size()

    def _count(self, late: bool) -> int:
        """Tell the other ranks whether this one is late, with its stack written by then; return how many are."""
        from torch.distributed import TCPStore

        if late and not self.late:
            write_stack(self.phases.heartbeat)
        if self.store is None:  # the process group's own connection may wait in a collective
            self.store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        change, self.late = late - self.late, late
        return self.store.add(self.key, change)


def write_stack(heartbeat: rank_status.Heartbeat) -> None:
    """Write the stacks of this rank: for the supervisor's report, or without one on its stderr."""
    if heartbeat.map is None:
        faulthandler.dump_traceback(all_threads=True)
        return
    heartbeat.stack.seek(0)
    heartbeat.stack.truncate()
    signal.pthread_kill(threading.main_thread().ident, rank_status.WRITES_STACK)


def _end(phase: str, since: float, phases: Phases) -> None:
    """End this process, whose main thread may never return, once every rank has written its record."""
    error = Hung(
        f"no rank goes on: this one is in one {phase} for {time.monotonic() - since:.0f} s, over the limit of "
        f"{phases.limit(phase):.0f} s, where the slowest before took {phases.slowest[phase]:.1f} s (see --hang_timeout)"
    )
    with contextlib.suppress(Exception):  # what torch has recorded is a help, no more
        error.collectives = collectives()
    rank_status.record(error)
    print(f"zerofit: error: {error}.", flush=True)
    time.sleep(2 * LOOK_SECONDS)
    os._exit(error.exit_code)


def collectives() -> dict[str, list[tuple[int, str]]]:
    """Return {process group: [(number, what it is) of the latest collectives that this rank has begun]}.

    torch's flight recorder keeps the last 2000 (TORCH_FR_BUFFER_SIZE); those between two ranks only are left out.
    """
    import torch.distributed as dist
    from torch._C import _distributed_c10d

    dump = "_dump_nccl_trace_json" if dist.get_backend() == "nccl" else "_dump_fr_trace_json"
    begun = defaultdict(list)
    for entry in json.loads(getattr(_distributed_c10d, dump)()).get("entries", []):
        if not entry["is_p2p"]:
            name, sizes = entry["profiling_name"].rpartition(":")[2], entry["input_sizes"]
            begun[entry["process_group"][0]].append((entry["collective_seq_id"], f"{name} of {sizes[:3]}"))
    return {group: numbers[-KEPT:] for group, numbers in begun.items()}
