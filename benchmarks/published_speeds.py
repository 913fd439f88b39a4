"""Compare the time of a step by plan with published tokens a second.

    python benchmarks/published_speeds.py    # write results/published-speeds.md and published-speeds.json

published/job_speeds.csv has runs with the flags of `zerofit plan` that stand for them, published/multi_node.csv runs of
FSDP by the dimensions of their models. Half of the runs, chosen by a hash of their names alone (`half`), may be looked
at when a rate of the time model is set; the other half is for the check. Several runs of one table differ in the number
of GPUs alone and may be in both halves.
"""

import csv
import hashlib
from pathlib import Path

DATA = Path(__file__).resolve().parent / "published"


def jobs() -> list[dict]:
    """Return the runs that have flags."""
    return _rows("job_speeds.csv")


def shapes() -> list[dict]:
    """Return the runs that have dimensions, each with a name."""
    named = ("model", "gpu", "gpus", "length", "micro", "checkpointing")
    return [{"id": "-".join(row[name].replace(" ", "") for name in named), **row} for row in _rows("multi_node.csv")]


def half(name: str) -> str:
    """Return "fit" for a run at which the rates may be set, "check" for one that is held back."""
    return "fit" if hashlib.sha256(name.encode()).digest()[0] % 2 else "check"


def _rows(file: str) -> list[dict]:
    with (DATA / file).open(newline="") as opened:
        return list(csv.DictReader(opened))


if __name__ == "__main__":
    for run in [*jobs(), *shapes()]:
        print(half(run["id"]), run["id"])
