"""Record predicted and measured peaks of finished runs on this node, and learn an allowance from them."""

import json
import math
import platform
import time
from importlib import metadata
from pathlib import Path

from zerofit.base.hardware import GIB
from zerofit.base.paths import cache_root

LEARNED_RUNS = 50  # the latest runs, from which a plan learns

LEARNED_AT_MOST = 0.1  # fraction of the GPU's memory


def history() -> Path:
    """Return the file of predicted and measured peaks of finished runs on this node."""
    return cache_root() / "history.jsonl"


def learned_from() -> str:
    return f"earlier runs on this GPU were above their plan ({history()})"


_published: dict = {}  # the prediction by the check before this job, which its launcher or this process has made


def publish(plan: dict | None) -> None:
    """Make a prediction the one of this process's job; None: there is none."""
    _published.clear()
    _published.update(plan or {})


def published() -> dict:
    """Return the prediction of this process's job; {}: there is none."""
    return dict(_published)


def remember(predicted: dict, measured_bytes: int, folder: Path) -> None:
    """Write predicted and measured peak to plan.json, and append them to the local history."""
    from zerofit.job import run_folder

    run_folder.write_json(folder / "plan.json", predicted | {"measured": learn(predicted, measured_bytes)})


def learn(predicted: dict, measured_bytes: int) -> dict:
    entry = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"), "gpu": predicted["gpu"], "predicted_bytes": predicted["peak_bytes"],
        "measured_bytes": measured_bytes, "ratio": round(measured_bytes / predicted["peak_bytes"], 4),
        "versions": {p: metadata.version(p) for p in ("torch", "transformers", "deepspeed")},
        "python": platform.python_version(),
    }  # fmt: skip
    try:
        history().parent.mkdir(parents=True, exist_ok=True)
        with history().open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    except OSError as error:  # the run itself has finished
        print(f"note: {history()}: the measured peak is not kept: {error.strerror}", flush=True)
    return entry


def learned_allowance(device_name: str, memory_gib: float = math.inf) -> int:
    """Return the bytes by which earlier runs on this kind of GPU with this torch exceeded their plan.

    The 90th percentile of the last 50 runs, at most a tenth of the GPU; 0 without a history.
    """
    try:
        lines = history().read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    excesses = []
    for line in lines:
        try:
            entry = json.loads(line)
            if entry["gpu"] == device_name and entry["versions"]["torch"] == metadata.version("torch"):
                excesses.append(entry["measured_bytes"] - entry["predicted_bytes"])
        except (ValueError, KeyError, TypeError):
            continue
    excesses = sorted(excesses[-LEARNED_RUNS:])
    percentile = excesses[math.ceil(0.9 * len(excesses)) - 1] if excesses else 0
    return int(max(0, min(percentile, LEARNED_AT_MOST * memory_gib * GIB)))
