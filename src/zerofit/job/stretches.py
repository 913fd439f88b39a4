"""What a run folder keeps of a run's stretches before a resume: the command of each, and how the run began."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerofit.job import run_folder

TRACKERS = "trackers"  # of run.json: {tracker: the id that it has of the run}

FACTS = ("started", "typed", "command", "world_size", "device")  # of run.json, that each stretch has its own of


def kept(folder: Path, resumed_at: int) -> dict[str, Any]:
    """Return what the run.json of a run that goes on takes over from the one before.

    Args: resumed_at: the step of the checkpoint; 0: the run begins again, and keeps the ids of its trackers alone.
    """
    before = run_folder.read_json(folder / "run.json")
    ids = {TRACKERS: before[TRACKERS]} if TRACKERS in before else {}
    if not before or not resumed_at:
        return ids
    earlier = [stretch for stretch in _listed(before) if stretch.get("from_step", 0) < resumed_at]
    for stretch in earlier[-1:]:
        stretch["to_step"] = min(stretch.get("to_step", resumed_at), resumed_at)
    begun = earlier[-1]["to_step"] if earlier else 0
    arguments = before.get("arguments", {})
    last = {name: before.get(name) for name in FACTS} | {"from_step": begun, "to_step": resumed_at}
    last |= {name: arguments.get(name, {}).get("value") for name in ("zero", "offload")}
    if begun < resumed_at:
        earlier.append(last)
    return ids | {"stretches": earlier} | ({"before": before["before"]} if "before" in before else {})


def beginning(folder: Path) -> dict[str, Any]:
    """Return {"score", "samples"} of the run's first start; {} where its run.json does not have them so."""
    found: Any = run_folder.read_json(folder / "run.json").get("before")
    try:
        score = None if found["score"] is None else float(found["score"])
        samples = [{"prompt": str(one["prompt"]), "answer": str(one["answer"])} for one in found["samples"]]
    except (TypeError, KeyError, ValueError):
        return {}
    return {"score": score, "samples": samples}


def of_run(facts: Mapping[str, Any]) -> list[dict]:
    """Return the stretches of a run, the present one last, from its run.json."""
    now = {name: facts.get(name) for name in FACTS}
    now |= {name: facts.get("arguments", {}).get(name, {}).get("value") for name in ("zero", "offload")}
    earlier = _listed(facts)
    return [*earlier, now | {"from_step": earlier[-1].get("to_step", 0) if earlier else 0}]


def _listed(facts: Mapping[str, Any]) -> list[dict]:
    found = facts.get("stretches")
    return [stretch for stretch in found if isinstance(stretch, dict)] if isinstance(found, list) else []


def seconds_before(facts: Mapping[str, Any]) -> float:
    """Return the seconds that were trained before the present stretch, as far as the checkpoints say them."""
    resumed = facts.get("resumed") or [{}]
    seconds = resumed[-1].get("train_seconds") if isinstance(resumed[-1], dict) else None
    return float(seconds) if isinstance(seconds, int | float) else 0.0
