"""Archive an attempt that has ended before the next one starts."""

import itertools
import shutil
from pathlib import Path

from zerofit.checkpoint.facts import ASIDE
from zerofit.checkpoint.integrity import latest_valid_checkpoint
from zerofit.job import job
from zerofit.job.run_folder import checkpoints, keep_metrics


def archive_attempt(folder: Path, records: Path) -> Path | None:
    """Archive the last attempt; return the latest valid checkpoint, None if there is none.

    With a checkpoint, run.json, job.json, metrics.jsonl (lines up to its step) and deepspeed.json stay. Later
    checkpoints are archived too: they cannot be resumed.
    """
    checkpoint, archive = latest_valid_checkpoint(folder, hashes=False), archive_records(folder, records)
    shutil.rmtree(folder / ASIDE, ignore_errors=True)
    step = int(checkpoint.name.split("-")[1]) if checkpoint else -1
    for saved_step, file in checkpoints(folder).items():
        if saved_step > step:
            shutil.move(file, archive / file.name)
    continued = ("run.json", job.FILE, "metrics.jsonl", "deepspeed.json")
    kept = () if checkpoint is None else continued
    for name in (*continued, "result.json", "error.txt", "logs", "plan.json"):
        if (folder / name).exists():  # the next attempt continues the files in `kept`: copy those
            (shutil.copy if name in kept else shutil.move)(folder / name, archive / name)
    if checkpoint is not None:
        keep_metrics(folder, step)
    return checkpoint


def archive_records(folder: Path, records: Path) -> Path:
    """Move an attempt's records to a new folder attempts/<n>; return it.

    Numbers continue across the jobs of a run folder: a resumed job has a first attempt too.
    """
    numbers = (folder / "attempts" / str(number) for number in itertools.count(1))
    archive = next(name for name in numbers if not name.exists())
    archive.mkdir(parents=True)
    for file in records.iterdir():
        shutil.move(file, archive / file.name)
    return archive
