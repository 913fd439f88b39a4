"""Prepare the next attempt: archive the failed one, choose a setting that needs less memory."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

from zerofit.base.errors import UserError
from zerofit.checkpoint.facts import ASIDE
from zerofit.checkpoint.integrity import latest_valid_checkpoint
from zerofit.job import groups, job
from zerofit.job.request import Request
from zerofit.job.run_folder import checkpoints, keep_metrics
from zerofit.job.settings import Settings
from zerofit.model import gradient_checkpointing

EVALUATION = "eval"  # phase of errors.OutOfMemory


def archive_attempt(folder: Path, records: Path) -> Path | None:
    """Archive the attempt that has ended; return the latest valid checkpoint or None.

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

    n counts on over the jobs of a run folder: a resumed job has a first attempt too.
    """
    numbers = (folder / "attempts" / str(number) for number in itertools.count(1))
    archive = next(name for name in numbers if not name.exists())
    archive.mkdir(parents=True)
    for file in records.iterdir():
        shutil.move(file, archive / file.name)
    return archive


def move_newer(folder: Path, step: int) -> Path | None:
    """Move checkpoints later than `step` to attempts/; return that folder, or None if there are none.

    A run resumed at `step` saves those steps again, and rotation would delete its checkpoints before the old ones.
    """
    newer = [checkpoint for saved_step, checkpoint in checkpoints(folder).items() if saved_step > step]
    if not newer:
        return None
    names = (f"before-resume-at-{step}{f'-{i}' if i else ''}" for i in itertools.count())
    archive = next(folder / "attempts" / name for name in names if not (folder / "attempts" / name).exists())
    archive.mkdir(parents=True)
    for checkpoint in newer:
        shutil.move(checkpoint, archive / checkpoint.name)
    return archive


def next_smaller_setting(settings: Settings, resolve: Callable[[Request, int], Settings], phase: str = ""):
    """Return the next setting with the same effective batch that needs less GPU memory.

    In this order: smaller micro batch (about half), gradient checkpointing of every layer (before it, where a plan has
    chosen less), higher ZeRO stage, optimizer offload, offload of everything. A checkpoint can be resumed at each.
    Evaluation takes neither of the first two: it gets a smaller batch of its own, which changes none of its numbers.

    Args: resolve: (request, ranks) -> Settings; raises UserError for arguments that exclude each other, which are then
        skipped; phase: of errors.OutOfMemory.
    Returns: (change in words, its Settings), or None.
    """
    micro, effective_batch = settings.per_device_train_batch_size, settings.effective_batch_size
    kept = settings.request.drop("gradient_accumulation_steps", "search_batch_size")
    kept = kept.put(effective_batch_size=effective_batch, per_device_train_batch_size=micro)
    tries = _smaller_evaluation(settings, kept) if phase == EVALUATION else _smaller_steps(settings, kept)
    stages = [] if settings.world_size == 1 else [z for z in (2, 3) if z > settings.zero]
    tries += [(f"ZeRO-{z}", kept.put(zero=z, offload=settings.offload)) for z in stages]
    for offload in {"none": ["optimizer", "all"], "optimizer": ["all"]}.get(settings.offload, []):
        zero = {"optimizer": max(2, settings.zero), "all": 3}[offload]
        tries.append((f"offload {offload}", kept.put(zero=zero, offload=offload)))
    for change, candidate in tries:
        try:
            return change, resolve(candidate, settings.world_size)
        except UserError:
            continue
    return None


def _smaller_evaluation(settings: Settings, kept: Request) -> list[tuple[str, Request]]:
    """Return the change that makes evaluation smaller, as (words, request)."""
    rows = settings.per_device_eval_batch_size
    if rows == 1:
        return []
    words = f"evaluation batch {rows // 2} instead of {rows}"
    return [(words, kept.put(per_device_eval_batch_size=rows // 2))]


def _smaller_steps(settings: Settings, kept: Request) -> list[tuple[str, Request]]:
    """Return the changes that make a training step's activations smaller, as (words, request)."""
    micro, tries = settings.per_device_train_batch_size, []
    per_rank = settings.effective_batch_size // settings.data_ranks
    half = max((n for n in range(1, micro // 2 + 1) if per_rank % n == 0), default=None)
    if half:
        smaller = {"per_device_train_batch_size": half}
        if "per_device_eval_batch_size" in settings.given and settings.per_device_eval_batch_size > half:
            smaller["per_device_eval_batch_size"] = half  # not given, it follows the micro batch
        tries.append((f"micro batch {half} instead of {micro}", kept.put(**smaller)))
    selective = settings.gradient_checkpointing_policy == "selective"
    if not settings.gradient_checkpointing or settings.gradient_checkpointing_every > 1 or selective:
        bare = kept.drop("gradient_checkpointing_every", "gradient_checkpointing_policy")
        more = {"gradient_checkpointing_every": 1} if settings.gradient_checkpointing_every > 1 else {}
        more |= {"gradient_checkpointing_policy": "full"} if selective else {}  # over that of a preset
        every_layer = bare.put(gradient_checkpointing=True, **more)
        by_plan = settings.source["gradient_checkpointing"] == gradient_checkpointing.BY_PLAN
        tries.insert(0 if by_plan else len(tries), ("gradient checkpointing of every layer", every_layer))
    return tries


BATCH = ("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")


def same_batch(whole: int, micro: int, ranks: int, ranks_per_row: int = 1) -> dict[str, int]:
    """Return arguments for the same effective batch on another number of ranks; the micro batch never grows.

    Args: whole: the effective batch; micro: the run's per_device_train_batch_size.

    Raises: UserError if `ranks_per_row` does not divide `ranks`, or the data ranks do not divide the effective batch.
    """
    if ranks % ranks_per_row:
        raise UserError(
            f"--gpus {ranks}: is no multiple of the {ranks_per_row} ranks that share each row of this run "
            f"({', '.join(f'--{name}' for name in groups.flags())}); change one of the two."
        )
    ranks //= ranks_per_row
    if whole % ranks:
        raise UserError(
            f"--gpus {ranks * ranks_per_row}: the run's effective batch of {whole} is no multiple of "
            f"{'it' if ranks_per_row == 1 else f'its {ranks} data ranks'}, and its steps must stay the same; use "
            f"{', '.join(str(n * ranks_per_row) for n in range(1, whole + 1) if whole % n == 0 and n <= 64)} processes."
        )
    per_rank = whole // ranks
    micro = max(n for n in range(1, min(micro, per_rank) + 1) if per_rank % n == 0)
    return {"effective_batch_size": whole, "per_device_train_batch_size": micro}
