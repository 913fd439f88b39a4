"""Checkpoints: written aside, verified, synced and renamed; what is wrong with one before it is loaded.

Each holds zerofit.json, written last: what it was saved from, and size and hash of every file.
"""

import hashlib
import json
import os
import shutil
import time
import zipfile
from pathlib import Path

from . import __version__, differences, links, node_disks, pickles, report, world
from .errors import UserError

FACTS = "zerofit.json"
FORMAT = 1  # of that file; raised when an older version could not resume what it says
ASIDE = ".saving"  # folder in the run folder that a checkpoint is written to


# --- saving ---


def save(trainer, write) -> None:
    """Save one checkpoint. All ranks call it; `write` is transformers' own saving, into trainer.saving_to.

    Older checkpoints go (save_total_limit) when this one is verified and has its name. Without room for it nothing is
    written, which is said, and training goes on.
    Raises: RuntimeError when what was written is not what was trained.
    """
    args, state, local = trainer.args, trainer.state, trainer.settings.node_local_storage
    run, name = Path(args.output_dir), f"checkpoint-{state.global_step}"
    writes = args.process_index == 0 or (local and links.first_of_node())  # of each disk, one rank
    if not all(world.gathered(_has_room(run) if writes else True)):
        return
    trainer.saving_to = run / ASIDE
    try:
        write()
    finally:
        trainer.saving_to = None
    if writes:
        (run / ASIDE / name / "training_args.bin").unlink(missing_ok=True)  # a pickle that nothing reads
    if state.best_global_step:  # transformers has taken the folder aside for its place
        state.best_model_checkpoint = str(run / f"checkpoint-{state.best_global_step}")
        if args.process_index == 0:
            state.save_to_json(str(run / ASIDE / name / "trainer_state.json"))
    world.barrier()  # every rank has written its files
    if local:
        node_disks.spread(run / ASIDE / name)
    here, elsewhere = _hashes(run / ASIDE / name, local)
    if args.process_index == 0:
        verify(run / ASIDE / name, trainer)
    if writes:
        facts = _facts(trainer, here) | ({"elsewhere": elsewhere} if elsewhere else {})
        report.write_json(run / ASIDE / name / FACTS, facts)
        _publish(run, name)
    world.barrier()  # it is on every disk before the older ones go
    if writes:
        _rotate(run, name, args.save_total_limit, state.best_model_checkpoint)
    world.barrier()
    trainer.reporter.save_clock.saved()
    trainer._push_from_checkpoint(str(run / name))  # transformers would have pushed the folder aside


def _has_room(run: Path) -> bool:
    """Whether the disk can hold one more of what the last one took; clears what a killed save left."""
    shutil.rmtree(run / ASIDE, ignore_errors=True)
    before = list(report.checkpoints(run).values())
    needed = report.size_of(before[-1]) if before else 0
    free = shutil.disk_usage(run).free
    if needed <= free:
        return True
    print(f"WARNING: no checkpoint is saved: the last one took {needed / 1e9:.3g} GB and the disk has {free / 1e9:.3g} left; "
          f"{before[-1].name} stays the newest", flush=True)  # fmt: skip
    return False


def _hashes(folder: Path, local: bool) -> tuple[dict[str, list], dict[str, list]]:
    """{file: [bytes, hash]} of this disk's files and of those that only other machines have, synced to the disk. Collective.

    The ranks that share a disk (all; local: those of a machine) share the work.
    """
    ranks = range(world.size())
    if local:
        ranks = [rank for rank, node in enumerate(world.gathered(links.node())) if node == links.node()]
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    mine = {
        str(f.relative_to(folder)): [f.stat().st_size, _hash(f, sync=True)]
        for f in files[ranks.index(world.rank()) :: len(ranks)]
    }
    here, elsewhere = {}, {}
    for rank, part in enumerate(world.gathered(mine)):
        (here if rank in ranks else elsewhere).update(part)
    return here, {name: entry for name, entry in elsewhere.items() if name not in here}


def _hash(file: Path, sync: bool = False) -> str:
    import xxhash

    digest = xxhash.xxh3_64()
    with file.open("rb") as opened:
        if sync:
            os.fsync(opened.fileno())
        while block := opened.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _publish(run: Path, name: str) -> None:
    """Rename the folder to its name, which it gets only when all of it is on the disk; one of the same step goes last."""
    new = run / ASIDE / name
    for folder in [*(f for f in new.rglob("*") if f.is_dir()), new]:
        _sync(folder)
    if (run / name).exists():
        (run / name).rename(run / ASIDE / f"{name}.before")
    new.rename(run / name)
    _sync(run)
    shutil.rmtree(run / ASIDE)


def _sync(folder: Path) -> None:
    """Write to the disk which files the folder holds."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _rotate(run: Path, name: str, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints over the limit; never the one that was just saved (transformers: the highest step)."""
    kept = {name, Path(best).name if best else name}
    others = [checkpoint for checkpoint in report.checkpoints(run).values() if checkpoint.name not in kept]
    if limit and limit > 0:
        for checkpoint in others[: max(0, len(others) + len(kept) - max(limit, len(kept)))]:
            shutil.rmtree(checkpoint, ignore_errors=True)


def verify(folder: Path, trainer) -> None:
    """Compare what was saved with what is trained: none missing or empty, every one in its whole shape, twins equal.

    Raises: RuntimeError.
    """
    from . import model, resharding, shards

    lora, held = trainer.settings.recipe == "lora", shards.Weights(folder)
    trainable, every = model.count_parameters(trainer.model)
    model.verify_saved(folder, trainable if lora else every)
    parameters, names = dict(trainer.model.named_parameters()), resharding.file_names(trainer.model)
    renamed = not lora and set(held.where) - set(trainer.model.state_dict())  # e.g. experts, which transformers splits
    for name, saved in names.items() if lora else zip(parameters, parameters, strict=True):
        wanted = tuple(getattr(parameters[name], "ds_shape", parameters[name].shape))
        if saved not in held.where and renamed:
            continue
        if saved not in held.where:
            raise RuntimeError(f"{folder}: {saved} was not saved.")
        if (found := tuple(held.shape(saved))) != wanted:
            raise RuntimeError(f"{folder}: {saved} was saved with shape {found} instead of {wanted}.")
    for twin, first in ({} if lora else getattr(trainer.model, "all_tied_weights_keys", None) or {}).items():
        if twin in held.where and first in held.where and not held.get(twin).equal(held.get(first)):
            raise RuntimeError(f"{folder}: {twin} and {first} are one tensor in the model and were saved as two.")
    for index in folder.glob("*.safetensors.index.json"):
        if missing := set(json.loads(index.read_text(encoding="utf-8"))["weight_map"]) ^ set(held.where):
            raise RuntimeError(f"{index}: does not fit the files beside it, e.g. {sorted(missing)[0]}.")
    for file in [*folder.rglob("*.pt"), *folder.rglob("*.pth")]:
        if not zipfile.is_zipfile(file):
            raise RuntimeError(f"{file}: was not written whole.")


def _facts(trainer, hashes: dict[str, list]) -> dict:
    from . import offload, resharding

    settings = trainer.settings
    names = ("recipe", "zero", "offload", "world_size", "effective_batch_size", "optim", "model")
    return {
        "zerofit": __version__, "format": FORMAT, "step": trainer.state.global_step,
        **{name: getattr(settings, name) for name in names}, "precision": settings.precision,
        "unsaved": offload.unsaved(settings), "fingerprints": settings.fingerprints, "files": hashes,
        "settings": differences.record(settings),
        **({} if trainer.is_deepspeed_enabled else {"groups": resharding.group_names(trainer)}),
    }  # fmt: skip


def fingerprints(settings, train_set) -> dict[str, str]:
    """What a run must have in common with the checkpoint that it goes on from."""
    return {"data": train_set.fingerprint, "model": model_fingerprint(settings)}


def model_fingerprint(settings) -> str:
    """A hash of the model's configuration and of the ends of its weight files (a hub model: of its commit)."""
    from . import model

    config = model.load_config(settings)
    digest = hashlib.sha256(json.dumps(config.to_diff_dict(), sort_keys=True, default=str).encode())
    folder = Path(settings.model).expanduser()
    if settings.random_init:
        digest.update(b"random")
    elif folder.is_dir():
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb") as opened:
                opened.seek(-min(1 << 16, file.stat().st_size), os.SEEK_END)
                digest.update(f"{file.name} {file.stat().st_size}".encode() + opened.read())
    else:
        digest.update(str(getattr(config, "_commit_hash", "")).encode())
    return digest.hexdigest()[:24]


class Clock:
    """--save_every_minutes: when the next checkpoint is due. The ranks agree on it at few of the steps only."""

    def __init__(self, minutes: float):
        self.seconds, self.last, self.look_at, self.seen = minutes * 60, time.perf_counter(), 1, None

    def saved(self) -> None:
        self.last = time.perf_counter()

    def is_due(self, step: int) -> bool:
        """After a step; all ranks call it and get rank 0's answer. It looks again when half of what is left is over."""
        if not self.seconds or step < self.look_at:
            return False
        now, steps = time.perf_counter(), 1
        left = self.seconds - (now - self.last)
        due = left <= 0
        if self.seen:
            pace = (now - self.seen[1]) / (step - self.seen[0])
            steps = max(1, int((self.seconds if due else left) / 2 / pace))
        self.seen = step, now
        due, steps = world.broadcast((due, steps))
        self.look_at = step + steps
        return due


# --- resuming ---


def facts(checkpoint: Path) -> dict | None:
    """Return the checkpoint's zerofit.json; {}: it is damaged; None: it has none (saved by another program)."""
    try:
        found = json.loads((checkpoint / FACTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found if _are_facts(found) else {}


def _are_facts(found) -> bool:
    """Whether this is what `save` writes, as far as a resume reads it. Of a newer form, only the number is known."""
    if not isinstance(found, dict) or not isinstance(found.get("format", 1), int):
        return False
    if found.get("format", 1) > FORMAT:
        return True
    files, others = found.get("files"), found.get("elsewhere", {})
    if not files or not all(isinstance(entries, dict) for entries in (files, others)):
        return False
    pairs = all(isinstance(e, list) and [type(n) for n in e] == [int, str] for e in (*files.values(), *others.values()))
    return pairs and all(name in found for name in ("recipe", "zero", "world_size", "offload", "fingerprints"))


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step that the checkpoint was saved after."""
    return json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]


def newest_good(folder: Path, say=lambda text: None) -> Path | None:
    """The newest checkpoint-<step> of a run folder that can be resumed; None: there is none.

    Args: say: is told of each that is passed over, and why.
    """
    for checkpoint in reversed(report.checkpoints(folder).values()):
        if not (reason := fault(checkpoint)):
            return checkpoint
        say(f"{checkpoint.name} is passed over: {reason}")
    return None


def fault(checkpoint: Path) -> str:
    """Return why no run can go on from this checkpoint; "": one can."""
    reason = damage(checkpoint) or _without_states(checkpoint)
    return reason or ("" if facts(checkpoint) else _incomplete(checkpoint))


def damage(checkpoint: Path) -> str:
    """Return what is wrong with the files of a checkpoint; "": nothing. It may still hold a model only."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except OSError:
        return "it has no trainer_state.json"
    except ValueError:
        return "its trainer_state.json is damaged"
    known = facts(checkpoint)
    if known == {}:
        return f"its {FACTS} is damaged"
    if known is None and is_of_this_kit(checkpoint.parent):
        return f"its {FACTS} is missing"
    if known and known.get("format", 1) > FORMAT:
        return f"zerofit {known.get('zerofit')} saved it, in a form that {__version__} does not know; update zerofit"
    return (_changed(checkpoint, known["files"]) if known else "") or pickles.fault(checkpoint)


def is_of_this_kit(run: Path) -> bool:
    """Whether a folder is a run folder of this kit, whose checkpoints all have a zerofit.json."""
    try:
        return "zerofit" in json.loads((run / "run.json").read_text(encoding="utf-8"))["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _without_states(checkpoint: Path) -> str:
    """Return a sentence for a checkpoint of --save_only_model: transformers would begin with an empty optimizer, unsaid."""
    if (checkpoint / "latest").exists() or (checkpoint / "optimizer.pt").exists():
        return ""
    return "it holds a model without optimizer states (--save_only_model), which can only be started from with --model"


def _changed(checkpoint: Path, files: dict[str, list]) -> str:
    """The first file that is not as it was written."""
    for name, (size, digest) in files.items():
        file = checkpoint / name
        if not file.exists():
            return f"{name} is missing"
        if (found := file.stat().st_size) != size:
            return f"{name} has {found:,} bytes instead of {size:,}"
        if _hash(file) != digest:
            return f"{name} was changed or damaged (its hash is another)"
    return ""


def _incomplete(checkpoint: Path) -> str:
    """Of a checkpoint without zerofit.json: the first file that a resume needs and does not find whole."""
    from safetensors import SafetensorError, safe_open

    from . import shards

    ranks = max(2, len(list(checkpoint.glob("rng_state_*.pth"))))  # one rank's file has no number
    for name in [] if (checkpoint / "rng_state.pth").exists() else [f"rng_state_{rank}.pth" for rank in range(ranks)]:
        if not (checkpoint / name).exists():
            return f"{name} is missing"
    if (checkpoint / "latest").exists():  # DeepSpeed's engine
        folder = pickles.shards_folder(checkpoint)
        for pattern in ("*optim_states.pt", "*model_states.pt"):
            if not list(folder.glob(pattern)):
                return f"{folder.name}/{pattern} is missing"
        try:
            ranks, held = shards.saved_by(checkpoint)[1], len(list(folder.glob("*optim_states.pt")))
        except (UserError, KeyError, TypeError, ValueError):
            return f"{folder.name} does not say how many ranks saved it"
        if held != ranks:
            return f"it holds the optimizer states of {held} ranks, it was saved by {ranks}"
    for file in checkpoint.glob("*.safetensors"):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return f"{file.name} is not whole"
    return ""


def check_same(settings, train_set) -> None:
    """Take this run's fingerprints, and compare the checkpoint to resume with it: model, data, stage, ranks, arguments.

    Another stage, rank count or offload: its states are split anew (resharding.py), which is decided here.
    Raises: UserError for what differs and would make another run of it (--resume_anyway: where it cannot go on only).
    """
    from . import shards

    settings.fingerprints = fingerprints(settings, train_set)  # once: a hub model's configuration is asked for
    asked = settings.resume_from_checkpoint
    if not asked:
        return
    known = facts(Path(asked)) or _facts_of_files(Path(asked), settings)
    where = f"--resume_from_checkpoint {asked}"
    if known["recipe"] != settings.recipe:
        raise UserError(f"{where}: was saved by recipes/{known['recipe']}.py; resume it with that recipe.")
    if known.get("unsaved"):
        raise UserError(
            f"{where}: was saved with {known['unsaved']}, whose optimizer states DeepSpeed leaves out; begin anew from its weights "
            f"with --model (recipes/lora.py: `zerofit export {asked} --merge` first)."
        )
    _choose_way(settings, known, Path(asked).name)
    if settings.resharded:
        shards.check_whole(Path(asked))
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
    from . import shards

    found = {"recipe": "lora" if (checkpoint / "adapter_config.json").exists() else "sft"}
    if not shards.is_deepspeed(checkpoint):
        random = len(list(checkpoint.glob("rng_state_*.pth")))
        return found | {"zero": "0", "world_size": random or 1, "offload": "none"}
    zero, ranks = shards.saved_by(checkpoint)
    return found | {"zero": zero, "world_size": ranks, "offload": settings.offload}


def _choose_way(settings, known: dict, name: str) -> None:
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
