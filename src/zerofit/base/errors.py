"""Errors that end a run with one sentence: the place, the cause and the fix."""

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
    """A mistake that the user can fix. Its text is the whole message; no traceback is shown."""

    exit_code = EXIT_CODES["user error"]


class Diverged(UserError):
    """Training stopped because the loss or the gradient is no longer a finite number."""

    exit_code = EXIT_CODES["diverged"]


class Stopped(UserError):
    """The run saved a checkpoint and ended after SIGTERM or SIGUSR1 (75: EX_TEMPFAIL, try again)."""

    exit_code = EXIT_CODES["stopped"]


class Unavailable(UserError):
    """A service, such as the Hub, does not answer or refuses for now (69: EX_UNAVAILABLE, try again later)."""

    exit_code = EXIT_CODES["unavailable"]


class OutOfMemory(UserError):
    """A rank ran out of GPU or host memory.

    phase: "eval", "save", or "" for any other; what_next: what a restart by torchrun's agent changes.
    """

    exit_code = EXIT_CODES["out of memory"]

    def __init__(self, message: str, phase: str = ""):
        super().__init__(message)
        self.phase, self.what_next = phase, ""


class BrokenLinks(UserError):
    """Ranks had no answer from each other, or a wrong one, before the first step."""

    exit_code = EXIT_CODES["hang"]
    phase = "links"  # in the failure record, by which the launcher knows it


class Hung(UserError):
    """No rank went on for far longer than ever before. collectives: that this rank had begun (base/phases.py)."""

    exit_code = EXIT_CODES["hang"]
    collectives: ClassVar[dict] = {}


def printable(text: str) -> str:
    """Return the text with control characters escaped: those in the data would control the terminal.

    And halves of surrogate pairs, which have no UTF-8.
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", lambda m: f"\\x{ord(m[0]):02x}", text)


def shortened(text: str) -> str:
    """Return the text with each word of 300 letters and more cut; no name of a file is so long."""
    return re.sub(r"[^\s/:,;'\"]{300,}", lambda word: f"{word[0][:20]}... ({len(word[0]):,} characters)", text)


def one_line(text: str) -> str:
    """Return the text as `printable` does, on one line: text that others have written adds no line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without its full stop; its type where there is no message."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def in_one_line(error: BaseException) -> str:
    """Return an error's message without line breaks and its full stop: an install line may be on a line of its own."""
    return " ".join(str(error).split()).rstrip(".")


class DiskFull(UserError):
    """A write failed because the disk is full."""

    exit_code = EXIT_CODES["disk full"]


def full_disk(place) -> str:
    """Return the error sentence for a file or folder whose disk is full."""
    return (
        f"the disk of {place} is full (No space left on device); make room, or name a folder on another disk with "
        "--output_dir"
    )


def bytes_asked_for(error) -> str:
    """Return " (2.00 GiB more were asked for)" with the size in torch's message; "" if it names none."""
    match = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    return f" ({match[1]} more were asked for)" if match else ""
