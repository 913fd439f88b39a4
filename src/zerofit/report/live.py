"""Update report.html in a separate process while a run trains.

Ranks never wait for it. The supervisor starts it, or rank 0 without a supervisor. It has a low priority, draws only
after the run has written something, and ends with the process that started it.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from zerofit.base import paths
from zerofit.report import run_page
from zerofit.report.run import FILE, Run

OFF = "ZEROFIT_PAGE"  # environment variable; 0: write the page only at the end

MIN_SECONDS = 10.0  # between two pages

IDLE_FACTOR = 20  # multiple of the last page's duration to wait, so that slow machines write fewer pages

NICE = 10  # if all cores train, 19 would leave 1% of a core: minutes per page

POLL_SECONDS = 1.0  # between checks of the run folder

WATCHED = ("run.json", "metrics.jsonl", "result.json", "report.json", "memory.json", "next.json")


class Page:
    """The process that writes the page of a run folder, if it is enabled and could start."""

    def __init__(self, folder: Path):
        self._process = None
        if os.environ.get(OFF) == "0":
            return
        command = [sys.executable, "-P", "-m", "zerofit.report.live", str(folder.absolute()), str(os.getpid())]
        isolated = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with contextlib.suppress(OSError):  # e.g. out of memory; the run continues without the page
            self._process = subprocess.Popen(
                command, env=os.environ | isolated, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            print(f"page: {folder / FILE}, updated while the run trains", flush=True)

    def stop(self) -> None:
        """End the process. The caller writes the final page."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def main(folder: Path, parent: int) -> None:
    """Write the page whenever the run has written something, and once more after the parent process has ended."""
    os.nice(NICE)
    before, due = None, time.monotonic() + MIN_SECONDS
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
        if time.monotonic() >= due and (now := _written(folder)) != before:
            began = time.monotonic()
            before = now if _write(folder, training=True) else before
            duration = time.monotonic() - began
            due = time.monotonic() + max(MIN_SECONDS, IDLE_FACTOR * duration)
    if before is not None or (folder / "result.json").exists():
        _write(folder, training=False)


def _written(folder: Path) -> list[tuple[int, int] | None]:
    """Return (time, size) of the files that the page reads, None for a missing file."""
    stamps = []
    for name in WATCHED:
        try:
            about = (folder / name).stat()
            stamps.append((about.st_mtime_ns, about.st_size))
        except OSError:
            stamps.append(None)
    return stamps


def _write(folder: Path, training: bool) -> bool:
    """Write the page; return False after an error such as a full disk, which may be temporary."""
    with contextlib.suppress(Exception):
        run = Run(folder, training)
        if run.facts:
            paths.write_text(folder / FILE, run_page.render([run], reload=run_page.RELOAD_SECONDS))
        return True
    return False


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
