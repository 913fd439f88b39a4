"""Write a rank's status for its supervisor: heartbeats, a failure record, and stacks on request."""

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

FOLDER = "ZEROFIT_ATTEMPT"  # environment variable: the attempt's folder; if unset, nothing is written

SAVE_REQUESTED_FILE = "asked"  # in the attempt's folder: after a signal, its supervisor asked the ranks to save and end

HUNG_FILE = "hung.json"  # in the attempt's folder: its supervisor ended the ranks, which made no progress

RUN_FOLDER = "ZEROFIT_RUN_FOLDER"  # environment variable: the run folder, for the agents of a job on several nodes

SUPERVISOR = "ZEROFIT_SUPERVISOR"  # environment variable: the supervisor's process id

# Sent by SLURM, users, torchrun's agent and a closing terminal: the ranks save and end.
SAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

BROADCAST_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # sent by SLURM to every process of a job

STACK_SIGNAL = signal.SIGQUIT  # sent to a rank under a supervisor

ONE_SIGNAL_SECONDS = 1.0  # signals within this time count as one

TORCHRUN_END_SIGNAL = signal.SIGUSR2  # sent by torchrun to the remaining ranks after one failed

STACK_SECONDS = 2.0  # time for ranks to write their stacks

BEAT_SECONDS = 5.0  # between heartbeats while a checkpoint is saved

LOOK_SECONDS = 1.0  # between checks that the supervisor is alive

_PR_SET_PDEATHSIG = 1  # option of prctl(2)

# Process id, optimizer step, seconds of time.monotonic(), phase (base/phases.py). With this clock, a changed time or a
# suspended machine is not a hang. All processes of a Linux machine share it; heartbeats are only read on their node.
_HEARTBEAT_FILE = struct.Struct("<qqd16s")

# Messages of gloo and NCCL in a rank that fails because a peer was lost.
_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError",
              "Connection refused", "NCCL communicator was aborted", "Socket Timeout",
              "Timed out waiting")  # fmt: skip

# Out-of-memory messages of CUDA and its libraries, in addition to torch.OutOfMemoryError: the allocation may be for a
# library's workspace, a kernel's local memory, a context or NCCL's buffers.
_GPU_IS_FULL = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED",
                "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES", "CUDNN_STATUS_ALLOC_FAILED", "Cuda failure 2 'out of memory'",
                "Triton Error [CUDA]: out of memory")  # fmt: skip

_MAY_BE_FULL = ("CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_INTERNAL_ERROR", "CUDNN_STATUS_NOT_INITIALIZED")

# Functions that pin host memory: DeepSpeed's accelerator and torch's data loader; autograd's save_on_cpu.
_PINS = ("pin_memory", "pack_to_cpu")


def folder() -> Path | None:
    return Path(os.environ[FOLDER]) if os.environ.get(FOLDER) else None


def end_with_rank_only(worker: int) -> None:
    """End a data worker on SIGTERM from its rank, which torch sends, but not on SLURM's SIGTERM to every process.

    torch's handler would end it in both cases, and with it the rank, which still has to finish a step.
    """

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=wait, daemon=True).start()


def end_with_supervisor() -> None:
    """End this process (torchrun or a rank) if its supervisor dies, so that no orphan continues to train.

    The kernel kills it with its parent (PR_SET_PDEATHSIG), even a hung rank. A thread also polls the supervisor, since
    DeepSpeed's launcher adds a process in between, and the parent may have died before the call.
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
        while is_alive(process):
            time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def belongs_to_attempt(process, where: Path) -> bool:
    """Return whether a psutil process is a rank of the attempt with this folder, its launcher or its data worker.

    Raises: psutil.Error for a process that has ended or belongs to another user.
    """
    return process.environ().get(FOLDER) == str(where)


def is_alive(process) -> bool:
    """Return whether a psutil process is running and not a zombie."""
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def record(error: BaseException) -> None:
    """Write rank<r>.json with kind, error and traceback, for the first error of a rank."""
    attempt = folder()
    if attempt is None:
        return
    rank = int(os.environ.get("RANK", "0"))
    entry = {
        "rank": rank, "time": time.time(), "kind": kind(error), "error": error_line(error),
        "traceback": "".join(traceback.format_exception(error)), "of_a_peer": caused_by_peer(error),
        "phase": getattr(error, "phase", ""), "collectives": getattr(error, "collectives", {}),
        "what_next": getattr(error, "what_next", ""),
    }  # fmt: skip
    if not (attempt / f"rank{rank}.json").exists():
        write_json(attempt / f"rank{rank}.json", entry)


def write_json(file: Path, value: dict) -> None:
    """Write a JSON file atomically; ignore a missing folder or full disk, which must not hide a rank's error."""
    with contextlib.suppress(OSError):
        paths.write_text(file, json.dumps(value))


def error_line(error: BaseException) -> str:
    """Return type and message; for a data worker's error, the last line of its traceback."""
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
    """Return whether Python or torch raised the error because host memory, including pinned memory, ran out."""
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
        return True
    return "CUDA error: out of memory" in str(error) and _while_pinning(error)


def disk_is_full(error: BaseException) -> bool:
    """Return whether Python, safetensors (Rust) or torch's archive writer failed because a disk is full."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    if isinstance(error, RuntimeError) and "inline_container.cc" in str(error):  # torch's archive writer
        return any(message in str(error) for message in ("unexpected pos", "failed writing", "file write failed"))
    return any(message in str(error) for message in ("os error 28", "No space left on device"))


def _while_pinning(error: BaseException) -> bool:
    """Return whether pinning host memory raised the error; CUDA uses the same message for both kinds of memory."""
    return any(frame.name in _PINS for frame in traceback.extract_tb(error.__traceback__))


def _little_is_free() -> bool:
    """Return whether less than 5 % of this process's GPU is free."""
    import torch

    try:
        free, total = torch.cuda.mem_get_info()
    except (RuntimeError, AssertionError):  # the error broke the context
        return False
    return free < 0.05 * total


def caused_by_peer(error: BaseException) -> bool:
    """Return whether the error is a consequence of another rank's death."""
    return any(message in str(error) for message in _PEER_LOST)


def records(where: Path) -> list[dict]:
    """Return the failure records of an attempt by time; records caused by another rank's death come last."""
    entries = [json.loads(file.read_text(encoding="utf-8")) for file in where.glob("rank*.json")]
    return sorted(entries, key=lambda entry: (entry["of_a_peer"], entry["time"]))


class Heartbeat:
    """Publish a rank's progress in 40 bytes of shared memory.

    It is written (in 1 us) at every optimizer step and evaluation batch, and every BEAT_SECONDS during a save."""

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
        faulthandler.register(STACK_SIGNAL, file=self.stack, all_threads=True)
        for number in BROADCAST_SIGNALS:  # until it trains, the supervisor decides (StopRequest)
            signal.signal(number, signal.SIG_IGN)

    def beat(self, step: int) -> None:
        if self.map is not None:
            _HEARTBEAT_FILE.pack_into(self.map, 0, os.getpid(), step, time.monotonic(), self.phase)

    def set_phase(self, phase: str) -> None:
        """Publish the phase of the rank, which does not count as progress."""
        self.phase = phase.encode()
        if self.map is not None:
            struct.pack_into("16s", self.map, _HEARTBEAT_FILE.size - 16, self.phase)

    @contextlib.contextmanager
    def beating(self, step: int):
        """Beat from a thread while the body runs, so that a long save does not count as a hang.

        If a rank is missing in a collective of the save, --ddp_timeout still ends the job.
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
    """A request to save and end, from a signal to this rank."""

    received = None  # time.monotonic() of the first signal

    @classmethod
    def ask(cls) -> None:
        """Make a request without a signal, for a program that trains in a thread, where Python receives none."""
        cls.received = time.monotonic()

    def listen(self) -> None:
        """Record signals that request a save.

        A supervisor ends ranks with SIGHUP and handles a second signal itself. Without a supervisor, the second signal
        ends the rank, but not under torchrun: SLURM signals each process, and the agent may forward its signal later.
        """
        if threading.current_thread() is not threading.main_thread():  # a custom program handles signals itself
            return
        for number in BROADCAST_SIGNALS if folder() else SAVE_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._note)

    def _note(self, number, _frame) -> None:
        if self.received is None:
            self.received = time.monotonic()
        elif not folder() and distributed.BY_AGENT not in os.environ and not is_repeated(number, self.received):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def handle_signals(handler) -> dict:
    """Handle SIGINT and SAVE_SIGNALS, except a SIGHUP ignored by nohup; return {signal: previous handler}."""
    numbers = {signal.SIGINT, *SAVE_SIGNALS}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    return {number: signal.signal(number, handler) for number in numbers}


def receiver(signals: list[int], act: Callable[[int], None]):
    """Return a handler that appends each signal to a list and calls `act`, except for repetitions of the first."""
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
    """Return whether a signal repeats the first one. first: its time.monotonic(); None before any signal.

    `timeout make sft` signals make and all its children, and make forwards its signal; systemd does the same.
    """
    return first is not None and number in SAVE_SIGNALS and time.monotonic() - first < ONE_SIGNAL_SECONDS


def request_save(where: Path) -> None:
    """Request a save from the ranks of this node that have made a step; all ranks agree on the step."""
    for pid, _, _ in heartbeats(where).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def kill_ranks(where: Path) -> None:
    """Kill the ranks of this node immediately; their agent continues."""
    for pid, _, _ in heartbeats(where).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def heartbeats(where: Path) -> dict[int, tuple[int, int, float]]:
    """Return {rank: (process id, step, seconds of time.monotonic())} for ranks that sent a heartbeat."""
    return {rank: beat[:3] for rank, beat in _beats(where).items()}


def phases(where: Path) -> dict[int, str]:
    """Return {rank: its phase, or "" for an unnamed one} for ranks that sent a heartbeat."""
    return {rank: phase.rstrip(b"\0").decode() for rank, (_, _, _, phase) in _beats(where).items()}


def _beats(where: Path) -> dict[int, tuple]:
    beats = {}
    for file in where.glob("heartbeat*"):
        try:
            content = file.read_bytes()
        except FileNotFoundError:  # the attempt has ended, and the agent moved the file
            continue
        if len(content) == _HEARTBEAT_FILE.size and any(content[:24]):
            beats[int(file.name.removeprefix("heartbeat"))] = _HEARTBEAT_FILE.unpack(content)
    return beats


def write_stacks(where: Path) -> None:
    """Request the stacks of all ranks of this node, and wait STACK_SECONDS for them."""
    for pid, _, _ in heartbeats(where).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
    time.sleep(STACK_SECONDS)


def exit_code(kind: str) -> int:
    return EXIT_CODES.get(kind, 1)
