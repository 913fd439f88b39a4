"""Find folders: the repository, the package, the cache; sizes, hashes and nearest existing parents of paths."""

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from zerofit.errors import UserError

ROOT = Path(__file__).resolve().parents[2]  # of the repository

PACKAGE = Path(__file__).resolve().parent


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


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
    folder = Path(tempfile.gettempdir()) / f"zerofit-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        return None
    folder.chmod(0o700)
    return folder
