"""Errors that end a run with a message of one sentence: the place, the cause and the fix."""

import re
from typing import ClassVar

EXIT_CODES = {
    "disk full": 1,
    "user error": 2,
    "out of memory": 3,
    "diverged": 4,
    "hang": 5,
    "unavailable": 69,
    "stopped": 75,
    "interrupted": 130,
}


class UserError(Exception):
    """A mistake that the user can fix. Its text is the full message; no traceback is printed."""

    exit_code = EXIT_CODES["user error"]


class Diverged(UserError):
    """Training stopped because the loss or the gradient is no longer a finite number."""

    exit_code = EXIT_CODES["diverged"]


class Stopped(UserError):
    """The run saved a checkpoint and ended after SIGTERM or SIGUSR1 (75: EX_TEMPFAIL, try again)."""

    exit_code = EXIT_CODES["stopped"]


class Unavailable(UserError):
    """A service, such as the Hub, does not answer or rejects requests (69: EX_UNAVAILABLE, try again later)."""

    exit_code = EXIT_CODES["unavailable"]


class OutOfMemory(UserError):
    """A rank ran out of GPU or host memory.

    phase: "eval", "save" or "" (any other); what_next: the change that a restart by torchrun's agent makes.
    """

    exit_code = EXIT_CODES["out of memory"]

    def __init__(self, message: str, phase: str = ""):
        super().__init__(message)
        self.phase, self.what_next = phase, ""


class BrokenLinks(UserError):
    """Before the first step, ranks could not reach each other or received wrong values."""

    exit_code = EXIT_CODES["hang"]
    phase = "links"  # the key by which the launcher recognizes the failure record


class Hung(UserError):
    """All ranks were stuck in a phase far longer than before. collectives: begun by this rank (base/phases.py)."""

    exit_code = EXIT_CODES["hang"]
    collectives: ClassVar[dict] = {}


def printable(text: str) -> str:
    """Escape control characters, which could control the terminal, and unpaired surrogates, which lack UTF-8."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", lambda m: f"\\x{ord(m[0]):02x}", text)


def shortened(text: str) -> str:
    """Cut each word of 300 or more characters, which is longer than a file name."""
    return re.sub(r"[^\s/:,;'\"]{300,}", lambda word: f"{word[0][:20]}... ({len(word[0]):,} characters)", text)


def one_line(text: str) -> str:
    """Apply `printable` and escape line breaks, so that foreign text cannot add lines."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its full stop; its type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def without_line_breaks(error: BaseException) -> str:
    """Return an error's message without line breaks and its full stop."""
    return " ".join(str(error).split()).rstrip(".")


class DiskFull(UserError):
    """A write failed because the disk is full."""

    exit_code = EXIT_CODES["disk full"]


def full_disk(place) -> str:
    """Return the error message for a file or folder whose disk is full."""
    return (
        f"the disk of {place} is full (No space left on device); free some space, or set a folder on another disk with "
        "--output_dir"
    )


def failed_allocation(error) -> str:
    """Return " (tried to allocate 2.00 GiB)" with the size in torch's message; "" without a size."""
    match = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    return f" (tried to allocate {match[1]})" if match else ""
