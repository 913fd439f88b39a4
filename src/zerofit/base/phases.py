"""Track the phases of a rank, and end a job if every rank is in a phase for far longer than before."""

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

OTHER_PHASE = ""  # saves, logs, callbacks, whose duration is unknown

SLOWEST_FACTOR = 10  # a phase may take this many times the slowest so far

# The limit of a phase is at least this: a kernel may be compiled, a file server or the Hub may be unavailable.
MIN_LIMIT_SECONDS = {STEP: 300.0, DATA: 900.0, EVALUATION: 300.0}

MIN_SEEN_PHASES = 10  # phases of a kind before its limit applies

LOOK_SECONDS = 1.0  # between checks of the clock

MAX_KEPT_COLLECTIVES = 30  # latest collectives of a process group in the record of a hung rank

# If a check is this late, the process was suspended (SIGSTOP: SLURM's gang scheduling, `docker pause`). Since the clock
# continues to run, all ranks of the machine would otherwise seem to hang.
SUSPENDED_SECONDS = 5.0


class Phases:
    """The current phase of a rank with its start, and the slowest phase of each kind."""

    def __init__(self, heartbeat: rank_status.Heartbeat):
        self.heartbeat = heartbeat
        self.current = (OTHER_PHASE, time.monotonic())
        self.slowest, self.count = defaultdict(float), defaultdict(int)

    def enter(self, phase: str) -> None:
        """Begin a phase, which ends the previous one."""
        previous, since = self.current
        now = time.monotonic()
        if self.count[previous]:  # the first opens connections, compiles kernels, skips the rows of a resumed run
            self.slowest[previous] = max(self.slowest[previous], now - since)
        self.count[previous] += 1
        self.current = (phase, now)
        self.heartbeat.set_phase(phase)

    def limit(self, phase: str) -> float:
        """Return the seconds that a phase may take; infinity if unknown."""
        if phase not in MIN_LIMIT_SECONDS or self.count[phase] < MIN_SEEN_PHASES:
            return float("inf")
        return max(MIN_LIMIT_SECONDS[phase], SLOWEST_FACTOR * self.slowest[phase])


class HangDetector:
    """A thread of each rank that ends the job if all ranks, on all nodes, exceed the limit of their phase.

    A single late rank is not a hang: the others wait in a step while it saves or runs a user's callback.
    """

    def __init__(self, phases: Phases):
        self.phases, self.done = phases, threading.Event()
        self.key = f"zerofit/late/{distributed.broadcast(uuid.uuid4().hex)}"  # restarts may share the store
        self.late, self.store = False, None
        self.last_check = self.awake = time.monotonic()
        threading.Thread(target=self._follow, name="zerofit-watch", daemon=True).start()

    def _follow(self) -> None:
        with contextlib.suppress(RuntimeError, KeyError):  # the store ended with the job, or does not exist
            while not self.done.wait(LOOK_SECONDS):
                if self.check(time.monotonic()):
                    _end(*self.phases.current, self.phases)

    def check(self, now: float) -> bool:
        """Return whether all ranks are late. now: seconds of time.monotonic()."""
        if now - self.last_check > SUSPENDED_SECONDS:
            self.awake = now
        self.last_check = now
        phase, since = self.phases.current
        late = now - max(since, self.awake) > self.phases.limit(phase)
        return (late or self.late) and self._count(late) == distributed.size()

    def _count(self, late: bool) -> int:
        """Publish whether this rank is late, after writing its stack; return the number of late ranks."""
        from torch.distributed import TCPStore

        if late and not self.late:
            write_stack(self.phases.heartbeat)
        if self.store is None:  # the process group's connection may block in a collective
            self.store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        change, self.late = late - self.late, late
        return self.store.add(self.key, change)


def write_stack(heartbeat: rank_status.Heartbeat) -> None:
    """Write the stacks of this rank for the supervisor's report; to stderr without a supervisor."""
    if heartbeat.map is None:
        faulthandler.dump_traceback(all_threads=True)
        return
    heartbeat.stack.seek(0)
    heartbeat.stack.truncate()
    signal.pthread_kill(threading.main_thread().ident, rank_status.STACK_SIGNAL)


def _end(phase: str, since: float, phases: Phases) -> None:
    """End this process, whose main thread may never return, after every rank has written its record."""
    error = Hung(
        f"training is stuck on all ranks: this {phase} has run for {time.monotonic() - since:.0f} s, over the limit of "
        f"{phases.limit(phase):.0f} s; the slowest before took {phases.slowest[phase]:.1f} s (see --hang_timeout)"
    )
    with contextlib.suppress(Exception):  # torch's records are optional
        error.collectives = collectives()
    rank_status.record(error)
    print(f"zerofit: error: {error}.", flush=True)
    time.sleep(2 * LOOK_SECONDS)
    os._exit(error.exit_code)


def collectives() -> dict[str, list[tuple[int, str]]]:
    """Return {process group: [(number, description) of the latest collectives that this rank has begun]}.

    torch's flight recorder keeps the last 2000 (TORCH_FR_BUFFER_SIZE). Transfers between two ranks are excluded.
    """
    import torch.distributed as dist
    from torch._C import _distributed_c10d

    dump = "_dump_nccl_trace_json" if dist.get_backend() == "nccl" else "_dump_fr_trace_json"
    begun = defaultdict(list)
    for entry in json.loads(getattr(_distributed_c10d, dump)()).get("entries", []):
        if not entry["is_p2p"]:
            name, sizes = entry["profiling_name"].rpartition(":")[2], entry["input_sizes"]
            begun[entry["process_group"][0]].append((entry["collective_seq_id"], f"{name} of {sizes[:3]}"))
    return {group: numbers[-MAX_KEPT_COLLECTIVES:] for group, numbers in begun.items()}
