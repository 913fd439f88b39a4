"""Show a plan's search while it runs: the answer by formula, then a line for each simulated setting."""

import shutil
import sys
import threading
import time

from zerofit.base.hardware import GIB
from zerofit.plan import gpu_memory, planner
from zerofit.plan.candidate import Candidate, Plan

SILENCE = 20.0  # seconds after which a log, which is no terminal, gets a line on what is simulated; then twice that ...


class Shown(planner.Progress):
    """Prints the search. A terminal shows what stays, and below it one line that changes; a log gets plain lines.

    Args: lines: what is printed is added to it. Attributes: answer, the first one, None before it and without one.
    """

    def __init__(self, lines: list[str]):
        super().__init__(self._say)
        self.lines, self.answer, self.live = lines, None, sys.stdout.isatty()
        self._now, self._since, self._due = "", time.monotonic(), time.monotonic() + SILENCE
        self._lock, self._end = threading.Lock(), threading.Event()

    def __enter__(self) -> "Shown":
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
        self._say(first_answer(candidate, plan), stays=True)

    def _say(self, text: str, stays: bool = False) -> None:
        self.lines.append(text)
        with self._lock:
            self._now, self._due = "", time.monotonic() + SILENCE
            if stays and self.live:
                print(f"\r\033[K{text}", flush=True)
            elif self.live:
                self._line(text)
            else:
                print(text, flush=True)

    def _tick(self) -> None:
        while not self._end.wait(1.0):
            self._show()

    def _show(self) -> None:
        """Show what is simulated and for how long; in a log only after SILENCE."""
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
    """Return the answer by formula as a line that says what follows, where a simulation decides."""
    if candidate is None:
        return "by formula none of these settings fits; the simulation, which decides, follows"
    size = f"about {candidate.peak / GIB:.1f} of {plan.limit / GIB:.1f} GiB"
    margin = f"{gpu_memory.margin(candidate.setting.zero).high - 1:.0%}"
    return f"by formula, with a margin of {margin}: {candidate.label}, {size}; a simulation of what is near follows"


def compared(first: Candidate | None, plan: Plan) -> str:
    """Return how the answer by simulation differs from that by formula; "" without a simulation."""
    decided = plan.chosen or plan.nearest
    if decided is None or decided.answer is None or (first is None and plan.chosen is None):
        return ""
    if first is None:
        return "by simulation: a setting fits after all"
    if plan.chosen is first:
        return "by simulation: the same setting"
    why = next((why for candidate, why in plan.rejected if candidate is first), "")
    reason = f"that by formula does not fit: {why}" if why else "it is faster than that by formula"
    return f"by simulation: {'another setting' if plan.chosen else 'nothing fits'}; {reason}"
