"""Read the segments of a run, one per resume, and the start of the run from its run.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerofit.job import run_folder

TRACKERS = "trackers"  # key in run.json: {tracker: its id of the run}

FACTS = ("started", "typed", "command", "world_size", "device")  # keys in run.json that differ between segments


def carried_over(folder: Path, resumed_at: int) -> dict[str, Any]:
    """Return the facts that the run.json of a resumed run takes over from the previous one.

    Args: resumed_at: the step of the checkpoint; 0: the run starts again and keeps only the ids of its trackers.
    """
    previous = run_folder.read_json(folder / "run.json")
    ids = {TRACKERS: previous[TRACKERS]} if TRACKERS in previous else {}
    if not previous or not resumed_at:
        return ids
    earlier = [segment for segment in _recorded(previous) if segment.get("from_step", 0) < resumed_at]
    for segment in earlier[-1:]:
        segment["to_step"] = min(segment.get("to_step", resumed_at), resumed_at)
    first_step = earlier[-1]["to_step"] if earlier else 0
    arguments = previous.get("arguments", {})
    last = {name: previous.get(name) for name in FACTS} | {"from_step": first_step, "to_step": resumed_at}
    last |= {name: arguments.get(name, {}).get("value") for name in ("zero", "offload")}
    if first_step < resumed_at:
        earlier.append(last)
    return ids | {"stretches": earlier} | ({"before": previous["before"]} if "before" in previous else {})


def first_start(folder: Path) -> dict[str, Any]:
    """Return {"score", "samples"} before the run's first step; {} if they are missing or invalid."""
    entry: Any = run_folder.read_json(folder / "run.json").get("before")
    try:
        score = None if entry["score"] is None else float(entry["score"])
        samples = [{"prompt": str(item["prompt"]), "answer": str(item["answer"])} for item in entry["samples"]]
    except (TypeError, KeyError, ValueError):
        return {}
    return {"score": score, "samples": samples}


def all_segments(facts: Mapping[str, Any]) -> list[dict]:
    """Return the segments of a run from its run.json, ending with the current one."""
    now = {name: facts.get(name) for name in FACTS}
    now |= {name: facts.get("arguments", {}).get(name, {}).get("value") for name in ("zero", "offload")}
    earlier = _recorded(facts)
    return [*earlier, now | {"from_step": earlier[-1].get("to_step", 0) if earlier else 0}]


def _recorded(facts: Mapping[str, Any]) -> list[dict]:
    segments = facts.get("stretches")
    return [segment for segment in segments if isinstance(segment, dict)] if isinstance(segments, list) else []


def previous_seconds(facts: Mapping[str, Any]) -> float:
    """Return the training time before the current segment in seconds, if the checkpoints record it."""
    resumed = facts.get("resumed") or [{}]
    seconds = resumed[-1].get("train_seconds") if isinstance(resumed[-1], dict) else None
    return float(seconds) if isinstance(seconds, int | float) else 0.0
