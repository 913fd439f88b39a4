"""Report how far plans of similar jobs were from published speeds."""

import functools
import json
from pathlib import Path

from zerofit.base.hardware import Gpu
from zerofit.plan.formulas import Shape
from zerofit.plan.speed import rates

FILE = Path(__file__).with_name("accuracy.json")  # written by benchmarks/published_speeds.py --write
MIN_RUNS = 3  # with fewer runs on a GPU, the runs on all GPUs are reported
PROGRAMS = "FSDP and Hugging Face trainers"  # programs with fused kernels are faster (docs/speed.md)
KINDS = ("full fine-tuning", "adapters", "adapters on a packed base", "mixtures of experts")


def job_kind(shape: Shape) -> str:
    """Return the kind of a job, one of KINDS."""
    products = shape.work.products if shape.work else ()
    if shape.experts or any(p.experts for p in products):
        return KINDS[3]
    if not shape.frozen:
        return KINDS[0]
    return KINDS[2] if any(p.bits < 16 for p in products) else KINDS[1]


def chip_name(name: str | None) -> str:
    """Return the name of a GPU without its memory and slot: "a100"."""
    return (name or "").partition("-")[0]


@functools.cache
def points() -> list[dict]:
    """Return the published speeds of FSDP and Hugging Face trainers: [{"chip", "kind", "error"}]."""
    return json.loads(FILE.read_text(encoding="utf-8"))["points"]


def error_range(gpu: Gpu, shape: Shape) -> str:
    """Return the range of the plan's errors at similar published runs, and whether they were on this GPU."""
    chip, kind = chip_name(rates.gpu_name(gpu)), job_kind(shape)
    of_kind = [p for p in points() if p["kind"] == kind]
    alike = [p for p in of_kind if p["chip"] == chip]
    if len(alike) >= MIN_RUNS:
        return f"{_range(alike)} at {len(alike)} published runs of {PROGRAMS}: {kind} on {chip.upper()}"
    number = "few" if any(p["chip"] == chip for p in points()) else "no"
    others = f"{_range(of_kind)} at {len(of_kind)} runs of {kind} by {PROGRAMS} on any"
    return f"{number} similar published runs on this GPU; {others}"


def _range(runs: list[dict]) -> str:
    errors = [p["error"] for p in runs]
    return f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f} %"
