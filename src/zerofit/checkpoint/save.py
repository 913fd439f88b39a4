"""Write a checkpoint to a staging folder, verify and sync it, then rename it and rotate older ones.

Its zerofit.json, written last, records the run and the size and hash of every file.
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
from zerofit.checkpoint.facts import FACTS, FORMAT, STAGING, digest_of
from zerofit.config import offload
from zerofit.job import parallel_dims, program, run_folder
from zerofit.job.settings import written
from zerofit.model.load import verify_saved
from zerofit.model.weights import stored

# --- saving ---


@dataclass
class PendingCheckpoint:
    """A checkpoint in the staging folder; this rank's files are complete or being written."""

    folder: Path  # final path
    rank_folder: Path  # this rank's files, until they are moved into `staging`
    facts: dict  # zerofit.json without the files; {} if this rank does not write it
    shapes: dict[str, tuple]  # shapes of the weights, if only the shards hold them; else {}
    hashes: dict[str, list] = field(default_factory=dict)  # this rank's files
    writing: background.Writing | None = None  # None if not in the background

    @property
    def staging(self) -> Path:
        """Return the folder with the files of all ranks, which is renamed when complete."""
        return self.folder.parent / STAGING / self.folder.name

    @property
    def is_written(self) -> bool:
        """Return whether this rank has finished writing, with or without an error."""
        return self.writing is None or self.writing.ended

    def store(self) -> None:
        """Check, sync, hash and move this rank's files. Raises: RuntimeError if one is incomplete."""
        _check_rank_files(self.rank_folder, self.shapes)
        self.hashes = _hashes(self.rank_folder)
        _move(self.rank_folder, self.staging)


def save(trainer, write) -> None:
    """Save a checkpoint with `write`, transformers' own save, into trainer.saving_to. Collective.

    Older checkpoints are deleted (save_total_limit) once this one is verified and renamed. If the disk is too full,
    a warning is printed, and training continues without a save. With --save_in_background, this only copies the
    states, and `publish` does the rest.
    Raises: RuntimeError if the written tensors do not match the trained ones; see `publish`.
    """
    args, state, settings = trainer.args, trainer.state, trainer.settings
    publish(trainer)  # one at a time
    run, name = Path(args.output_dir), f"checkpoint-{state.global_step}"
    if not all(distributed.all_gather(_has_room(run) if _writes_facts(trainer) else True)):
        return
    rank_folder, collecting = run / STAGING / f"rank{args.process_index}" / name, contextlib.nullcontext()
    if settings.save_in_background:
        collecting = background.collecting(trainer)
    trainer.saving_to = rank_folder.parent
    try:
        with collecting as write_states:
            write()
    finally:
        trainer.saving_to = None
    (rank_folder / "training_args.bin").unlink(missing_ok=True)  # an unused pickle
    _record_best(run, state)
    if args.process_index == 0 and state.best_model_checkpoint:
        state.save_to_json(str(rank_folder / "trainer_state.json"))
    if settings.node_local_storage:
        node_local.copy_small_files(rank_folder)
    progress = {"unlogged": trainer.pending_log_state(), "train_seconds": round(trainer.seconds_so_far(), 1)}
    facts = _facts(trainer) | progress if _writes_facts(trainer) else {}
    shapes = trainer.shapes if needs_no_weights(trainer) else {}
    trainer.pending_checkpoint = new = PendingCheckpoint(run / name, rank_folder, facts, shapes)
    if settings.save_in_background:
        new.writing = background.Writing(lambda: (write_states(), new.store()))
    else:
        new.store()
        publish(trainer)
    trainer.reporter.save_clock.saved()


def _writes_facts(trainer) -> bool:
    """Return whether this rank writes zerofit.json and renames the folder: one rank per disk."""
    local = trainer.settings.node_local_storage
    return trainer.args.process_index == 0 or (local and distributed.first_of_node())


def publish(trainer) -> None:
    """Wait until all ranks have written the pending checkpoint, if any; verify and rename it. Collective.

    Raises: OSError on every rank if a rank could not write its files in the background; RuntimeError as in `save`.
    """
    new, trainer.pending_checkpoint = trainer.pending_checkpoint, None
    if new is None:
        return
    _raise_failures(new)
    hashes, elsewhere = _gather_hashes(new.hashes, trainer.settings.node_local_storage)
    if trainer.args.process_index == 0:
        if not new.shapes:
            verify(new.staging, trainer)
        verify_states(new.staging, trainer)
    if new.facts:
        facts = new.facts | {"files": hashes} | ({"elsewhere": elsewhere} if elsewhere else {})
        run_folder.write_json(new.staging / FACTS, facts | {"digest": digest_of(facts)})
        _publish(new.folder.parent, new.folder.name)
    distributed.barrier()  # older checkpoints are deleted once this one is on every disk
    if new.facts:
        best = trainer.state.best_model_checkpoint
        _rotate(new.folder.parent, new.folder.name, trainer.args.save_total_limit, best)
    distributed.barrier()
    trainer._push_from_checkpoint(str(new.folder))  # transformers would have pushed the staging folder


def _raise_failures(new: PendingCheckpoint) -> None:
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
            raise OSError(failure[0], f"{new.folder.name} was not saved: rank {rank} could not write it: {failure[1]}")


def _record_best(run: Path, state) -> None:
    """Record the best step's checkpoint, if any; transformers has recorded a path in the staging folder.

    A best step without a save (evaluated between two saves) does not change the record. Collective.
    """
    if not state.best_global_step:
        return
    best = run / f"checkpoint-{state.best_global_step}"
    is_saved = state.best_global_step == state.global_step or best.is_dir()
    if distributed.broadcast(is_saved):  # rank 0 decides: all ranks must load the same checkpoint
        state.best_model_checkpoint = str(best)


def _has_room(run: Path) -> bool:
    """Delete the files of a killed save; return whether a checkpoint of the last one's size fits."""
    shutil.rmtree(run / STAGING, ignore_errors=True)
    previous = list(run_folder.checkpoints(run).values())
    needed = size_of(previous[-1]) if previous else 0
    free = shutil.disk_usage(run).free
    if needed <= free:
        return True
    print(f"WARNING: no checkpoint is saved: the last one took {needed / 1e9:.3g} GB, and the disk has "
          f"{free / 1e9:.3g} GB free; {previous[-1].name} remains the newest", flush=True)  # fmt: skip
    return False


def _check_rank_files(folder: Path, shapes: dict[str, tuple]) -> None:
    """Check that this rank's archives are complete, and its share of each weight if only the shards hold the weights.

    Raises: RuntimeError.
    """
    for file in [*folder.rglob("*.pt"), *folder.rglob("*.pth")]:
        if not zipfile.is_zipfile(file):
            raise RuntimeError(f"{file}: was written incompletely.")
    if not shapes:
        return
    try:
        zero_shards.check_share(folder, shapes, distributed.size())
    except UserError as error:
        raise RuntimeError(f"the files of this rank are incomplete: {error}") from None


def _hashes(folder: Path) -> dict[str, list]:
    """Sync and hash this rank's files from the page cache; return {file: [bytes, hash]}."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(f.relative_to(folder)): [f.stat().st_size, hash_file(f, sync=True)] for f in files}


def _move(rank_folder: Path, folder: Path) -> None:
    """Move this rank's files into the folder of all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in [file for file in rank_folder.rglob("*") if file.is_file()]:
        target = folder / file.relative_to(rank_folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        file.rename(target)


def _gather_hashes(rank_hashes: dict[str, list], local: bool) -> tuple[dict[str, list], dict[str, list]]:
    """Return {file: [bytes, hash]} of this disk and of other disks (with `local`, each node has one). Collective.

    Raises: RuntimeError if two ranks have written different content under the same name.
    """
    this_disk, elsewhere = {}, {}
    for node, part in distributed.all_gather((distributed.node(), rank_hashes)):
        files = this_disk if not local or node == distributed.node() else elsewhere
        if twice := [name for name, entry in part.items() if files.get(name, entry) != entry]:
            raise RuntimeError(f"two ranks have saved {twice[0]} with different content.")
        files.update(part)
    return this_disk, {name: entry for name, entry in elsewhere.items() if name not in this_disk}


def _publish(run: Path, name: str) -> None:
    """Sync and rename the folder, then delete an earlier checkpoint of the same step."""
    new = run / STAGING / name
    for folder in [*(f for f in new.rglob("*") if f.is_dir()), new]:
        _sync(folder)
    if (run / name).exists():
        (run / name).rename(run / STAGING / f"{name}.before")
    new.rename(run / name)
    _sync(run)
    shutil.rmtree(run / STAGING)


def _sync(folder: Path) -> None:
    """Sync a folder's directory entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rotate(run: Path, name: str, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints over the limit, but never the new one (transformers keeps the highest step)."""
    kept = {name, Path(best).name if best else name}
    others = [checkpoint for checkpoint in run_folder.checkpoints(run).values() if checkpoint.name not in kept]
    if limit and limit > 0:  # the limit includes the kept ones, which are never deleted
        for checkpoint in others[: max(0, len(others) + len(kept) - max(limit, len(kept)))]:
            shutil.rmtree(checkpoint, ignore_errors=True)


def verify(folder: Path, trainer) -> None:
    """Check the saved tensors against the model: all present, not empty, full shapes, tied weights equal.

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
            raise RuntimeError(f"{folder}: {twin} and {first} are tied in the model but differ in the files.")
    for index in folder.glob("*.safetensors.index.json"):
        if missing := set(json.loads(index.read_text(encoding="utf-8"))["weight_map"]) ^ set(weights.where):
            raise RuntimeError(f"{index}: does not match the weight files, e.g. {sorted(missing)[0]}.")


def needs_no_weights(trainer) -> bool:
    """Return whether a checkpoint does not need model.safetensors: the ZeRO-3 shards hold every weight by name.

    For a large model, gathering the weights on one process, which writes them while the others wait, takes most of the
    time of a save.
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
    if settings.node_local_storage:  # each disk has a part of the shards
        return False
    trainable, total = trainer.numel
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    is_mixture = any("expert" in key for key in model.config.to_dict())  # transformers splits experts on saving
    return trainable == total and not is_mixture and not set(model.state_dict()) - {*trainer.shapes, *tied}  # buffers


def write_without_weights(trainer, folder: Path) -> None:
    """Write the model's configuration and its tokenizer, which an export of the shards needs."""
    trainer.model.save_pretrained(folder, state_dict={})
    for file in folder.glob("*.safetensors"):  # empty
        file.unlink()
    trainer.processing_class.save_pretrained(folder)


def verify_states(folder: Path, trainer) -> None:
    """Check that every rank's optimizer states are in the folder; skipped with --node_local_storage (other disks).

    Raises: RuntimeError.
    """
    settings = trainer.settings
    if trainer.args.save_only_model or settings.node_local_storage:
        return
    if integrity.missing_states(folder):
        raise RuntimeError(f"{folder}: the optimizer states were not saved.")
    shards = len([*folder.glob("global_step*/*optim_states.pt")])
    if settings.deepspeed is not None and settings.zero and shards != distributed.size():
        raise RuntimeError(f"{folder}: {shards} of {distributed.size()} ranks saved their optimizer states.")


def _facts(trainer) -> dict:
    """Return the content of zerofit.json except the files."""
    settings = trainer.settings
    split = [name for name in parallel_dims.size_flags() if name in settings.values]
    names = ("zero", "offload", "world_size", *split, "effective_batch_size", "optim", "model")
    return {
        "zerofit": __version__, "format": FORMAT, "step": trainer.state.global_step, "recipe": settings.recipe.name,
        **{name: written(name, getattr(settings, name)) for name in names}, "precision": settings.precision,
        "unsaved": offload.unsaved(settings), "fingerprints": settings.fingerprints,
        "of_json": differences.json_components(settings),
        "settings": differences.record(settings), "resumed": settings.previous_segments,
        "program": (running := program.current()) and running.facts,
        **({} if trainer.is_deepspeed_enabled else {"groups": reshard.group_names(trainer)}),
    }  # fmt: skip


# {environment variable: scheduler that sets it}
SCHEDULERS = {"SLURM_JOB_ID": "SLURM", "KUBERNETES_SERVICE_HOST": "Kubernetes"}

CLUSTER_MINUTES = 30.0  # default of --save_every_minutes in a cluster job


def choose_clock(settings) -> None:
    """Save by the clock in a cluster job: a lost node, a preemption or a time limit may end it within an epoch."""
    scheduler = next((name for variable, name in SCHEDULERS.items() if os.environ.get(variable)), "")
    chosen = {"save_every_minutes", "save_strategy", "save_steps"} & {*settings.explicit}
    never = settings.save_only_model or settings.save_strategy == "no"
    if chosen or never or not (scheduler or distributed.several_nodes()):
        return
    settings.save_every_minutes = CLUSTER_MINUTES
    where = scheduler or "several nodes"
    settings.decisions.append(
        f"save_every_minutes {CLUSTER_MINUTES:.0f}: a job on {where} may lose a node (0 turns it off)"
    )


class SaveTimer:
    """Decide when --save_every_minutes requires a save; the ranks communicate only on a few steps."""

    def __init__(self, minutes: float):
        self.seconds, self.last, self.check_at, self.last_check = minutes * 60, time.perf_counter(), 1, None

    def saved(self) -> None:
        self.last = time.perf_counter()

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step, by rank 0's clock. Collective on a few steps."""
        if not self.seconds or step < self.check_at:
            return False
        now, steps = time.perf_counter(), 1
        seconds_left = self.seconds - (now - self.last)
        due = seconds_left <= 0
        if self.last_check:
            pace = (now - self.last_check[1]) / (step - self.last_check[0])
            steps = max(1, int((self.seconds if due else seconds_left) / 2 / pace))
        self.last_check = step, now
        due, steps = distributed.broadcast((due, steps))
        self.check_at = step + steps
        return due
