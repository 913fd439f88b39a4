"""Show the progress of a plan's search: the result by formula, then a line per simulated setting."""

import shutil
import sys
import threading
import time

from zerofit.base.hardware import GIB
from zerofit.plan import gpu_memory, planner, search
from zerofit.plan.candidate import Candidate, Plan

SILENCE = 20.0  # seconds until the first progress line in a log (not a terminal); the interval then doubles


class SearchProgress(planner.Progress):
    """Print the progress: a changing last line in a terminal, plain lines in a log.

    Args: lines: collects the printed lines. Attributes: answer: the result by formula, None if unknown.
    """

    def __init__(self, lines: list[str]):
        super().__init__(self._print)
        self.lines, self.answer, self.live = lines, None, sys.stdout.isatty()
        self._now, self._since, self._due = "", time.monotonic(), time.monotonic() + SILENCE
        self._lock, self._end = threading.Lock(), threading.Event()

    def __enter__(self) -> "SearchProgress":
        threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self._end.set()
        with self._lock:
            self._now = ""
            if self.live:
                print("\r\033[K", end="", flush=True)

    def note(self, text: str) -> None:
        self.lines.append(text)

    def now(self, text: str) -> None:
        with self._lock:
            self._now, self._since = text, time.monotonic()
        self._show()

    def first(self, candidate: Candidate | None, plan: Plan) -> None:
        self.answer = candidate
        self._print(first_answer(candidate, plan), keep=True)

    def _print(self, text: str, keep: bool = False) -> None:
        self.lines.append(text)
        with self._lock:
            self._now, self._due = "", time.monotonic() + SILENCE
            if keep and self.live:
                print(f"\r\033[K{text}", flush=True)
            elif self.live:
                self._line(text)
            else:
                print(text, flush=True)

    def _tick(self) -> None:
        while not self._end.wait(1.0):
            self._show()

    def _show(self) -> None:
        """Print the current simulation and its duration; in a log only after SILENCE."""
        with self._lock:
            seconds = time.monotonic() - self._since
            if not self._now or self._end.is_set():
                return
            if self.live:
                self._line(f"  {self._now} ({seconds:.0f} s)")
            elif time.monotonic() >= self._due:
                self._due = time.monotonic() + max(SILENCE, seconds)
                print(f"  still {self._now} ({seconds:.0f} s)", flush=True)

    def _line(self, text: str) -> None:
        print(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)


def first_answer(candidate: Candidate | None, plan: Plan) -> str:
    """Return the result by formula as a line that announces the simulation."""
    if candidate is None:
        return "by formula, none of these settings fits; checking by simulation"
    size = f"about {candidate.peak / GIB:.1f} of {plan.limit / GIB:.1f} GiB"
    margin = f"{gpu_memory.margin(candidate.setting.zero).high - 1:.0%}"
    return f"by formula, with a margin of {margin}: {candidate.label}, {size}; checking similar settings by simulation"


def compared(first: Candidate | None, plan: Plan) -> str:
    """Compare the results by simulation and by formula; return "" without a simulation."""
    decided = plan.chosen or plan.nearest
    if decided is None or decided.answer is None or (first is None and plan.chosen is None):
        return ""
    if first is None:
        return "by simulation: a setting fits"
    if plan.chosen is first:
        return "by simulation: the same setting"
    reason = "it is faster than the setting by formula"
    if not search.fits(first, plan):
        reason = f"the setting by formula does not fit: {planner.why_not(first, plan)}"
    return f"by simulation: {'another setting' if plan.chosen else 'nothing fits'}; {reason}"
