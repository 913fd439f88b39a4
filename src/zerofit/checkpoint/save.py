"""Write a checkpoint to a temporary folder, verify and sync it, then rename it and rotate older ones.

Each holds zerofit.json, written last: what it was saved from, and size and hash of every file.
"""

import json
import os
import shutil
import time
import zipfile
from pathlib import Path

from zerofit import __version__
from zerofit.base import distributed
from zerofit.base.paths import hash_file, size_of
from zerofit.checkpoint import differences, integrity, node_local
from zerofit.checkpoint.facts import ASIDE, FACTS, FORMAT, digest_of
from zerofit.job import groups, program, run_folder
from zerofit.job.settings import written
from zerofit.model.weights import stored

# --- saving ---


def save(trainer, write) -> None:
    """Save one checkpoint, with `write`, transformers' own saving, into trainer.saving_to. Collective.

    Older checkpoints are deleted (save_total_limit) once this one is verified and renamed. Without room on the disk,
    nothing is written, a warning is printed, and training continues.
    Raises: RuntimeError when what was written is not what was trained.
    """
    args, state, local = trainer.args, trainer.state, trainer.settings.node_local_storage
    run, name = Path(args.output_dir), f"checkpoint-{state.global_step}"
    writes = args.process_index == 0 or (local and distributed.first_of_node())  # one rank per disk
    if not all(distributed.all_gather(_has_room(run) if writes else True)):
        return
    trainer.saving_to = run / ASIDE
    try:
        write()
    finally:
        trainer.saving_to = None
    if writes:
        (run / ASIDE / name / "training_args.bin").unlink(missing_ok=True)  # a pickle that nothing reads
    _name_the_best(run, state)
    if args.process_index == 0 and state.best_model_checkpoint:
        state.save_to_json(str(run / ASIDE / name / "trainer_state.json"))
    distributed.barrier()  # every rank has written its files
    if local:
        node_local.copy_small_files(run / ASIDE / name)
    hashes, elsewhere = _hashes(run / ASIDE / name, local)
    if args.process_index == 0:
        verify(run / ASIDE / name, trainer)
        verify_states(run / ASIDE / name, trainer)
    if writes:
        facts = _facts(trainer, hashes) | ({"elsewhere": elsewhere} if elsewhere else {})
        run_folder.write_json(run / ASIDE / name / FACTS, facts | {"digest": digest_of(facts)})
        _publish(run, name)
    distributed.barrier()  # it is on every disk before older ones are deleted
    if writes:
        _rotate(run, name, args.save_total_limit, state.best_model_checkpoint)
    distributed.barrier()
    trainer.reporter.save_clock.saved()
    trainer._push_from_checkpoint(str(run / name))  # transformers would have pushed the temporary folder


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
    """Delete what a killed save left; return whether a checkpoint as large as the last one fits."""
    shutil.rmtree(run / ASIDE, ignore_errors=True)
    previous = list(run_folder.checkpoints(run).values())
    needed = size_of(previous[-1]) if previous else 0
    free = shutil.disk_usage(run).free
    if needed <= free:
        return True
    print(f"WARNING: no checkpoint is saved: the last one took {needed / 1e9:.3g} GB and the disk has {free / 1e9:.3g} "
          f"left; {previous[-1].name} stays the newest", flush=True)  # fmt: skip
    return False


def _hashes(folder: Path, local: bool) -> tuple[dict[str, list], dict[str, list]]:
    """Sync and hash files; return {file: [bytes, hash]} of this disk, and of those on others. Collective.

    The ranks that share a disk (all of them; with `local`, those of a node) share the work.
    """
    ranks = range(distributed.size())
    if local:
        ranks = [
            rank for rank, node in enumerate(distributed.all_gather(distributed.node())) if node == distributed.node()
        ]
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    own_hashes = {
        str(f.relative_to(folder)): [f.stat().st_size, hash_file(f, sync=True)]
        for f in files[ranks.index(distributed.rank()) :: len(ranks)]
    }
    own_disk, elsewhere = {}, {}
    for rank, part in enumerate(distributed.all_gather(own_hashes)):
        (own_disk if rank in ranks else elsewhere).update(part)
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
    from zerofit.checkpoint import reshard
    from zerofit.model.load import verify_saved

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
    for file in [*folder.rglob("*.pt"), *folder.rglob("*.pth")]:
        if not zipfile.is_zipfile(file):
            raise RuntimeError(f"{file}: was not written whole.")


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


def _facts(trainer, hashes: dict[str, list]) -> dict:
    from zerofit.checkpoint import reshard
    from zerofit.config import offload

    settings = trainer.settings
    split = [name for name in groups.flags() if name in settings.values]
    names = ("zero", "offload", "world_size", *split, "effective_batch_size", "optim", "model")
    return {
        "zerofit": __version__, "format": FORMAT, "step": trainer.state.global_step, "recipe": settings.recipe.name,
        **{name: written(name, getattr(settings, name)) for name in names}, "precision": settings.precision,
        "unsaved": offload.unsaved(settings), "fingerprints": settings.fingerprints, "files": hashes,
        "settings": differences.record(settings), "resumed": settings.resumed,
        "program": (running := program.current()) and running.facts,
        **({} if trainer.is_deepspeed_enabled else {"groups": reshard.group_names(trainer)}),
    }  # fmt: skip


# {environment variable of a job: its scheduler}
SCHEDULERS = {"SLURM_JOB_ID": "SLURM", "KUBERNETES_SERVICE_HOST": "Kubernetes"}

CLUSTER_MINUTES = 30.0  # between saves of a cluster's job, where the user has not said when to save


def choose_clock(settings) -> None:
    """Save by the clock in a job of a cluster: a lost node, a preemption or a time limit may end it within an epoch."""
    scheduler = next((name for variable, name in SCHEDULERS.items() if os.environ.get(variable)), "")
    told = {"save_every_minutes", "save_strategy", "save_steps"} & {*settings.given}
    never = settings.save_only_model or settings.save_strategy == "no"
    if told or never or not (scheduler or distributed.several_nodes()):
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
