"""Lock a run folder for a single process."""

import contextlib
import fcntl
import json
import os
import re
import socket
import time
from datetime import datetime
from pathlib import Path

from zerofit.base.errors import UserError

FILE = "run.lock"

SINCE = "%Y-%m-%d %H:%M:%S %z"

REMOVAL_SECONDS = 2.0  # most time that its last owner takes to remove a folder; after that the path is invalid

LEASE_SECONDS = 100.0  # a file server drops the locks of a dead machine within this time (NFS: 90 s)

# Files that a run writes to its folder. Checkpoints, attempts/ and exports may be links to another disk: new ones get
# unused names.
RUN_FILES = re.compile(
    r"(run|job|result|report|deepspeed|plan|data|memory|certificate|slurm)\.(json|tmp)|(report|plan|certificate)\.md"
    r"|(plan|memory)\.png|(metrics|padding_free|oom-rank\d+)\.tmp|report\.html"
    r"|metrics\.jsonl|padding_free\.txt|oom-rank\d+\.(txt|pickle)|slurm\.(sbatch|log)|run\.lock"
    r"|cancelled|logs|nan|final|reference|\.saving|\.uploading"
)

_held: dict[Path, tuple[int, list[Path]]] = {}  # {run folder: (descriptor, folders created for it)}


def take(folder: Path, must_be_new: bool = False) -> None:
    """Lock a run folder, which is created if missing, until `release` or the end of this process.

    On a file system without locks, a note is printed and the run continues.
    Raises: UserError if another process has locked the folder, or it cannot be created; FileExistsError if it exists
        but must be new.
    """
    folder = folder.resolve()
    if folder in _held:
        return
    created = [f for f in (folder, *folder.parents) if not f.exists()]
    deadline = removed_by = None
    refuse_links(folder)
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=not must_be_new)
            must_be_new = False
            descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if must_be_new and isinstance(error, FileExistsError):
                raise
            removed_by = removed_by or time.monotonic() + REMOVAL_SECONDS
            if isinstance(error, FileNotFoundError) and time.monotonic() < removed_by:  # its last owner is removing it
                time.sleep(0.01)
                continue
            raise UserError(f"--output_dir {folder}: cannot be written to: {error.strerror}.") from None
        removed_by = None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            deadline = deadline or _patience(folder)
            if time.monotonic() > deadline:
                raise UserError(_refusal(folder)) from None
            time.sleep(0.5)
            continue
        except OSError as error:
            print(f"note: {folder}: its file system lacks locks ({error.strerror}): check that no other run uses it",
                  flush=True)  # fmt: skip
            break
        if _is_on_disk(descriptor, folder):
            break
        os.close(descriptor)  # its last owner removed it between open and flock
    _held[folder] = descriptor, created
    facts = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime(SINCE)}
    with contextlib.suppress(OSError):  # with a full disk, the lock lacks the name of its owner
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(facts).encode())


def refuse_links(folder: Path, is_pushed: bool = False) -> None:
    """Raise UserError if a file that a run writes is a link. The path of the run folder may contain links.

    Otherwise, other users of a shared folder could choose which file of this user is overwritten.
    Args: is_pushed: --push_to_hub uploads everything except checkpoints, so that other links are rejected as well.
    """
    for top in folder.glob("*"):
        if not (RUN_FILES.fullmatch(top.name) or (is_pushed and not top.name.startswith("checkpoint-"))):
            continue
        if file := next((file for file in (top, *top.rglob("*")) if file.is_symlink()), None):
            raise UserError(
                f"{file}: is a link to {file.readlink()}, and a run would write to{' or push' * is_pushed} its target; "
                "remove the link, or use another folder with --output_dir (OUT=...)."
            )


def held() -> list[Path]:
    """Return the run folders that this process has locked."""
    return list(_held)


def release() -> None:
    """Release the locks of this process, and remove folders that were created for them and are empty."""
    for folder, (descriptor, created) in _held.items():
        if _is_on_disk(descriptor, folder):
            with contextlib.suppress(OSError):
                (folder / FILE).unlink()
        os.close(descriptor)
        with contextlib.suppress(OSError):
            for empty in created:
                empty.rmdir()
    _held.clear()


def _patience(folder: Path) -> float:
    """Return the time.monotonic() until which to retry: 0 for a local owner, else LEASE_SECONDS from now."""
    host = owner(folder).get("host", socket.gethostname())
    if host == socket.gethostname():
        return 0.0
    print(
        f"note: {folder} is locked by {host}; waiting {LEASE_SECONDS:.0f} s in case that machine has died", flush=True
    )
    return time.monotonic() + LEASE_SECONDS


def _refusal(folder: Path) -> str:
    facts = owner(folder)
    process = "process {process} on {host} since {since}".format(**facts) if facts else "another process"
    return (
        f"{folder} is in use by {process}: wait until it ends (`zerofit status {folder}`), or end it there with "
        f"`zerofit cancel {folder}`; for another run, use another folder with --output_dir (OUT=...)."
    )


def owner(folder: Path) -> dict:
    """Return process, host and since of the lock's owner; {} if the file is missing or invalid."""
    for _ in range(10):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            file = folder / FILE
            facts = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            return facts if _is_owner(facts) else {}
        time.sleep(0.05)
    return {}


def holder(folder: Path):
    """Return the psutil.Process on this machine that has locked the run folder; None without one."""
    import psutil

    facts = owner(folder) if (folder / FILE).exists() else {}
    if facts.get("host") != socket.gethostname():
        return None
    with contextlib.suppress(psutil.Error, ValueError):
        process = psutil.Process(facts["process"])
        since = datetime.strptime(facts["since"], SINCE).timestamp()
        if process.create_time() < since + 1 and _holds(process, folder / FILE):
            return process
    return None


def _holds(process, file: Path) -> bool:
    """Return whether a psutil process has a lock file open, or the kernel lists its lock.

    The content of the file may be outdated or forged, so that it names an unrelated process.
    """
    import psutil

    with contextlib.suppress(psutil.Error, OSError):  # open files of other users' processes are not visible
        if any(file.samefile(opened.path) for opened in process.open_files()):
            return True
    with contextlib.suppress(OSError):  # Linux: number, FLOCK, kind, mode, process, device:inode, first, last byte
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        holding = [str(process.pid), str(file.lstat().st_ino)]
        return any([words[4], words[5].rpartition(":")[2]] == holding for words in locks if len(words) > 5)
    return False


def is_held(folder: Path) -> bool:
    """Return whether a process trains in the run folder.

    For a process on another machine: whether its lock exists and no result was written since.
    """
    file, host = folder / FILE, owner(folder).get("host")
    if host in (None, socket.gethostname()):
        return holder(folder) is not None
    with contextlib.suppress(OSError):
        return file.stat().st_mtime >= (folder / "result.json").stat().st_mtime
    return file.exists()


def _is_owner(facts) -> bool:
    names = {"process": int, "host": str, "since": str}
    return isinstance(facts, dict) and all(isinstance(facts.get(name), kind) for name, kind in names.items())


def _is_on_disk(descriptor: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), (folder / FILE).stat())
    except OSError:
        return False


def _forget() -> None:
    for descriptor, _ in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)  # data workers would hold the lock after their rank
