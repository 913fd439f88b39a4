"""Choose the run folder and the checkpoint to resume from; refuse a checkpoint of another job."""

import itertools
import shutil
from pathlib import Path

from zerofit.base import command_line, distributed
from zerofit.base.errors import UserError
from zerofit.checkpoint import differences, integrity, pickles, zero_shards
from zerofit.checkpoint.facts import read_facts, step_of
from zerofit.job import parallel_dims, run_folder
from zerofit.job.settings import Settings
from zerofit.model.load import fingerprints


def check_resumable(settings, train_set) -> None:
    """Compute this run's fingerprints, and compare this run with the checkpoint to resume from.

    Compares model, data, stage, ranks and arguments, and decides whether to reshard the states (reshard.py).
    Raises: UserError for a difference that makes it a different run; with --ignore_resume_mismatch only for differences
        that make resuming impossible.
    """
    settings.fingerprints = fingerprints(settings, train_set)  # computed once: it downloads a hub model's configuration
    requested = settings.resume_from_checkpoint
    if not requested:
        return
    flag = f"--resume_from_checkpoint {requested}"
    known = read_facts(Path(requested)) or _facts_of_files(Path(requested), settings, flag)
    if known["recipe"] != settings.recipe.name:
        raise UserError(f"{flag}: was saved by recipes/{known['recipe']}.py; resume it with that recipe.")
    if known.get("unsaved"):
        raise UserError(
            f"{flag}: was saved with {known['unsaved']}, whose optimizer states DeepSpeed does not save; start a new "
            f"run from its weights with --model (recipes/lora.py: first `zerofit export {requested} --merge`)."
        )
    segment = {"zero": known["zero"], "world_size": known["world_size"], "to_step": step_of(Path(requested))}
    segment |= {name: known[name] for name in ("train_seconds",) if name in known}
    settings.previous_segments = [*known.get("resumed", []), segment]
    _decide_resharding(settings, known, Path(requested).name)
    check_split(settings, known, flag)
    differences.check_json_components(settings, Path(requested), known, flag)
    if settings.resharded:
        zero_shards.check_complete(Path(requested))
        _check_schedule(settings, Path(requested), known, flag)
    differences.check(settings, known, flag)


def check_split(settings, known: dict, where: str) -> None:
    """Refuse to load shards of a split model with a layout other than the saved one.

    Args: known: the checkpoint's facts. Raises: UserError.
    """
    for name in (way.flag for way in parallel_dims.registered() if way.splits_model):
        saved, size = known.get(name, 1), settings.values.get(name, 1)
        if max(saved, size) == 1 or (saved == size and not settings.resharded):
            continue
        raise UserError(
            f"{where}: --{name} can only be resumed with the saved layout; use --{name} {saved} --zero {known['zero']} "
            f"--gpus {known['world_size']} --offload {known['offload']} --optim {known.get('optim', settings.optim)}, "
            "or start a new run from its weights with --model."
        )


def _check_schedule(settings, checkpoint: Path, known: dict, where: str) -> None:
    """Refuse to reshard with a schedule that follows the loss: its state lacks the rates of other groups.

    Raises: UserError.
    """
    file = checkpoint / "scheduler.pt"
    saved = pickles.load(file) if file.exists() else {"base_lrs": []}
    if settings.lr_scheduler_type == "reduce_lr_on_plateau" or "base_lrs" not in saved:
        raise UserError(
            f"{where}: --lr_scheduler_type reduce_lr_on_plateau cannot be resumed with another stage, rank count, "
            f"offload, optimizer or precision; use --zero {known['zero']} "
            f"--gpus {known['world_size']} --offload {known['offload']}."
        )


def _facts_of_files(checkpoint: Path, settings, where: str) -> dict:
    """Infer from the files of another program's checkpoint how it was saved.

    Raises: UserError for an adapter's checkpoint in a run that trains the full model, or vice versa.
    """
    holds_adapter = (checkpoint / "adapter_config.json").exists()
    if holds_adapter != settings.trains_adapter:
        saved, trained = ("an adapter", "the full model") if holds_adapter else ("a full model", "an adapter")
        raise UserError(f"{where}: holds {saved}, but this run trains {trained}; start a new run or change the recipe.")
    facts = {"recipe": settings.recipe.name}
    if not zero_shards.is_deepspeed(checkpoint):
        rng_files = len(list(checkpoint.glob("rng_state_*.pth")))
        return facts | {"zero": "0", "world_size": rng_files or 1, "offload": "none"}
    zero, ranks = zero_shards.saved_by(checkpoint)
    return facts | {"zero": zero, "world_size": ranks, "offload": settings.offload}


def must_reshard(settings, known: dict) -> bool:
    """Return whether DeepSpeed cannot load a checkpoint with these facts directly."""
    was, now = _split(settings, known)
    names = ("optim",) if was["zero"] == now["zero"] == "0" else ("optim", "precision")
    moved = was != now and len(names) > 1
    return moved or any(known.get(n, getattr(settings, n)) != getattr(settings, n) for n in names)


def _split(settings, known: dict) -> tuple[dict, dict]:
    """Return (checkpoint's, this run's) stage, ranks and offload."""
    was, now = ({n: get(n) for n in ("zero", "world_size", "offload")} for get in (known.get, settings.written().get))
    return was, now | {"world_size": settings.world_size}


def _decide_resharding(settings, known: dict, name: str) -> None:
    """Decide whether the states must be resharded, and add a decision if the checkpoint's split differs."""
    was, now = _split(settings, known)
    settings.resharded = must_reshard(settings, known)
    if was != now:
        saved_with = (
            f"ZeRO {was['zero']}, {was['world_size']} rank{'s' * (was['world_size'] > 1)}, offload {was['offload']}"
        )
        settings.decisions.append(
            f"{name} was saved with {saved_with}: weights, optimizer states, learning rate and position in the data "
            "are kept"
            + (", resharded" if settings.resharded else "")
            + ("; dropout draws different numbers" if was["world_size"] != now["world_size"] else "")
        )


def choose_folder(settings: Settings) -> Path:
    """Return the run folder's path (not created here), and find the checkpoint to resume from.

    The path is --output_dir, or runs/<recipe>-<time>. The ranks hash the checkpoint's files later.

    Raises: UserError if it already holds a run that this run does not resume.
    """
    folder = run_folder.name_folder(settings)
    run_folder.check_folder(folder, bool(settings.resume_from_checkpoint))
    find_checkpoint(settings, folder)
    return folder


def how_to_continue(ended: str, folder: Path, step: int | None) -> str:
    """Return a sentence for a run that has ended early: its step, the saved state and the next command.

    Args: ended: e.g. "interrupted" or "stopped by SIGTERM"; step: the last completed step, or None.
    """
    progress = f"{ended} at step {step}" if step is not None else ended
    return f"{progress}; {next_command(folder)}"


def next_command(folder: Path) -> str:
    """Return a sentence about the saved state of a run that has ended, and the next command."""
    if not (folder / "run.json").exists():
        return "no run was started. Repeat the command"
    resume = command_line.next_step("resume", folder)
    if saved := integrity.latest_valid_checkpoint(folder, hashes=False):
        return f"saved up to step {saved.name.rpartition('-')[2]}. Continue: {resume}"
    models = [f for f in run_folder.checkpoints(folder).values() if not integrity.damage(f, hashes=False)]
    if models:
        return (
            f"{models[-1].name} holds the model without optimizer states (--save_only_model) and cannot be resumed. "
            f"Export it: {command_line.next_step('export', models[-1])}; or start again: {resume}"
        )
    return f"nothing is saved yet. Start again: {resume}"


def find_checkpoint(settings: Settings, folder: Path, judge=integrity.by_sizes) -> None:
    """Replace --resume_from_checkpoint (a path, or auto for the newest valid checkpoint) by a checkpoint's path.

    `auto` without a checkpoint starts from scratch, so a preempted job can rerun the same command.
    Args: judge: yields each checkpoint with the reason why it cannot be resumed, "" if it can.
    Raises: UserError if the named checkpoint is damaged, or `true` does not find one.
    """
    value, settings.resume_from_checkpoint = settings.resume_from_checkpoint, None
    if value is None or value.lower() == "false":
        return
    newest = value.lower() in ("true", "last", "auto")
    for checkpoint, reason in judge([*reversed(run_folder.checkpoints(folder).values())] if newest else [Path(value)]):
        if not reason:
            settings.resume_from_checkpoint = str(checkpoint)
            return
        if not newest:
            raise UserError(f"--resume_from_checkpoint {value}: cannot be resumed: {reason}; use another checkpoint.")
        _note(f"skipping {checkpoint.name}: {reason}")
    if value.lower() != "auto":
        raise UserError(f"--resume_from_checkpoint {value}: {folder} does not hold a complete checkpoint; pass a path.")
    _note(f"{folder} does not hold a complete checkpoint: the run starts from the beginning")


def _note(sentence: str) -> None:
    if distributed.rank() == 0:
        print(f"note: {sentence}", flush=True)


def move_newer(folder: Path, step: int) -> Path | None:
    """Move checkpoints later than `step` to attempts/; return the new folder, None without such checkpoints.

    A run resumed at `step` saves these steps again, and rotation would delete the new checkpoints before the old ones.
    """
    newer = [checkpoint for saved_step, checkpoint in run_folder.checkpoints(folder).items() if saved_step > step]
    if not newer:
        return None
    names = (f"before-resume-at-{step}{f'-{i}' if i else ''}" for i in itertools.count())
    archive = next(folder / "attempts" / name for name in names if not (folder / "attempts" / name).exists())
    archive.mkdir(parents=True)
    for checkpoint in newer:
        shutil.move(checkpoint, archive / checkpoint.name)
    return archive
