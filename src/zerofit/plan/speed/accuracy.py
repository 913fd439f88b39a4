"""Say how far plans of a kind of job on a kind of GPU were from published speeds."""

import functools
import json
from pathlib import Path

from zerofit.base.hardware import Gpu
from zerofit.plan.formulas import Shape
from zerofit.plan.speed import rates

FILE = Path(__file__).with_name("accuracy.json")  # written by benchmarks/published_speeds.py --write

FEW = 3  # points below which those of a GPU are not divided by the kind of job

KINDS = ("full fine-tuning", "adapters", "adapters on a packed base", "mixtures of experts")


def kind_of(shape: Shape) -> str:
    """Return the kind of a job, one of KINDS."""
    products = shape.work.products if shape.work else ()
    if shape.experts or any(p.experts for p in products):
        return KINDS[3]
    if not shape.frozen:
        return KINDS[0]
    return KINDS[2] if any(p.bits < 16 for p in products) else KINDS[1]


def chip_of(name: str | None) -> str:
    """Return the name of a GPU of the table without its memory and slot: "a100"."""
    return (name or "").partition("-")[0]


@functools.cache
def points() -> list[dict]:
    """Return the published speeds by which no rate was set: [{"chip", "kind", "error"}]."""
    return json.loads(FILE.read_text(encoding="utf-8"))["points"] if FILE.exists() else []


def band(gpu: Gpu, shape: Shape) -> str:
    """Return the range of the plan's errors at published runs like this one, or that there is none of its GPU."""
    chip, kind = chip_of(rates.name_of(gpu)), kind_of(shape)
    of_chip = [p for p in points() if p["chip"] == chip]
    alike = [p for p in of_chip if p["kind"] == kind]
    if len(alike) >= FEW:
        return f"{_range(alike)} at {len(alike)} published runs: {kind} on {chip.upper()}"
    if len(of_chip) >= FEW:
        return f"{_range(of_chip)} at {len(of_chip)} published runs on {chip.upper()}, few or none of {kind}"
    return f"no published run on this GPU was compared; {_range(points())} at {len(points())} on others"


def _range(found: list[dict]) -> str:
    if not found:
        return "of unknown error"
    errors = [p["error"] for p in found]
    return f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f} %"
