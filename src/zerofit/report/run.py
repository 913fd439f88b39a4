"""Read a run folder for its page and terminal view, also while the run trains."""

import contextlib
import json
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

from zerofit.base.errors import UserError
from zerofit.job import memory_figure, run_folder, run_lock, run_segments

FILE = "report.html"  # the page, in the run folder

OTHER_MEMORY = "other"  # memory without a breakdown


@dataclass
class Run:
    """The contents of a run folder. Missing or damaged files are empty."""

    folder: Path
    training: bool = False  # if so, ignore the result of an earlier start

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def facts(self) -> dict:
        return run_folder.read_record(self.folder / "run.json")

    @cached_property
    def result(self) -> dict:
        return {} if self.training else run_folder.read_record(self.folder / "result.json")

    @cached_property
    def failure(self) -> dict:
        return run_folder.read_record(self.folder / "report.json")

    @cached_property
    def metrics(self) -> list[dict]:
        return run_folder.read_metrics(self.folder)

    @property
    def finished(self) -> bool:
        return self.result.get("status") == "finished"

    @property
    def status(self) -> str:
        if self.training:
            return "training"
        return "finished" if self.finished else self.result.get("status") or "not finished"

    def points(self, metric: str) -> list[tuple[float, float]]:
        return [(entry["step"], entry[metric]) for entry in self.metrics if entry.get(metric) is not None]

    def last(self, metric: str) -> float | None:
        return next((value for _, value in reversed(self.points(metric))), None)

    def argument(self, name: str) -> tuple[str, str]:
        """Return (value, source) of an argument as text."""
        entry = self.facts.get("arguments", {}).get(name, {})
        return as_text(entry.get("value")), entry.get("source") or ""

    def arguments(self) -> dict[str, tuple[str, str]]:
        """Return {argument: (value, source)} without transformers' defaults."""
        entries = {name: self.argument(name) for name in self.facts.get("arguments", {})}
        return {name: entry for name, entry in entries.items() if entry[1] != "transformers default"}


def open_run(name: str) -> Run:
    """Return the run of a folder. Raises: UserError for a folder without a run."""
    folder = Path(name).expanduser()
    run = Run(folder, training=run_lock.is_held(folder) and not run_folder.finished(folder))
    if not run.facts:
        raise UserError(f"{run.folder}: not a run folder (run.json is missing or damaged); use a folder of runs/.")
    return run


def position(run: Run) -> tuple[int, int | None]:
    """Return (last logged step, total steps or None if unknown)."""
    return int(run.last("step") or 0), run.facts.get("total_steps") or (run.facts.get("plan") or {}).get("steps")


def seconds_left(run: Run) -> float | None:
    """Estimate the remaining seconds from the mean throughput since the last (re)start; None if unknown."""
    step, total = position(run)
    begun = run_segments.all_segments(run.facts)[-1]["from_step"]
    with contextlib.suppress(ValueError, OSError):
        started = datetime.strptime(run.facts.get("started", ""), "%Y-%m-%dT%H:%M:%S%z").timestamp()
        passed = (run.folder / run_folder.METRICS).stat().st_mtime - started
        if total and step > begun and passed > 0:
            return passed / (step - begun) * max(0, total - step)
    return None


def planned_speed(run: Run) -> float | None:
    """Return the tokens per second that the plan estimated, or None."""
    return (run.facts.get("plan") or {}).get("tokens_per_second")


def measured_memory(run: Run) -> tuple[str, dict[str, float]]:
    """Return (phase, bytes by part) from --memory_report, or else from the log."""
    peaks = run_folder.read_record(run.folder / "memory.json").get("peak", {})
    if peaks:
        return highest(peaks)
    parts = dict(run.facts.get("owners") or {})
    peak = run.result.get("peak_memory_bytes") or run.last("peak_memory_bytes")
    if peak and run.facts.get("device") != "cpu":  # on a CPU, the peak includes libraries
        parts[OTHER_MEMORY] = max(0, peak - sum(parts.values()))
    return "measured", parts


def highest(peaks: dict[str, dict[str, float]]) -> tuple[str, dict[str, float]]:
    """Return the phase with the highest peak and its parts, or ("", {})."""
    phase = max(peaks, key=lambda name: sum(peaks[name].values()), default="")
    return phase, peaks.get(phase, {})


def memory_rows(run: Run) -> list[list[str]]:
    """Return a table of planned and measured memory by part at the highest phase. The first row is the head."""
    phase, planned = highest((run.facts.get("plan") or {}).get("peak") or {})
    where, measured = measured_memory(run)
    if planned and OTHER_MEMORY in measured:  # sum the plan's parts in the same way
        other = sum(planned.values()) - sum(planned.get(part, 0) for part in measured)
        planned = {part: planned.get(part, 0) for part in measured} | {OTHER_MEMORY: other}
    columns = {f"planned, {phase}": planned, where if where == "measured" else f"measured, {where}": measured}
    columns = {head: parts for head, parts in columns.items() if parts}
    present = {part for parts in columns.values() for part in parts}
    order = [part for part in (*memory_figure.COLORS, OTHER_MEMORY) if part in present]
    order += sorted(present.difference(order))
    rows = [[part, *(_size_of(parts, part) for parts in columns.values())] for part in order]
    if {OTHER_MEMORY, "activations"} & measured.keys() or not measured:  # otherwise the parts are incomplete
        rows.append(["total", *(memory_figure.size(sum(parts.values())) for parts in columns.values())])
    return [["", *columns], *rows] if columns else []


def _size_of(parts: dict[str, float], part: str) -> str:
    return memory_figure.size(parts[part]) if part in parts else ""


def failures(run: Run) -> list[str]:
    """Return sentences about failures and their fixes, except for the final failure."""
    lines = []
    attempts = [attempt for attempt in run.failure.get("attempts", []) if attempt.get("kind") != "finished"]
    for number, attempt in enumerate(attempts, 1):
        failure = f"{attempt.get('kind') or 'ended'}: {attempt.get('sentence') or attempt.get('error') or ''}"
        if fix := attempt.get("what_next"):
            lines.append(f"Attempt {number}: {failure} → {fix}")
        elif run.training:
            lines.append(f"An earlier start: {failure} → resumed")
    lines += [f"Slow: {sentence}" for sentence in run.facts.get("slow_ranks", [])]
    steps = [*run_folder.by_step(run.folder / "nan", "step")]
    if steps:
        lines.append(f"NaN or infinity, saved in nan/: step {', '.join(map(str, steps))}")
    return lines


def as_text(value) -> str:
    """Format the value of an argument as on a command line."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 10.0 in a YAML file equals 10 on a command line
    return ", ".join(map(str, value)) if isinstance(value, list) else json.dumps(value)


def duration(seconds: float) -> str:
    """Format seconds as hours and minutes, minutes and seconds, or seconds."""
    hours, rest = divmod(int(seconds), 3600)
    if hours:
        return f"{hours} h {rest // 60} min"
    return f"{rest // 60} min {rest % 60} s" if rest >= 60 else f"{seconds:.1f} s"
