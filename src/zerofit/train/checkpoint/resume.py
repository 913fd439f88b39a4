"""Choose the run folder and the checkpoint to resume from, and refuse one of another job."""

import shlex
from pathlib import Path

from zerofit import run_folder
from zerofit.errors import UserError
from zerofit.model.load import fingerprints
from zerofit.settings import Settings
from zerofit.train.checkpoint import differences, pickles
from zerofit.train.checkpoint.facts import read_facts


def check_resumable(settings, train_set) -> None:
    """Take this run's fingerprints, and compare the checkpoint to resume with it: model, data, stage, ranks, arguments.

    Another stage, rank count or offload: its states are split anew (resharding.py), which is decided here.
    Raises: UserError for what differs and would make another run of it (--ignore_resume_mismatch: where it cannot go on only).
    """
    from zerofit.train.checkpoint import zero_shards

    settings.fingerprints = fingerprints(settings, train_set)  # once: a hub model's configuration is asked for
    asked = settings.resume_from_checkpoint
    if not asked:
        return
    known = read_facts(Path(asked)) or _facts_of_files(Path(asked), settings)
    where = f"--resume_from_checkpoint {asked}"
    if known["recipe"] != settings.recipe:
        raise UserError(f"{where}: was saved by recipes/{known['recipe']}.py; resume it with that recipe.")
    if known.get("unsaved"):
        raise UserError(
            f"{where}: was saved with {known['unsaved']}, whose optimizer states DeepSpeed leaves out; begin anew from its weights "
            f"with --model (recipes/lora.py: `zerofit export {asked} --merge` first)."
        )
    _decide_resharding(settings, known, Path(asked).name)
    if settings.resharded:
        zero_shards.check_whole(Path(asked))
        _check_schedule(settings, Path(asked), known, where)
    differences.check(settings, known, where)


def _check_schedule(settings, checkpoint: Path, known: dict, where: str) -> None:
    """Refuse a schedule that follows the loss: its state holds no rates that resharding could put into other groups.

    Raises: UserError.
    """
    file = checkpoint / "scheduler.pt"
    saved = pickles.load(file) if file.exists() else {"base_lrs": []}
    if settings.lr_scheduler_type == "reduce_lr_on_plateau" or "base_lrs" not in saved:
        raise UserError(
            f"{where}: --lr_scheduler_type reduce_lr_on_plateau goes on only as it was saved, without a change of stage, ranks, "
            f"offload, optimizer or precision; use --zero {known['zero']} --gpus {known['world_size']} --offload {known['offload']}."
        )


def _facts_of_files(checkpoint: Path, settings) -> dict:
    """What the files of another program's checkpoint say of how it was saved."""
    from zerofit.train.checkpoint import zero_shards

    found = {"recipe": "lora" if (checkpoint / "adapter_config.json").exists() else "sft"}
    if not zero_shards.is_deepspeed(checkpoint):
        random = len(list(checkpoint.glob("rng_state_*.pth")))
        return found | {"zero": "0", "world_size": random or 1, "offload": "none"}
    zero, ranks = zero_shards.saved_by(checkpoint)
    return found | {"zero": zero, "world_size": ranks, "offload": settings.offload}


def _decide_resharding(settings, known: dict, name: str) -> None:
    """Whether DeepSpeed can load the checkpoint as it is, or its states must be split anew."""
    was, now = ({n: get(n) for n in ("zero", "world_size", "offload")} for get in (known.get, settings.values.get))
    now["world_size"] = settings.world_size
    if was["zero"] == now["zero"] == "0":
        settings.resharded = known.get("optim", settings.optim) != settings.optim
    else:
        others = ("optim", "precision")
        settings.resharded = was != now or any(
            known.get(n, getattr(settings, n)) != getattr(settings, n) for n in others
        )
    if was != now:
        then = f"ZeRO {was['zero']}, {was['world_size']} rank{'s' * (was['world_size'] > 1)}, offload {was['offload']}"
        settings.decisions.append(
            f"{name} was saved with {then}: weights, optimizer states, learning rate and place in the data go on"
            + (", split anew" if settings.resharded else "")
            + ("; dropout draws other numbers" if was["world_size"] != now["world_size"] else "")
        )


def choose_folder(settings: Settings) -> Path:
    """The run folder's path (not made here): --output_dir, or runs/<recipe>-<time>.

    Raises: UserError when it already holds a run and this one does not resume it.
    """
    folder = run_folder.name_folder(settings)
    run_folder.check_folder(folder, bool(settings.resume_from_checkpoint))
    find_checkpoint(settings, folder)
    return folder


def how_to_go_on(ended: str, folder: Path, step: int | None) -> str:
    """Return a sentence for a run that was ended: where it stood, what is saved and the command to give next.

    Args: ended: "interrupted" or "stopped by SIGTERM"; step: the last one that was made, None: there was none.
    """
    where = f"{ended} at step {step}" if step is not None else ended
    return f"{where}; {next_command(folder)}"


def next_command(folder: Path) -> str:
    """Return what of a run that has ended is saved, and the command to give next."""
    from zerofit.train.checkpoint import integrity

    if not (folder / "run.json").exists():
        return "no run was begun. Give the same command again"
    resume = f"make resume RUN={shlex.quote(str(folder))}"
    if saved := integrity.latest_valid_checkpoint(folder):
        return f"saved up to step {saved.name.rpartition('-')[2]}. Go on: {resume}"
    models = [f for f in run_folder.checkpoints(folder).values() if not integrity.damage(f)]
    if models:
        return (
            f"{models[-1].name} holds the model without optimizer states (--save_only_model), so no run goes on from it. Keep it: "
            f"make export RUN={shlex.quote(str(models[-1]))}; or begin again: {resume}"
        )
    return f"nothing is saved yet. Begin again: {resume}"


def find_checkpoint(settings: Settings, folder: Path) -> None:
    """Turn --resume_from_checkpoint (a path, or auto for the newest good one in the run folder) into a path that holds one.

    auto without any starts from the beginning: the same command line serves each attempt of a job that may be killed.
    Raises: UserError when the one that is named is damaged, or `true` finds none.
    """
    from zerofit.train.checkpoint import integrity

    asked = settings.resume_from_checkpoint
    if asked is None or asked.lower() == "false":
        settings.values["resume_from_checkpoint"] = None
        return
    if asked.lower() in ("true", "last", "auto"):
        found = integrity.latest_valid_checkpoint(folder, say=lambda text: print(f"note: {text}", flush=True))
        if found is None and asked.lower() == "auto":
            print(f"note: {folder} holds no whole checkpoint: the run begins at the start", flush=True)
            settings.values["resume_from_checkpoint"] = None
            return
        if found is None:
            raise UserError(
                f"--resume_from_checkpoint {asked}: {folder} holds no checkpoint-<step> folder that is whole; name a path."
            )
        asked = str(found)
    elif reason := integrity.find_corruption(Path(asked)):
        raise UserError(f"--resume_from_checkpoint {asked}: is no whole checkpoint: {reason}; name another one.")
    settings.values["resume_from_checkpoint"] = asked
