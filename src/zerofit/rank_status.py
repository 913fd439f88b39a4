"""What a rank writes for its supervisor: a heartbeat while it runs, a record when it fails, its stack on request."""

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
from pathlib import Path

from zerofit.errors import EXIT_CODES, DiskFull, Diverged, OutOfMemory, Stopped, UserError

FOLDER = "ZEROFIT_ATTEMPT"  # environment variable: the folder; without it nobody watches and nothing is written

SUPERVISOR = "ZEROFIT_SUPERVISOR"  # environment variable: its process id

STOP = "stop"  # file of the step after which every rank shall save and end; 0: go on

ASKS_TO_SAVE = (signal.SIGTERM, signal.SIGUSR1)  # from SLURM and from people; the supervisor heeds them

ENDS_RANKS = signal.SIGUSR2  # from torchrun to the ranks that are left when one has failed

STACK_SECONDS = 2.0  # that ranks get to write where they stand

BEAT_SECONDS = 5.0  # between two beats while a checkpoint is written

LOOK_SECONDS = 1.0  # between two looks whether the supervisor is there

_PR_SET_PDEATHSIG = 1  # of prctl(2)

_STEP = struct.Struct("<q")

# Process id, optimizer step, seconds of time.monotonic(): a clock that is set or was suspended is no hang. On Linux it is
# one clock for all processes of a machine, so the supervisor can compare; a pulse is read on its own machine only.
_PULSE = struct.Struct("<qqd")

# How a rank fails when it is another that was lost: gloo's and NCCL's words.
_OF_A_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError", "Connection refused",
              "NCCL communicator was aborted", "Socket Timeout", "Timed out waiting")  # fmt: skip


# How CUDA and its libraries say that GPU memory could not be had, beside torch.OutOfMemoryError: near the edge it is a
# library's workspace, a kernel's local memory, a context or NCCL's buffers that finds none.
_GPU_IS_FULL = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED",
                "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES", "CUDNN_STATUS_ALLOC_FAILED", "Cuda failure 2 'out of memory'",
                "Triton Error [CUDA]: out of memory")  # fmt: skip

_MAY_BE_FULL = ("CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_INTERNAL_ERROR", "CUDNN_STATUS_NOT_INITIALIZED")

# Functions that pin host memory: DeepSpeed's accelerator and torch's data loader; autograd's save_on_cpu.
_PINS = ("pin_memory", "pack_to_cpu")


def folder() -> Path | None:
    return Path(os.environ[FOLDER]) if os.environ.get(FOLDER) else None


def end_with_supervisor() -> None:
    """Have this process, torchrun or a rank, end with its supervisor, however that ends: an orphan would train on.

    The kernel ends it with its parent, which also reaches a rank that hangs. A thread looks as well, since DeepSpeed's
    launcher has a process more in between, and a parent may have ended before.
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


def is_there(process) -> bool:
    """Return whether a process (psutil's) still runs; one that only waits to be reaped does not."""
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def record(error: BaseException) -> None:
    """Write rank<r>.json: kind, error and traceback. The first error of a rank counts; a second is its echo."""
    where = folder()
    if where is None:
        return
    rank = int(os.environ.get("RANK", "0"))
    entry = {
        "rank": rank, "time": time.time(), "kind": kind(error), "error": in_a_line(error),
        "traceback": "".join(traceback.format_exception(error)), "of_a_peer": of_a_peer(error),
    }  # fmt: skip
    # The folder can be gone, the disk full: the error itself must come through.
    with contextlib.suppress(OSError), (where / f"rank{rank}.json").open("x", encoding="utf-8") as file:
        json.dump(entry, file)


def in_a_line(error: BaseException) -> str:
    """Type and message. An error of a data worker arrives as text with its traceback in front; its last line counts."""
    text = str(error)
    if text.startswith("Caught ") and "Original Traceback" in text:
        return f"{text.strip().splitlines()[-1]} (in a data worker)"
    return f"{type(error).__name__}: {text}"


def kind(error: BaseException) -> str:
    """A key of errors.EXIT_CODES, or "crash"."""
    if isinstance(error, OutOfMemory) or gpu_is_full(error) or host_is_full(error):
        return "out of memory"
    if isinstance(error, DiskFull):
        return "disk full"
    if isinstance(error, Diverged):
        return "diverged"
    if isinstance(error, Stopped):
        return "stopped"
    if isinstance(error, UserError):
        return "user error"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "crash"


def gpu_is_full(error: BaseException) -> bool:
    """Return whether this is how torch, CUDA or its libraries say that GPU memory could not be had."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch here
        return True
    if not isinstance(error, RuntimeError) or _while_pinning(error):
        return False
    text = str(error)
    return any(words in text for words in _GPU_IS_FULL) or (
        any(words in text for words in _MAY_BE_FULL) and _little_is_free()
    )


def host_is_full(error: BaseException) -> bool:
    """Return whether this is how Python or torch say that host memory could not be had; pinned memory is host memory."""
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
        return True
    return "CUDA error: out of memory" in str(error) and _while_pinning(error)


def disk_is_full(error: BaseException) -> bool:
    """Return whether this is how Python, safetensors (Rust) or torch's archives say that a disk is full."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    if isinstance(error, RuntimeError) and "inline_container.cc" in str(error):  # torch's writer of archives
        return any(words in str(error) for words in ("unexpected pos", "failed writing", "file write failed"))
    return any(words in str(error) for words in ("os error 28", "No space left on device"))


def _while_pinning(error: BaseException) -> bool:
    """Whether the error comes from a call that pins host memory; CUDA has the same words for both memories."""
    return any(frame.name in _PINS for frame in traceback.extract_tb(error.__traceback__))


def _little_is_free() -> bool:
    """Whether less than 5 % of this process's GPU is free."""
    import torch

    try:
        free, total = torch.cuda.mem_get_info()
    except (RuntimeError, AssertionError):  # the error has broken the context
        return False
    return free < 0.05 * total


def of_a_peer(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone."""
    return any(words in str(error) for words in _OF_A_PEER)


def records(where: Path) -> list[dict]:
    """What the ranks of an attempt have written, the first that failed first."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in where.glob("rank*.json")]
    return sorted(found, key=lambda entry: (entry["of_a_peer"], entry["time"]))


class Heartbeat:
    """Where a rank is: 24 bytes in shared memory, written at every optimizer step and evaluation batch (1 us), and every
    few seconds while a checkpoint is written."""

    def __init__(self):
        self.map = self.stop = None
        where = folder()
        if where is None:
            return
        rank = int(os.environ.get("RANK", "0"))
        with (where / f"pulse{rank}").open("w+b") as file:
            file.truncate(_PULSE.size)
            self.map = mmap.mmap(file.fileno(), _PULSE.size)
        if (where / STOP).exists():
            with (where / STOP).open("r+b") as file:
                self.stop = mmap.mmap(file.fileno(), _STEP.size)
        self.stack = (where / f"stack{rank}.txt").open("w")
        faulthandler.register(signal.SIGUSR1, file=self.stack, all_threads=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SLURM sends it to every process; the supervisor heeds it

    def beat(self, step: int) -> None:
        if self.map is not None:
            _PULSE.pack_into(self.map, 0, os.getpid(), step, time.monotonic())

    @contextlib.contextmanager
    def beating(self, step: int):
        """Beat while the body runs, from a thread: a long save is no hang.

        A rank that is missing in one of its collectives still ends the job, by --ddp_timeout.
        """
        if self.map is None:
            yield
            return
        done = threading.Event()

        def repeat():
            self.beat(step)
            while not done.wait(BEAT_SECONDS):
                self.beat(step)

        thread = threading.Thread(target=repeat, name="zerofit-pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def is_last(self, step: int) -> bool:
        """Whether all ranks shall save after this step and end; the same answer on each of them."""
        return self.stop is not None and 0 < _STEP.unpack_from(self.stop)[0] <= step


def write_stop(where: Path, step: int) -> None:
    """After which step every rank shall save and end; 0: none (how the file begins)."""
    file = where / STOP
    with file.open("r+b" if file.exists() else "wb") as opened:  # in place: the ranks have it in their memory
        opened.write(_STEP.pack(step))


def pulses(where: Path) -> dict[int, tuple[int, int, float]]:
    """{rank: (process id, step, seconds of time.monotonic())} of the ranks that have made a step."""
    found = {}
    for file in where.glob("pulse*"):
        content = file.read_bytes()
        if len(content) == _PULSE.size and any(content):
            found[int(file.name.removeprefix("pulse"))] = _PULSE.unpack(content)
    return found


def write_stacks(where: Path) -> None:
    """Have every rank of this machine write where it stands."""
    for pid, _, _ in pulses(where).values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(STACK_SECONDS)


def exit_code(kind: str) -> int:
    return EXIT_CODES.get(kind, 1)
