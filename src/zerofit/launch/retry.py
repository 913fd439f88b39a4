"""Prepare the next attempt: what of the run folder is kept, and the setting that needs less memory."""

import itertools
import shutil
from pathlib import Path

from zerofit.errors import UserError
from zerofit.run_folder import checkpoints, keep_metrics
from zerofit.train.checkpoint.facts import ASIDE
from zerofit.train.checkpoint.integrity import latest_valid_checkpoint


def archive_attempt(folder: Path, number: int, records: Path) -> Path | None:
    """Move what attempt `number` left in the run folder to attempts/<number>, and return the checkpoint to go on from.

    With a checkpoint, metrics.jsonl keeps the lines up to its step; what is not whole goes aside too.
    """
    checkpoint, aside = latest_valid_checkpoint(folder), folder / "attempts" / str(number)
    aside.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / ASIDE, ignore_errors=True)
    for file in records.iterdir():
        shutil.move(file, aside / file.name)
    step = int(checkpoint.name.split("-")[1]) if checkpoint else -1
    for later, file in checkpoints(folder).items():
        if later > step:
            shutil.move(file, aside / file.name)
    kept = () if checkpoint is None else ("run.json", "metrics.jsonl", "deepspeed.json")
    for name in ("run.json", "metrics.jsonl", "deepspeed.json", "result.json", "error.txt", "logs", "plan.json"):
        if (folder / name).exists():
            (shutil.copy if name in kept else shutil.move)(folder / name, aside / name)
    if checkpoint is not None:
        keep_metrics(folder, step)
    return checkpoint


def move_newer(folder: Path, step: int) -> Path | None:
    """Move the run folder's checkpoints after `step` to attempts/, and return where; None: there are none.

    The run that goes on from `step` saves those steps anew, and rotation would delete its checkpoints before theirs.
    """
    newer = [checkpoint for later, checkpoint in checkpoints(folder).items() if later > step]
    if not newer:
        return None
    names = (f"before-resume-at-{step}{f'-{i}' if i else ''}" for i in itertools.count())
    aside = next(folder / "attempts" / name for name in names if not (folder / "attempts" / name).exists())
    aside.mkdir(parents=True)
    for checkpoint in newer:
        shutil.move(checkpoint, aside / checkpoint.name)
    return aside


def next_smaller_setting(settings, flags: list[str], parse):
    """(what changes, the command line, its Settings) of the next setting with the same effective batch that needs less GPU memory;
    None: there is none.

    The micro batch is halved first, then layers are checkpointed, then the stage goes up, then the optimizer, then
    everything goes to host memory; a checkpoint goes on at all of them.
    Args: parse: flags, ranks -> Settings, which refuses what does not go together.
    """
    from zerofit import command_line

    own = command_line.drop(flags, "--per_device_train_batch_size", "--gradient_accumulation_steps", "--effective_batch_size",
                     "--search_batch_size")  # fmt: skip
    micro, whole = settings.per_device_train_batch_size, settings.effective_batch_size
    kept = [*own, "--effective_batch_size", str(whole), "--per_device_train_batch_size"]
    tries = []
    per_rank = whole // settings.world_size
    half = max((n for n in range(1, micro // 2 + 1) if per_rank % n == 0), default=None)
    if half:
        tries.append((f"micro batch {half} instead of {micro}", [*kept, str(half)]))
    kept = [*kept, str(micro)]
    if not settings.gradient_checkpointing or settings.gradient_checkpointing_every > 1:
        bare = command_line.drop(kept, "--gradient_checkpointing", "--gradient_checkpointing_every")
        tries.append(("gradient checkpointing of every layer", [*bare, "--gradient_checkpointing", "true"]))
    bare = command_line.drop(kept, "--zero", "--offload")
    stages = [] if settings.world_size == 1 else [z for z in (2, 3) if z > int(settings.zero)]
    tries += [(f"ZeRO-{z}", [*bare, "--zero", str(z), "--offload", settings.offload]) for z in stages]
    for offload in {"none": ["optimizer", "all"], "optimizer": ["all"]}.get(settings.offload, []):
        zero = {"optimizer": max("2", settings.zero), "all": "3"}[offload]
        tries.append((f"offload {offload}", [*bare, "--zero", zero, "--offload", offload]))
    for what, words in tries:
        try:
            return what, words, parse(words, settings.world_size)
        except UserError:
            continue
    return None


BATCH = ("--effective_batch_size", "--per_device_train_batch_size", "--gradient_accumulation_steps")


def same_batch(whole: int, micro: int, ranks: int) -> list[str]:
    """Flags for a run's effective batch on another number of ranks; the micro batch stays or becomes smaller.

    Args: whole: the effective batch; micro: per_device_train_batch_size that it had.

    Raises: UserError where the batch cannot be dealt out evenly.
    """
    if whole % ranks:
        raise UserError(
            f"--gpus {ranks}: the run's effective batch of {whole} is no multiple of it, and its steps must stay the same; "
            f"use {', '.join(str(n) for n in range(1, whole + 1) if whole % n == 0 and n <= 64)} processes."
        )
    share = whole // ranks
    micro = max(n for n in range(1, min(micro, share) + 1) if share % n == 0)
    return ["--effective_batch_size", str(whole), "--per_device_train_batch_size", str(micro)]
