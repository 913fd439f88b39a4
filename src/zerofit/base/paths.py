"""Find folders: the project, the package, the cache; sizes and hashes of files; write files of shared folders."""

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

ABANDONED_SECONDS = 600.0  # that nothing was written to a temporary file: its writer was killed

LARGEST = 2**20  # bytes of a file of settings

ROOT = IN_WHEEL if IN_WHEEL.is_dir() else PACKAGE.parents[1]  # those folders as they came with the package


def is_project(folder: Path) -> bool:
    """Return whether the folder has recipes and DeepSpeed files: a checkout, or made by `zerofit init`."""
    return (folder / "recipes" / "sft.py").is_file() and (folder / "deepspeed_configs" / "zero3.json").is_file()


def _project() -> Path:
    """Return the folder whose recipes and DeepSpeed files are used: the running recipe's, this one, else ROOT."""
    program = Path(sys.argv[0]).resolve()
    if program.parent.name == "recipes" and is_project(program.parents[1]):
        return program.parents[1]
    return Path.cwd() if is_project(Path()) else ROOT


PROJECT = _project()


def import_path() -> list[str]:
    """Return what PYTHONPATH needs so that a process imports this package: nothing for an installed one."""
    return [] if ROOT == IN_WHEEL else [str(ROOT / "src")]


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def from_here(text: str) -> str:
    """Return the text with paths into the current folder relative to it."""
    return re.sub(rf"(?<!\S){re.escape(str(Path.cwd()))}/", "", text)


def size_of(folder: Path) -> int:
    """Return the bytes of all files below the folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def hash_file(file: Path, sync: bool = False) -> str:
    """Return the xxh3 hash of a file; with `sync`, once it is on the disk."""
    import xxhash

    with file.open("rb") as opened:
        if sync:
            os.fsync(opened.fileno())
        return hashlib.file_digest(opened, xxhash.xxh3_64).hexdigest()


def cache_root() -> Path:
    """Return the cache folder, $ZEROFIT_CACHE or ~/.cache/zerofit, without making it.

    For a user without a home folder it is a private folder in the temporary directory.
    """
    named = os.environ.get("ZEROFIT_CACHE")
    try:
        return Path(named or "~/.cache/zerofit").expanduser()
    except RuntimeError as error:
        if named:
            raise UserError(f"ZEROFIT_CACHE={named}: cannot be looked up: {str(error).rstrip('.')}.") from None
    if (folder := private_folder()) is None:
        folder = Path(tempfile.mkdtemp(prefix="zerofit-"))
        os.environ["ZEROFIT_CACHE"] = str(folder)  # so that the ranks, started by this process, use the same
    return folder


def private_folder() -> Path | None:
    """Return this user's folder in the temporary directory (mode 0700), made if missing.

    None if the name is taken by another user's folder, one that others can write to, or a link.
    """
    return own_folder(Path(tempfile.gettempdir()) / f"zerofit-{os.getuid()}")


def own_folder(folder: Path, make: bool = True) -> Path | None:
    """Return a folder that only this user can write to (mode 0700); None if the name is taken by anything else.

    Args: make: make it if missing, in a folder that exists.
    """
    if make:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        return None
    if make:
        folder.chmod(0o700)
    return folder


# --- files that others may have made ---


def read_text(file: Path) -> str:
    """Return the text of a UTF-8 file of settings.

    Raises: OSError also for a pipe or a device, which may never end, and would be empty for the next process that reads
        it, and for a file too large to be one.
    """
    about = file.stat()
    if not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
        raise OSError(errno.EINVAL, "it is no file, and every process of a job reads it again")
    if about.st_size > LARGEST:
        raise OSError(errno.EFBIG, f"it has {about.st_size:,} bytes, {LARGEST:,} are the most")
    return file.read_text(encoding="utf-8")


@contextlib.contextmanager
def replacing(file: Path, sync: bool = False) -> Iterator[IO[bytes]]:
    """Yield a new file that takes the name of `file` once the body has ended, and is deleted if it fails.

    A link of that name is replaced: what it leads to is not written to. Its name until then is of this write alone:
    processes of several machines write reports. What a killed writer of the same file has left is deleted.
    Args: sync: to the disk, before it is renamed.
    """
    tmp_path = beside(file, f".{secrets.token_hex(4)}.tmp")
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


def beside(file: Path, suffix: str, prefix: str = "") -> Path:
    """Return the path of a file or folder beside another: its name, shortened to what file systems take, and more."""
    whole = file.name.encode("utf-8", "surrogateescape")
    room = LONGEST_NAME - len(prefix) - len(suffix)
    if len(whole) <= room:
        return file.with_name(f"{prefix}{file.name}{suffix}")
    digest = hashlib.sha256(whole).hexdigest()[:16]
    return file.with_name(f"{prefix}{whole[: room - 16].decode('utf-8', 'ignore')}{digest}{suffix}")


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock file, for which other processes wait. Raises: UserError if the name is a folder's or a link's."""
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
    """Write a UTF-8 file as `replacing` does; what UTF-8 has no bytes for (half of a surrogate pair) is escaped."""
    with replacing(file) as stream:
        stream.write(text.encode("utf-8", "backslashreplace"))


def appending(file: Path) -> IO[str]:
    """Open a UTF-8 file to append lines to. Raises: OSError if it is a link, or a pipe that nobody reads."""

    def opener(name, flags):
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # the last one matters to pipes only

    text = {"encoding": "utf-8", "errors": "backslashreplace", "buffering": 1}
    return open(file, "a", opener=opener, **text)  # Path.open takes no opener
