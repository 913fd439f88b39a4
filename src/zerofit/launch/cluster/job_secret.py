"""The secret that a job's supervisors share to sign their documents."""

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from zerofit import run_lock
from zerofit.errors import UserError
from zerofit.launch.cluster import node_options

VARIABLE = "ZEROFIT_JOB_SECRET"

SHORTEST = 16  # characters

READ_SECONDS = 10.0  # in which a shared disk must show the file that node 0 has written

SET_IT = f"set {VARIABLE} to the same random text on all nodes (openssl rand -hex 16)"


@contextlib.contextmanager
def of_job(here: node_options.Place, flags: list[str]) -> Iterator[bytes]:
    """Yield the job's secret: ZEROFIT_JOB_SECRET, else a file beside the run folder that lives as long as node 0 does.

    The variable is taken out of the environment, which the ranks inherit.
    Raises: UserError where there is neither, or the file can be read by others.
    """
    text = os.environ.pop(VARIABLE, "")
    if text:
        if len(text) < SHORTEST:
            raise UserError(f"{VARIABLE}: has {len(text)} characters, {SHORTEST} or more are needed; {SET_IT}.")
        yield text.encode()
        return
    file = file_beside(flags)
    if file is None:
        raise UserError(
            f"NODES: the nodes of a job share a secret, and there is none; {SET_IT}, or name a run folder on a shared "
            "disk with --output_dir (OUT=)."
        )
    if here.rank:
        node_options.reach(here)  # node 0 writes the file before it opens the port
        yield _read(file)
        return
    node_options.check_ports(here)  # before an earlier job's file is replaced
    run_lock.take(folder_of(flags))  # or that of a job which runs
    try:
        yield _write(file)
    finally:
        file.unlink(missing_ok=True)


def file_beside(flags: list[str]) -> Path | None:
    """Return where node 0 leaves the secret for the others: beside --output_dir; None where that is not among the flags."""
    folder = folder_of(flags)
    return folder.with_name(f".{folder.name}.job-secret") if folder else None


def folder_of(flags: list[str]) -> Path | None:
    """Return the run folder that the flags name."""
    folder = None
    for i, word in enumerate(flags):
        name, equals, value = word.partition("=")
        if name in ("--output_dir", "--output-dir"):
            folder = value if equals else "".join(flags[i + 1 : i + 2])
    return Path(folder).expanduser().absolute() if folder else None


def _write(file: Path) -> bytes:
    text = secrets.token_hex(16)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            private = not os.fstat(opened.fileno()).st_mode & 0o077
            opened.write(text if private else "")
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}; {SET_IT}.") from None
    if not private:
        file.unlink(missing_ok=True)
        raise UserError(f"{file}: this disk does not keep a file from being read by others; {SET_IT}.")
    return text.encode()


def _read(file: Path) -> bytes:
    deadline, cause = time.monotonic() + READ_SECONDS, ""
    while time.monotonic() < deadline:
        try:
            with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as opened:
                about = os.fstat(opened.fileno())
                if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
                    raise UserError(f"{file}: is not a file that this user alone owns and can read; {SET_IT}.")
                if len(text := opened.read(1000).strip()) >= SHORTEST:
                    return text
                cause = "it is empty"
        except OSError as error:
            cause = error.strerror
        time.sleep(0.2)
    raise UserError(f"{file}: the secret that node 0 leaves there cannot be read ({cause}); {SET_IT}.")
