"""Folders: the repository, the package, the cache, and what is near a path."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from zerofit.errors import UserError

ROOT = Path(__file__).resolve().parents[2]  # of the repository

PACKAGE = Path(__file__).resolve().parent


def nearest_existing(folder: Path) -> Path:
    """The folder, or the first above it that is there."""
    while not folder.exists():
        folder = folder.parent
    return folder


def size_of(folder: Path) -> int:
    """Bytes of all its files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def cache_root() -> Path:
    """Return the folder of everything that is kept between runs: $ZEROFIT_CACHE or ~/.cache/zerofit; not made yet.

    For a user without a home folder it is one among the temporary files.
    """
    named = os.environ.get("ZEROFIT_CACHE")
    try:
        return Path(named or "~/.cache/zerofit").expanduser()
    except RuntimeError as error:
        if named:
            raise UserError(f"ZEROFIT_CACHE={named}: cannot be looked up: {str(error).rstrip('.')}.") from None
    if (folder := private_folder()) is None:
        folder = Path(tempfile.mkdtemp(prefix="zerofit-"))
        os.environ["ZEROFIT_CACHE"] = str(folder)  # for the ranks, which this process starts
    return folder


def private_folder() -> Path | None:
    """Return this user's folder among the temporary files, made if need be, which nobody else can write to or read.

    None where that name is taken: a folder of another user, or open to others; a link.
    """
    folder = Path(tempfile.gettempdir()) / f"zerofit-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        return None
    folder.chmod(0o700)
    return folder
