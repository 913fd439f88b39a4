"""Archive an ended attempt before the next one starts."""

import itertools
import shutil
from pathlib import Path

from zerofit.checkpoint.facts import STAGING
from zerofit.checkpoint.integrity import latest_valid_checkpoint
from zerofit.job import job
from zerofit.job.run_folder import checkpoints, keep_metrics


def archive_attempt(folder: Path, records: Path) -> Path | None:
    """Archive the last attempt; return the latest valid checkpoint or None.

    With a checkpoint, run.json, job.json, metrics.jsonl (up to its step) and deepspeed.json stay. Later checkpoints
    cannot be resumed and are archived too.
    """
    checkpoint, archive = latest_valid_checkpoint(folder, hashes=False), archive_records(folder, records)
    shutil.rmtree(folder / STAGING, ignore_errors=True)
    step = int(checkpoint.name.split("-")[1]) if checkpoint else -1
    for saved_step, file in checkpoints(folder).items():
        if saved_step > step:
            shutil.move(file, archive / file.name)
    continued = ("run.json", job.FILE, "metrics.jsonl", "deepspeed.json")
    kept = () if checkpoint is None else continued
    for name in (*continued, "result.json", "error.txt", "logs", "plan.json"):
        if (folder / name).exists():  # the next attempt appends to the files in `kept`
            (shutil.copy if name in kept else shutil.move)(folder / name, archive / name)
    if checkpoint is not None:
        keep_metrics(folder, step)
    return checkpoint


def archive_records(folder: Path, records: Path) -> Path:
    """Move an attempt's records to a new folder attempts/<n>; return it.

    Numbers continue when a run is resumed.
    """
    numbers = (folder / "attempts" / str(number) for number in itertools.count(1))
    archive = next(name for name in numbers if not name.exists())
    archive.mkdir(parents=True)
    for file in records.iterdir():
        shutil.move(file, archive / file.name)
    return archive
