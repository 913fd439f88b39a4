"""Write a rank's status for its supervisor: a heartbeat, a failure record, and the stack on request."""

import contextlib
import ctypes
import errno
import faulthandler
import json
import mmap
import os
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from zerofit.base import distributed, paths
from zerofit.base.errors import EXIT_CODES, DiskFull, Diverged, Hung, OutOfMemory, Stopped, Unavailable, UserError

FOLDER = "ZEROFIT_ATTEMPT"  # environment variable: the attempt's folder; unset: no supervisor, nothing is written

ASKED = "asked"  # in the attempt's folder: its supervisor has had a signal, and has asked the ranks to save and end

HUNG = "hung.json"  # in the attempt's folder: the supervisor has ended its ranks, which made no step

RUN_FOLDER = "ZEROFIT_RUN_FOLDER"  # environment variable: the run folder, for the agents of a job on several nodes

SUPERVISOR = "ZEROFIT_SUPERVISOR"  # environment variable: the supervisor's process id

# Sent by SLURM, by users, by torchrun's agent and by a terminal that closes: the ranks save and end.
ASKS_TO_SAVE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

SENT_TO_ALL = (signal.SIGTERM, signal.SIGUSR1)  # by SLURM, to every process of a job

WRITES_STACK = signal.SIGQUIT  # to a rank under a supervisor

ONE_SIGNAL_SECONDS = 1.0  # signals that ask for a save count as one

ENDS_RANKS = signal.SIGUSR2  # sent by torchrun to the remaining ranks when one has failed


STACK_SECONDS = 2.0  # for ranks to write their stacks

BEAT_SECONDS = 5.0  # between heartbeats while a checkpoint is written

LOOK_SECONDS = 1.0  # between checks that the supervisor is alive

_PR_SET_PDEATHSIG = 1  # of prctl(2)

# Process id, optimizer step, seconds of time.monotonic(), phase (base/phases.py): setting the clock or suspending the
# machine is no hang. On Linux all processes of a machine share it, so the supervisor can compare; a heartbeat is read
# on its own node only.
_HEARTBEAT_FILE = struct.Struct("<qqd16s")

# Messages of gloo and NCCL in a rank that fails because another rank was lost.
_OF_A_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError",
              "Connection refused", "NCCL communicator was aborted", "Socket Timeout",
              "Timed out waiting")  # fmt: skip


# Out-of-memory messages of CUDA and its libraries, beside torch.OutOfMemoryError: near the limit the allocation that
# fails may be a library's workspace, a kernel's local memory, a context or NCCL's buffers.
_GPU_IS_FULL = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED",
                "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES", "CUDNN_STATUS_ALLOC_FAILED", "Cuda failure 2 'out of memory'",
                "Triton Error [CUDA]: out of memory")  # fmt: skip

_MAY_BE_FULL = ("CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_INTERNAL_ERROR", "CUDNN_STATUS_NOT_INITIALIZED")

# Functions that pin host memory: DeepSpeed's accelerator and torch's data loader; autograd's save_on_cpu.
_PINS = ("pin_memory", "pack_to_cpu")


def folder() -> Path | None:
    return Path(os.environ[FOLDER]) if os.environ.get(FOLDER) else None


def end_with_rank_only(worker: int) -> None:
    """Let a data worker end at a SIGTERM of its rank, which torch sends, but not at SLURM's to every process.

    torch's own handler would end it at both, and with it the rank, which still has a step to finish.
    """

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=wait, daemon=True).start()


def end_with_supervisor() -> None:
    """End this process (torchrun or a rank) when its supervisor dies, so that no orphan continues to train.

    The kernel kills it with its parent (PR_SET_PDEATHSIG), even a hung rank. A thread polls as well, since DeepSpeed's
    launcher puts one more process in between, and the parent may have died before the call.
    """
    if not os.environ.get(SUPERVISOR):
        return
    with contextlib.suppress(AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_after, args=(int(os.environ[SUPERVISOR]),), name="zerofit-end", daemon=True).start()


def _end_after(supervisor: int) -> None:
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(supervisor)
        while is_there(process):
            time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def is_of(process, where: Path) -> bool:
    """Return whether a psutil process is a rank of the attempt with this folder, or its launcher or data worker.

    Raises: psutil.Error for a process that has ended, or another user's.
    """
    return process.environ().get(FOLDER) == str(where)


def is_there(process) -> bool:
    """Return whether a psutil process still runs; a zombie does not."""
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def record(error: BaseException) -> None:
    """Write rank<r>.json with kind, error and traceback; only the first error of a rank is kept."""
    attempt = folder()
    if attempt is None:
        return
    rank = int(os.environ.get("RANK", "0"))
    entry = {
        "rank": rank, "time": time.time(), "kind": kind(error), "error": in_a_line(error),
        "traceback": "".join(traceback.format_exception(error)), "of_a_peer": of_a_peer(error),
        "phase": getattr(error, "phase", ""), "collectives": getattr(error, "collectives", {}),
        "what_next": getattr(error, "what_next", ""),
    }  # fmt: skip
    if not (attempt / f"rank{rank}.json").exists():
        write_json(attempt / f"rank{rank}.json", entry)


def write_json(file: Path, value: dict) -> None:
    """Write a JSON file whole, or none where the folder is gone or its disk full: that must not hide a rank's error."""
    with contextlib.suppress(OSError):
        paths.write_text(file, json.dumps(value))


def in_a_line(error: BaseException) -> str:
    """Return type and message; of a data worker's error, which arrives as a traceback, the last line."""
    text = str(error)
    if text.startswith("Caught ") and "Original Traceback" in text:
        return f"{text.strip().splitlines()[-1]} (in a data worker)"
    return f"{type(error).__name__}: {text}"


def kind(error: BaseException) -> str:
    """Return a key of errors.EXIT_CODES, or "crash"."""
    if isinstance(error, OutOfMemory) or gpu_is_full(error) or host_is_full(error):
        return "out of memory"
    if isinstance(error, DiskFull):
        return "disk full"
    if isinstance(error, Diverged):
        return "diverged"
    if isinstance(error, Stopped):
        return "stopped"
    if isinstance(error, Hung):
        return "hang"
    if isinstance(error, Unavailable):
        return "unavailable"
    if isinstance(error, UserError):
        return "user error"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "crash"


def gpu_is_full(error: BaseException) -> bool:
    """Return whether torch, CUDA or one of its libraries raised the error because GPU memory ran out."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch here
        return True
    if not isinstance(error, RuntimeError) or _while_pinning(error):
        return False
    text = str(error)
    return any(message in text for message in _GPU_IS_FULL) or (
        any(message in text for message in _MAY_BE_FULL) and _little_is_free()
    )


def host_is_full(error: BaseException) -> bool:
    """Return whether Python or torch raised the error because host memory, pinned included, ran out."""
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
        return True
    return "CUDA error: out of memory" in str(error) and _while_pinning(error)


def disk_is_full(error: BaseException) -> bool:
    """Return whether Python, safetensors (Rust) or torch's archive writer failed because a disk is full."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    if isinstance(error, RuntimeError) and "inline_container.cc" in str(error):  # torch's writer of archives
        return any(message in str(error) for message in ("unexpected pos", "failed writing", "file write failed"))
    return any(message in str(error) for message in ("os error 28", "No space left on device"))


def _while_pinning(error: BaseException) -> bool:
    """Return whether pinning host memory raised the error; CUDA has one message for both memories."""
    return any(frame.name in _PINS for frame in traceback.extract_tb(error.__traceback__))


def _little_is_free() -> bool:
    """Return whether less than 5 % of this process's GPU is free."""
    import torch

    try:
        free, total = torch.cuda.mem_get_info()
    except (RuntimeError, AssertionError):  # the error has broken the context
        return False
    return free < 0.05 * total


def of_a_peer(error: BaseException) -> bool:
    """Return whether the error is only the consequence of another rank's death."""
    return any(message in str(error) for message in _OF_A_PEER)


def records(where: Path) -> list[dict]:
    """Return the failure records of an attempt, by time, those caused by another rank's death last."""
    entries = [json.loads(file.read_text(encoding="utf-8")) for file in where.glob("rank*.json")]
    return sorted(entries, key=lambda entry: (entry["of_a_peer"], entry["time"]))


class Heartbeat:
    """Publish a rank's progress in 40 bytes of shared memory.

    They are written at every optimizer step and evaluation batch (1 us), and every BEAT_SECONDS while a checkpoint is
    written."""

    def __init__(self):
        self.map, self.phase = None, b""
        attempt = folder()
        if attempt is None:
            return
        rank = int(os.environ.get("RANK", "0"))
        with (attempt / f"heartbeat{rank}").open("w+b") as file:
            file.truncate(_HEARTBEAT_FILE.size)
            self.map = mmap.mmap(file.fileno(), _HEARTBEAT_FILE.size)
        self.stack = (attempt / f"stack{rank}.txt").open("w")
        faulthandler.register(WRITES_STACK, file=self.stack, all_threads=True)
        for number in SENT_TO_ALL:  # until it trains, the supervisor decides (StopRequest)
            signal.signal(number, signal.SIG_IGN)

    def beat(self, step: int) -> None:
        if self.map is not None:
            _HEARTBEAT_FILE.pack_into(self.map, 0, os.getpid(), step, time.monotonic(), self.phase)

    def tell(self, phase: str) -> None:
        """Write the phase that the rank is in; it is no progress by itself."""
        self.phase = phase.encode()
        if self.map is not None:
            struct.pack_into("16s", self.map, _HEARTBEAT_FILE.size - 16, self.phase)

    @contextlib.contextmanager
    def beating(self, step: int):
        """Beat from a thread while the body runs, so that a long save does not count as a hang.

        A rank missing from one of the save's collectives still ends the job, after --ddp_timeout.
        """
        if self.map is None:
            yield
            return
        done = threading.Event()

        def repeat():
            self.beat(step)
            while not done.wait(BEAT_SECONDS):
                self.beat(step)

        thread = threading.Thread(target=repeat, name="zerofit-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


class StopRequest:
    """Whether a signal has asked this rank to save and end, whoever has started it."""

    received = None  # time.monotonic() of the first signal

    @classmethod
    def ask(cls) -> None:
        """Ask as a signal does; for a program that trains in a thread, where Python hears none."""
        cls.received = time.monotonic()

    def listen(self) -> None:
        """Note signals that ask for a save, from now on.

        A supervisor ends ranks with SIGHUP, and hears a second signal itself. Without one, the second ends the rank;
        under torchrun it does not: SLURM signals each process, and the agent passes its own on, perhaps much later.
        """
        if threading.current_thread() is not threading.main_thread():  # a program of one's own: signals are its affair
            return
        for number in SENT_TO_ALL if folder() else ASKS_TO_SAVE:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._note)

    def _note(self, number, _frame) -> None:
        if self.received is None:
            self.received = time.monotonic()
        elif not folder() and distributed.BY_AGENT not in os.environ and not is_repeated(number, self.received):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def handle_signals(handler) -> dict:
    """Handle SIGINT and what asks for a save, but not a SIGHUP that nohup ignores; return {signal: earlier handler}."""
    numbers = {signal.SIGINT, *ASKS_TO_SAVE}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    return {number: signal.signal(number, handler) for number in numbers}


def receiver(signals: list[int], act: Callable[[int], None]):
    """Return a handler that adds each signal to a list and calls `act` with it, but for repetitions of the first."""
    first = None

    def handle(number, _frame):
        nonlocal first
        if is_repeated(number, first):
            return
        first = first or time.monotonic()
        signals.append(number)
        act(number)

    return handle


def is_repeated(number: int, first: float | None) -> bool:
    """Return whether a signal is the one that came at time.monotonic() `first` (None: none did) once more.

    `timeout make sft` signals make and all its children, and make passes its own on; so does systemd.
    """
    return first is not None and number in ASKS_TO_SAVE and time.monotonic() - first < ONE_SIGNAL_SECONDS


def ask_to_save(where: Path) -> None:
    """Ask the ranks of this node that have made a step to save and end; they agree with all others on the step."""
    for pid, _, _ in heartbeats(where).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def kill_ranks(where: Path) -> None:
    """End the ranks of this node at once; their agent goes on."""
    for pid, _, _ in heartbeats(where).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def heartbeats(where: Path) -> dict[int, tuple[int, int, float]]:
    """{rank: (process id, step, seconds of time.monotonic())} of the ranks that have sent a heartbeat."""
    return {rank: beat[:3] for rank, beat in _beats(where).items()}


def phases(where: Path) -> dict[int, str]:
    """{rank: the phase that it is in, or "" for one without a name} of the ranks that have sent a heartbeat."""
    return {rank: phase.rstrip(b"\0").decode() for rank, (_, _, _, phase) in _beats(where).items()}


def _beats(where: Path) -> dict[int, tuple]:
    beats = {}
    for file in where.glob("heartbeat*"):
        try:
            content = file.read_bytes()
        except FileNotFoundError:  # the agent has moved it: the attempt has ended
            continue
        if len(content) == _HEARTBEAT_FILE.size and any(content[:24]):
            beats[int(file.name.removeprefix("heartbeat"))] = _HEARTBEAT_FILE.unpack(content)
    return beats


def write_stacks(where: Path) -> None:
    """Make every rank of this node write its stack, and wait STACK_SECONDS for it."""
    for pid, _, _ in heartbeats(where).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, WRITES_STACK)
    time.sleep(STACK_SECONDS)


def exit_code(kind: str) -> int:
    return EXIT_CODES.get(kind, 1)
