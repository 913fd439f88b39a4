"""Share a secret between a job's supervisors, which sign their documents with it."""

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from zerofit.base import command_line
from zerofit.base.errors import UserError
from zerofit.job import run_lock
from zerofit.launch.cluster import node_options

VARIABLE = "ZEROFIT_JOB_SECRET"

SHORTEST = 16  # characters

READ_SECONDS = 10.0  # for node 0's file to become visible on a shared disk

SET_IT = f"set {VARIABLE} to the same random text on all nodes (openssl rand -hex 16)"


@contextlib.contextmanager
def of_job(here: node_options.Place, flags: list[str]) -> Iterator[bytes]:
    """Yield the job's secret, from ZEROFIT_JOB_SECRET or a file next to the run folder.

    The variable is removed from the environment, which the ranks inherit. Node 0 creates the file and deletes it at the
    end of the job.
    Args: here: this node's place; flags: the recipe's.
    Raises: UserError if there is neither, or other users can read the file.
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
    node_options.check_ports(here)  # fails if an earlier job runs, before its file is replaced
    run_lock.take(folder_of(flags))  # the same for a job on another port
    try:
        yield _write(file)
    finally:
        file.unlink(missing_ok=True)


def file_beside(flags: list[str]) -> Path | None:
    """Return the file for the secret, next to --output_dir; None if the flags have no --output_dir."""
    folder = folder_of(flags)
    return folder.with_name(f".{folder.name}.job-secret") if folder else None


def folder_of(flags: list[str]) -> Path | None:
    """Return the absolute path of --output_dir (the last one counts); None without it."""
    given = [values for name, values, _ in command_line.by_flag(flags) if name == "--output_dir"]
    return Path(given[-1][0]).expanduser().absolute() if given and any(given[-1]) else None


def _write(file: Path) -> bytes:
    secret = secrets.token_hex(16)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            is_private = not os.fstat(stream.fileno()).st_mode & 0o077
            stream.write(secret if is_private else "")
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}; {SET_IT}.") from None
    if not is_private:
        file.unlink(missing_ok=True)
        raise UserError(f"{file}: this disk does not keep a file from being read by others; {SET_IT}.")
    return secret.encode()


def _read(file: Path) -> bytes:
    deadline, cause = time.monotonic() + READ_SECONDS, ""
    while time.monotonic() < deadline:
        try:
            with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as stream:
                info = os.fstat(stream.fileno())
                if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
                    raise UserError(f"{file}: is not a file that this user alone owns and can read; {SET_IT}.")
                if len(secret := stream.read(1000).strip()) >= SHORTEST:
                    return secret
                cause = "it is empty"
        except OSError as error:
            cause = error.strerror
        time.sleep(0.2)
    raise UserError(f"{file}: the secret that node 0 leaves there cannot be read ({cause}); {SET_IT}.")
