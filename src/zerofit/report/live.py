"""Write report.html again and again while a run trains, in a process of its own.

No rank waits for it: the process that supervises the ranks starts it, or rank 0 where nobody supervises. It has a low
priority, draws only when the run has written something, and ends with the one that has started it.
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

OFF = "ZEROFIT_PAGE"  # environment variable; 0: the page is written at the end only

EVERY_SECONDS = 10.0  # between two pages, at least

IDLE_SHARE = 20  # times the seconds that the last page took: a slow disk or machine gets fewer pages

NICE = 10  # on a machine whose cores all train, 19 would leave it a hundredth of one: minutes for a page

LOOK_SECONDS = 1.0  # between looks at the run folder

WATCHED = ("run.json", "metrics.jsonl", "result.json", "report.json", "memory.json", "next.json")


class Page:
    """The process that writes the page of a run folder; none where it could not be started or is turned off."""

    def __init__(self, folder: Path):
        self._process = None
        if os.environ.get(OFF) == "0":
            return
        command = [sys.executable, "-P", "-m", "zerofit.report.live", str(folder.absolute()), str(os.getpid())]
        alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with contextlib.suppress(OSError):  # no memory for one more process: the run goes on without
            self._process = subprocess.Popen(
                command, env=os.environ | alone, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            print(f"page: {folder / FILE}, written again while the run trains", flush=True)

    def stop(self) -> None:
        """End the process; whoever calls this writes the last page."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def main(folder: Path, parent: int) -> None:
    """Write the page whenever the run has written something, until the parent process has ended; then once more."""
    os.nice(NICE)
    before, due = None, time.monotonic() + EVERY_SECONDS
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
        if time.monotonic() >= due and (now := _written(folder)) != before:
            began = time.monotonic()
            before = now if _write(folder, training=True) else before
            took = time.monotonic() - began
            due = time.monotonic() + max(EVERY_SECONDS, IDLE_SHARE * took)
    if before is not None or (folder / "result.json").exists():
        _write(folder, training=False)


def _written(folder: Path) -> list[tuple[int, int] | None]:
    """Return time and size of the files that the page is made from; None for one that is missing."""
    stamps = []
    for name in WATCHED:
        try:
            about = (folder / name).stat()
            stamps.append((about.st_mtime_ns, about.st_size))
        except OSError:
            stamps.append(None)
    return stamps


def _write(folder: Path, training: bool) -> bool:
    """Write the page and return whether it is; what hinders it (a full disk, a lost file) may be gone the next time."""
    with contextlib.suppress(Exception):
        run = Run(folder, training)
        if run.facts:
            paths.write_text(folder / FILE, run_page.of([run], reload=run_page.RELOAD_SECONDS))
        return True
    return False


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
