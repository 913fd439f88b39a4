"""Lock a run folder for a single writer, until that process ends."""

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

REMOVAL_SECONDS = 2.0  # that its last owner takes to remove a folder, at most; then the path is not possible at all

LEASE_SECONDS = 100.0  # a file server drops the locks of a dead machine by then (NFS: 90 s)

# What a run writes into its folder. Checkpoints, attempts/ and exports may be links: what is on another disk stays, a
# new one gets a name that is not taken.
OWN = re.compile(
    r"(run|job|result|report|deepspeed|plan|data|memory|certificate|slurm)\.(json|tmp)|(report|plan|certificate)\.md"
    r"|(plan|memory)\.png|(metrics|padding_free|oom-rank\d+)\.tmp|report\.html"
    r"|metrics\.jsonl|padding_free\.txt|oom-rank\d+\.(txt|pickle)|slurm\.(sbatch|log)|run\.lock"
    r"|cancelled|logs|nan|final|reference|\.saving|\.uploading"
)

_held: dict[Path, tuple[int, list[Path]]] = {}  # {run folder: (descriptor, folders created for it)}


def take(folder: Path, must_be_new: bool = False) -> None:
    """Lock a run folder, creating it if missing, until `release` or the end of this process.

    On a file system without locks a note is printed and the run continues.
    Raises: UserError if another process has locked the folder, or it cannot be created; FileExistsError if it must be
        new and is not.
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
            print(f"note: {folder}: its file system has no locks ({error.strerror}): see that no other run writes "
                  "there",
                  flush=True)  # fmt: skip
            break
        if _is_on_disk(descriptor, folder):
            break
        os.close(descriptor)  # removed by its last owner between open and flock
    _held[folder] = descriptor, created
    facts = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime(SINCE)}
    with contextlib.suppress(OSError):  # a full disk: the lock holds without its owner's name
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(facts).encode())


def refuse_links(folder: Path, is_pushed: bool = False) -> None:
    """Refuse a run folder in which a name that a run writes to is a link. The folder itself may be reached by links.

    Whoever may write to a shared folder, or has packed it, would choose which file of this user is overwritten.
    Args: is_pushed: --push_to_hub uploads the folder, all but its checkpoints: it may have no other link either.
    Raises: UserError.
    """
    for top in folder.glob("*"):
        if not (OWN.fullmatch(top.name) or (is_pushed and not top.name.startswith("checkpoint-"))):
            continue
        if file := next((file for file in (top, *top.rglob("*")) if file.is_symlink()), None):
            raise UserError(
                f"{file}: is a link, to {file.readlink()}, and a run would write to{' or push' * is_pushed} what it "
                "leads to; remove the link, or name another folder with --output_dir (OUT=...)."
            )


def held() -> list[Path]:
    """Return the run folders that this process has locked."""
    return list(_held)


def release() -> None:
    """Release the locks of this process and remove the folders created for them that are still empty."""
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
    """Return the time.monotonic() until which to retry: 0 if the owner is local, else a lease from now."""
    host = owner(folder).get("host", socket.gethostname())
    if host == socket.gethostname():
        return 0.0
    print(
        f"note: {folder} is locked by {host}; waiting {LEASE_SECONDS:.0f} s in case that machine has died", flush=True
    )
    return time.monotonic() + LEASE_SECONDS


def _refusal(folder: Path) -> str:
    facts = owner(folder)
    who = "process {process} on {host} since {since}".format(**facts) if facts else "another process"
    return (
        f"{folder} is being trained by {who}: wait for its end (`zerofit status {folder}`), or end it there with "
        f"`zerofit cancel {folder}`; for another run name another folder with --output_dir (OUT=...)."
    )


def owner(folder: Path) -> dict:
    """Return what the lock's owner wrote: process, host, since; {} if the file does not hold these."""
    for _ in range(10):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            file = folder / FILE
            facts = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            return facts if _is_owner(facts) else {}
        time.sleep(0.05)
    return {}


def holder(folder: Path):
    """Return this machine's psutil.Process that has locked the run folder; None if none has."""
    import psutil

    found = owner(folder) if (folder / FILE).exists() else {}
    if found.get("host") != socket.gethostname():
        return None
    with contextlib.suppress(psutil.Error, ValueError):
        process = psutil.Process(found["process"])
        since = datetime.strptime(found["since"], SINCE).timestamp()
        if process.create_time() < since + 1 and _holds(process, folder / FILE):
            return process
    return None


def _holds(process, file: Path) -> bool:
    """Return whether a psutil process has a lock file open, or the kernel lists its lock.

    What the file says may be old, or another's words: the process that it names may have nothing to do with the run.
    """
    import psutil

    with contextlib.suppress(psutil.Error, OSError):  # of other users' processes nobody is told the files
        if any(file.samefile(opened.path) for opened in process.open_files()):
            return True
    with contextlib.suppress(OSError):  # Linux: number, FLOCK, kind, mode, process, device:inode, first, last byte
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        holding = [str(process.pid), str(file.lstat().st_ino)]
        return any([words[4], words[5].rpartition(":")[2]] == holding for words in locks if len(words) > 5)
    return False


def is_held(folder: Path) -> bool:
    """Return whether a process trains into the run folder, as far as this machine can tell.

    Of another machine it is known only that the lock has not been removed, nor a result been written since.
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
