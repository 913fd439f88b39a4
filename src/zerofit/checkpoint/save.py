"""Write a checkpoint to a temporary folder, verify and sync it, then rename it and rotate older ones.

Each has a zerofit.json, written last: the run that saved it, and size and hash of every file.
"""

import contextlib
import errno
import json
import os
import shutil
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from zerofit import __version__
from zerofit.base import distributed, rank_status
from zerofit.base.errors import UserError, first_line
from zerofit.base.paths import hash_file, size_of
from zerofit.checkpoint import background, differences, integrity, node_local, reshard, zero_shards
from zerofit.checkpoint.facts import ASIDE, FACTS, FORMAT, digest_of
from zerofit.config import offload
from zerofit.job import groups, program, run_folder
from zerofit.job.settings import written
from zerofit.model.load import verify_saved
from zerofit.model.weights import stored

# --- saving ---


@dataclass
class Unpublished:
    """A checkpoint in the temporary folder, whose files of this rank are written or being written."""

    folder: Path  # its final one
    own: Path  # of this rank's files, until they are moved beside those of the others
    facts: dict  # of zerofit.json without the files; {} where this rank writes none
    shapes: dict[str, tuple]  # of the weights, if the shards alone hold them; else {}
    hashes: dict[str, list] = field(default_factory=dict)  # of this rank's files
    writing: background.Writing | None = None  # None: not in the background

    @property
    def aside(self) -> Path:
        """Return the folder that is renamed in the end."""
        return self.folder.parent / ASIDE / self.folder.name

    @property
    def is_written(self) -> bool:
        """Return whether this rank has written its files, or failed to."""
        return self.writing is None or self.writing.ended

    def store(self) -> None:
        """Check, sync, hash and move this rank's written files. Raises: RuntimeError for an incomplete one."""
        _check_own(self.own, self.shapes)
        self.hashes = _hashes(self.own)
        _move(self.own, self.aside)


def save(trainer, write) -> None:
    """Save one checkpoint, with `write`, transformers' own saving, into trainer.saving_to. Collective.

    Older checkpoints are deleted (save_total_limit) once this one is verified and renamed. If the disk is too full,
    nothing is written, a warning is printed, and training continues. With --save_in_background the states are only
    copied here, and `publish` does the rest.
    Raises: RuntimeError when what was written is not what was trained; as `publish`.
    """
    args, state, settings = trainer.args, trainer.state, trainer.settings
    publish(trainer)  # one at a time
    run, name = Path(args.output_dir), f"checkpoint-{state.global_step}"
    if not all(distributed.all_gather(_has_room(run) if _writes_facts(trainer) else True)):
        return
    own, collecting = run / ASIDE / f"rank{args.process_index}" / name, contextlib.nullcontext()
    if settings.save_in_background:
        collecting = background.collecting(trainer)
    trainer.saving_to = own.parent
    try:
        with collecting as write_states:
            write()
    finally:
        trainer.saving_to = None
    (own / "training_args.bin").unlink(missing_ok=True)  # a pickle that nothing reads
    _name_the_best(run, state)
    if args.process_index == 0 and state.best_model_checkpoint:
        state.save_to_json(str(own / "trainer_state.json"))
    if settings.node_local_storage:
        node_local.copy_small_files(own)
    so_far = {"unlogged": trainer.unlogged(), "train_seconds": round(trainer.seconds_so_far(), 1)}
    facts = _facts(trainer) | so_far if _writes_facts(trainer) else {}
    trainer.unpublished = new = Unpublished(run / name, own, facts, trainer.shapes if needs_no_weights(trainer) else {})
    if settings.save_in_background:
        new.writing = background.Writing(lambda: (write_states(), new.store()))
    else:
        new.store()
        publish(trainer)
    trainer.reporter.save_clock.saved()


def _writes_facts(trainer) -> bool:
    """Return whether this rank writes zerofit.json and renames the folder: one rank for each disk."""
    local = trainer.settings.node_local_storage
    return trainer.args.process_index == 0 or (local and distributed.first_of_node())


def publish(trainer) -> None:
    """Wait until all ranks have written the unpublished checkpoint, if there is one; verify and rename it. Collective.

    Raises: OSError on every rank if one could not write its files in the background; RuntimeError as `save`.
    """
    new, trainer.unpublished = trainer.unpublished, None
    if new is None:
        return
    _raise_failures(new)
    hashes, elsewhere = _of_all_ranks(new.hashes, trainer.settings.node_local_storage)
    if trainer.args.process_index == 0:
        if not new.shapes:
            verify(new.aside, trainer)
        verify_states(new.aside, trainer)
    if new.facts:
        facts = new.facts | {"files": hashes} | ({"elsewhere": elsewhere} if elsewhere else {})
        run_folder.write_json(new.aside / FACTS, facts | {"digest": digest_of(facts)})
        _publish(new.folder.parent, new.folder.name)
    distributed.barrier()  # older ones are deleted once it is on every disk
    if new.facts:
        best = trainer.state.best_model_checkpoint
        _rotate(new.folder.parent, new.folder.name, trainer.args.save_total_limit, best)
    distributed.barrier()
    trainer._push_from_checkpoint(str(new.folder))  # transformers would have pushed the temporary folder


def _raise_failures(new: Unpublished) -> None:
    """Wait for the thread that writes a checkpoint, and raise its error on every rank. Collective.

    Raises: OSError.
    """
    if new.writing is None:
        return
    new.writing.wait()
    error = new.writing.error
    number = errno.ENOSPC if error and rank_status.disk_is_full(error) else getattr(error, "errno", None) or errno.EIO
    failures = distributed.all_gather(error and (number, first_line(error)))
    for rank, failure in enumerate(failures):
        if failure:
            raise OSError(failure[0], f"{new.folder.name} was not saved, rank {rank} could not write it: {failure[1]}")


def _name_the_best(run: Path, state) -> None:
    """Record the best step's checkpoint, if there is one; transformers recorded a path in the temporary folder.

    A best step that was not saved (evaluated between two saves) leaves the one recorded before. Collective.
    """
    if not state.best_global_step:
        return
    best = run / f"checkpoint-{state.best_global_step}"
    is_saved = state.best_global_step == state.global_step or best.is_dir()
    if distributed.broadcast(is_saved):  # rank 0's answer: all ranks must load the same one
        state.best_model_checkpoint = str(best)


def _has_room(run: Path) -> bool:
    """Delete the files of a killed save; return whether a checkpoint as large as the last one fits."""
    shutil.rmtree(run / ASIDE, ignore_errors=True)
    previous = list(run_folder.checkpoints(run).values())
    needed = size_of(previous[-1]) if previous else 0
    free = shutil.disk_usage(run).free
    if needed <= free:
        return True
    print(f"WARNING: no checkpoint is saved: the last one took {needed / 1e9:.3g} GB and the disk has {free / 1e9:.3g} "
          f"free; {previous[-1].name} stays the newest", flush=True)  # fmt: skip
    return False


def _check_own(own: Path, shapes: dict[str, tuple]) -> None:
    """Check that this rank's archives are whole, and if the shards alone hold the weights, its share of each.

    Raises: RuntimeError.
    """
    for file in [*own.rglob("*.pt"), *own.rglob("*.pth")]:
        if not zipfile.is_zipfile(file):
            raise RuntimeError(f"{file}: was not written whole.")
    if not shapes:
        return
    try:
        zero_shards.check_share(own, shapes, distributed.size())
    except UserError as error:
        raise RuntimeError(f"what this rank has saved is not whole: {error}") from None


def _hashes(folder: Path) -> dict[str, list]:
    """Sync and hash the files that this rank has written, read from the page cache; return {file: [bytes, hash]}."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(f.relative_to(folder)): [f.stat().st_size, hash_file(f, sync=True)] for f in files}


def _move(own: Path, folder: Path) -> None:
    """Move this rank's files into the folder of all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in [file for file in own.rglob("*") if file.is_file()]:
        target = folder / file.relative_to(own)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.rename(target)


def _of_all_ranks(own_hashes: dict[str, list], local: bool) -> tuple[dict[str, list], dict[str, list]]:
    """Return {file: [bytes, hash]} of this disk, and of those on others (with `local`, each node's own). Collective.

    Raises: RuntimeError if two ranks have written another content under one name.
    """
    own_disk, elsewhere = {}, {}
    for node, part in distributed.all_gather((distributed.node(), own_hashes)):
        files = own_disk if not local or node == distributed.node() else elsewhere
        if twice := [name for name, entry in part.items() if files.get(name, entry) != entry]:
            raise RuntimeError(f"two ranks have saved {twice[0]}, each with another content.")
        files.update(part)
    return own_disk, {name: entry for name, entry in elsewhere.items() if name not in own_disk}


def _publish(run: Path, name: str) -> None:
    """Rename the folder once all of it is on the disk, then delete an earlier checkpoint of the same step."""
    new = run / ASIDE / name
    for folder in [*(f for f in new.rglob("*") if f.is_dir()), new]:
        _sync(folder)
    if (run / name).exists():
        (run / name).rename(run / ASIDE / f"{name}.before")
    new.rename(run / name)
    _sync(run)
    shutil.rmtree(run / ASIDE)


def _sync(folder: Path) -> None:
    """Sync a folder's list of files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rotate(run: Path, name: str, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints over the limit; keep the new one (transformers: the highest)."""
    kept = {name, Path(best).name if best else name}
    others = [checkpoint for checkpoint in run_folder.checkpoints(run).values() if checkpoint.name not in kept]
    if limit and limit > 0:  # the limit counts the kept ones too, but deletes none of them
        for checkpoint in others[: max(0, len(others) + len(kept) - max(limit, len(kept)))]:
            shutil.rmtree(checkpoint, ignore_errors=True)


def verify(folder: Path, trainer) -> None:
    """Check the saved tensors against the model: none missing or empty, full shapes, tied weights equal.

    Raises: RuntimeError.
    """
    lora, weights = trainer.settings.trains_adapter, stored.Weights(folder)
    trainable_params, total_params = trainer.numel
    verify_saved(folder, trainable_params if lora else total_params)
    names = reshard.file_names(trainer.model) if lora else {name: name for name in trainer.shapes}
    renamed = not lora and set(weights.where) - set(
        trainer.model.state_dict()
    )  # e.g. experts, which transformers splits
    for name, saved in names.items():
        expected = trainer.shapes[name]
        if saved not in weights.where and renamed:
            continue
        if saved not in weights.where:
            raise RuntimeError(f"{folder}: {saved} was not saved.")
        if (actual := tuple(weights.shape(saved))) != expected:
            raise RuntimeError(f"{folder}: {saved} was saved with shape {actual} instead of {expected}.")
    for twin, first in ({} if lora else getattr(trainer.model, "all_tied_weights_keys", None) or {}).items():
        if twin in weights.where and first in weights.where and not weights.get(twin).equal(weights.get(first)):
            raise RuntimeError(f"{folder}: {twin} and {first} are one tensor in the model and were saved as two.")
    for index in folder.glob("*.safetensors.index.json"):
        if missing := set(json.loads(index.read_text(encoding="utf-8"))["weight_map"]) ^ set(weights.where):
            raise RuntimeError(f"{index}: does not fit the files beside it, e.g. {sorted(missing)[0]}.")


def needs_no_weights(trainer) -> bool:
    """Return whether a checkpoint needs no model.safetensors: the shards of ZeRO-3 hold every weight under its name.

    Gathering the weights on one process, which writes them while the others wait, takes most of a large model's save.
    """
    settings, args, model = trainer.settings, trainer.args, trainer.model
    in_shards = trainer.is_deepspeed_enabled and settings.zero == 3 and not offload.unsaved(settings)
    pushed = args.push_to_hub and args.hub_strategy != "end"
    if (
        not in_shards
        or getattr(model, "towers", ())
        or settings.save_model_in_checkpoints
        or args.save_only_model
        or pushed
    ):
        return False
    if settings.node_local_storage:  # no disk has all shards
        return False
    trainable, total = trainer.numel
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    is_mixture = any("expert" in key for key in model.config.to_dict())  # transformers splits its experts as it saves
    return trainable == total and not is_mixture and not set(model.state_dict()) - {*trainer.shapes, *tied}  # buffers


def write_without_weights(trainer, folder: Path) -> None:
    """Write the model's configuration and its tokenizer, with which the shards beside them can be exported."""
    trainer.model.save_pretrained(folder, state_dict={})
    for file in folder.glob("*.safetensors"):  # of no tensor
        file.unlink()
    trainer.processing_class.save_pretrained(folder)


def verify_states(folder: Path, trainer) -> None:
    """Check that the optimizer states of every rank are there; with --node_local_storage those are on other disks.

    Raises: RuntimeError.
    """
    settings = trainer.settings
    if trainer.args.save_only_model or settings.node_local_storage:
        return
    if integrity.without_states(folder):
        raise RuntimeError(f"{folder}: the optimizer states were not saved.")
    shards = len([*folder.glob("global_step*/*optim_states.pt")])
    if settings.deepspeed is not None and settings.zero and shards != distributed.size():
        raise RuntimeError(f"{folder}: {shards} of {distributed.size()} ranks saved their optimizer states.")


def _facts(trainer) -> dict:
    """Return what zerofit.json holds beside the files."""
    settings = trainer.settings
    split = [name for name in groups.flags() if name in settings.values]
    names = ("zero", "offload", "world_size", *split, "effective_batch_size", "optim", "model")
    return {
        "zerofit": __version__, "format": FORMAT, "step": trainer.state.global_step, "recipe": settings.recipe.name,
        **{name: written(name, getattr(settings, name)) for name in names}, "precision": settings.precision,
        "unsaved": offload.unsaved(settings), "fingerprints": settings.fingerprints,
        "of_json": differences.of_json(settings),
        "settings": differences.record(settings), "resumed": settings.resumed,
        "program": (running := program.current()) and running.facts,
        **({} if trainer.is_deepspeed_enabled else {"groups": reshard.group_names(trainer)}),
    }  # fmt: skip


# {environment variable of a job: its scheduler}
SCHEDULERS = {"SLURM_JOB_ID": "SLURM", "KUBERNETES_SERVICE_HOST": "Kubernetes"}

CLUSTER_MINUTES = 30.0  # between saves of a job of a cluster, unless the user has chosen


def choose_clock(settings) -> None:
    """Save by the clock in a job of a cluster: a lost node, a preemption or a time limit may end it within an epoch."""
    scheduler = next((name for variable, name in SCHEDULERS.items() if os.environ.get(variable)), "")
    chosen = {"save_every_minutes", "save_strategy", "save_steps"} & {*settings.given}
    never = settings.save_only_model or settings.save_strategy == "no"
    if chosen or never or not (scheduler or distributed.several_nodes()):
        return
    settings.save_every_minutes = CLUSTER_MINUTES
    where = scheduler or "several nodes"
    settings.decisions.append(
        f"save_every_minutes {CLUSTER_MINUTES:.0f}: {where}, where a job may lose a node (off: 0)"
    )


class SaveTimer:
    """Decide for --save_every_minutes when a checkpoint is due; the ranks communicate on few of the steps only."""

    def __init__(self, minutes: float):
        self.seconds, self.last, self.look_at, self.seen = minutes * 60, time.perf_counter(), 1, None

    def saved(self) -> None:
        self.last = time.perf_counter()

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step, by rank 0's clock; collective on few of the steps."""
        if not self.seconds or step < self.look_at:
            return False
        now, steps = time.perf_counter(), 1
        seconds_left = self.seconds - (now - self.last)
        due = seconds_left <= 0
        if self.seen:
            pace = (now - self.seen[1]) / (step - self.seen[0])
            steps = max(1, int((self.seconds if due else seconds_left) / 2 / pace))
        self.seen = step, now
        due, steps = distributed.broadcast((due, steps))
        self.look_at = step + steps
        return due
