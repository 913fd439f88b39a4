"""Find the project, package and cache folders; size and hash files; write files in shared folders."""

import contextlib
import errno
import glob
import hashlib
import os
import re
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from zerofit.base.errors import UserError

PACKAGE = Path(__file__).resolve().parents[1]

IN_WHEEL = PACKAGE / "project"  # setup.py puts recipes/, deepspeed_configs/, launchers/ and examples/ there

LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes

ABANDONED_SECONDS = 600.0  # without a write to a temporary file, after which its writer counts as killed

LARGEST = 2**20  # most bytes of a settings file

ROOT = IN_WHEEL if IN_WHEEL.is_dir() else PACKAGE.parents[1]  # these folders as they came with the package


def is_project(folder: Path) -> bool:
    """Return whether the folder has recipes and DeepSpeed files: a checkout, or created by `zerofit init`."""
    return (folder / "recipes" / "sft.py").is_file() and (folder / "deepspeed_configs" / "zero3.json").is_file()


def _project() -> Path:
    """Return the folder whose recipes and DeepSpeed files are used: the running recipe's, the current one, or ROOT."""
    program = Path(sys.argv[0]).resolve()
    if program.parent.name == "recipes" and is_project(program.parents[1]):
        return program.parents[1]
    return Path.cwd() if is_project(Path()) else ROOT


PROJECT = _project()


def import_path() -> list[str]:
    """Return the entries of PYTHONPATH that a process needs to import this package; [] if it is installed."""
    return [] if ROOT == IN_WHEEL else [str(ROOT / "src")]


def nearest_existing(folder: Path) -> Path:
    """Return the folder or its nearest existing parent."""
    while not folder.exists():
        folder = folder.parent
    return folder


def from_here(text: str) -> str:
    """Make paths in the text relative to the current folder."""
    return re.sub(rf"(?<!\S){re.escape(str(Path.cwd()))}/", "", text)


def size_of(folder: Path) -> int:
    """Return the total size of all files in the folder in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def hash_file(file: Path, sync: bool = False) -> str:
    """Return the xxh3 hash of a file; with `sync`, after flushing it to the disk."""
    import xxhash

    with file.open("rb") as opened:
        if sync:
            os.fsync(opened.fileno())
        return hashlib.file_digest(opened, xxhash.xxh3_64).hexdigest()


def cache_root() -> Path:
    """Return the cache folder, $ZEROFIT_CACHE or ~/.cache/zerofit, without creating it.

    A user without a home folder gets a private folder in the temporary directory.
    """
    setting = os.environ.get("ZEROFIT_CACHE")
    try:
        return Path(setting or "~/.cache/zerofit").expanduser()
    except RuntimeError as error:
        if setting:
            raise UserError(f"ZEROFIT_CACHE={setting}: cannot be expanded: {str(error).rstrip('.')}.") from None
    if (folder := private_folder()) is None:
        folder = Path(tempfile.mkdtemp(prefix="zerofit-"))
        os.environ["ZEROFIT_CACHE"] = str(folder)  # the ranks that this process starts use the same folder
    return folder


def private_folder() -> Path | None:
    """Return this user's folder in the temporary directory (mode 0700); create it if missing.

    Returns None if the path is a link, another user's folder, or writable by others.
    """
    return user_only_folder(Path(tempfile.gettempdir()) / f"zerofit-{os.getuid()}")


def user_only_folder(folder: Path, create: bool = True) -> Path | None:
    """Return a folder that only this user can write to (mode 0700); None if the path is anything else.

    Args: create: create it if missing, in an existing folder.
    """
    if create:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        return None
    if create:
        folder.chmod(0o700)
    return folder


# --- files that other users may have created ---


def read_text(file: Path) -> str:
    """Return the text of a UTF-8 settings file.

    Raises: OSError also for a file that is too large, and for a pipe or device: it may never end, and is empty for the
        next process that reads it.
    """
    status = file.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError(errno.EINVAL, "it must be a regular file, since every process of a job reads it")
    if status.st_size > LARGEST:
        raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, the limit is {LARGEST:,}")
    return file.read_text(encoding="utf-8")


@contextlib.contextmanager
def replacing(file: Path, sync: bool = False) -> Iterator[IO[bytes]]:
    """Yield a temporary file that replaces `file` after the body, and is deleted if the body fails.

    A link with that name is replaced, and its target is not written to. The temporary name is unique, since processes
    on several machines write reports. Temporary files of killed writers of the same file are deleted.
    Args: sync: flush the file to the disk before the rename.
    """
    tmp_path = sibling(file, f".{secrets.token_hex(4)}.tmp")
    for left in file.parent.glob(glob.escape(tmp_path.name[:-12]) + "?" * 8 + ".tmp"):
        with contextlib.suppress(OSError):  # another writer may be deleting it
            if time.time() - left.lstat().st_mtime > ABANDONED_SECONDS:
                left.unlink()
    try:
        descriptor = os.open(tmp_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            if sync:
                os.fsync(descriptor)
        tmp_path.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            tmp_path.unlink(missing_ok=True)
        raise


def sibling(file: Path, suffix: str, prefix: str = "") -> Path:
    """Return the path with a prefix and suffix added to its name, which is shortened to the file system's limit."""
    name = file.name.encode("utf-8", "surrogateescape")
    room = LONGEST_NAME - len(prefix) - len(suffix)
    if len(name) <= room:
        return file.with_name(f"{prefix}{file.name}{suffix}")
    digest = hashlib.sha256(name).hexdigest()[:16]
    return file.with_name(f"{prefix}{name[: room - 16].decode('utf-8', 'ignore')}{digest}{suffix}")


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock file, for which other processes wait. Raises: UserError if the path is a folder or a link."""
    from filelock import FileLock

    lock = FileLock(file)
    try:
        lock.acquire()
    except OSError as error:
        raise UserError(f"{file}: cannot be locked: {error.strerror or error}; remove it.") from None
    try:
        yield
    finally:
        lock.release()


def write_text(file: Path, text: str) -> None:
    """Write a UTF-8 file as `replacing` does; unpaired surrogates are escaped."""
    with replacing(file) as stream:
        stream.write(text.encode("utf-8", "backslashreplace"))


def appending(file: Path) -> IO[str]:
    """Open a UTF-8 file for appending lines. Raises: OSError if it is a link, or a pipe without a reader."""

    def opener(name, flags):
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # O_NONBLOCK affects only pipes

    text = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1}
    return open(file, "a", opener=opener, **text)  # Path.open takes no opener
