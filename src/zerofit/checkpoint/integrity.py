"""Detect damaged or incomplete checkpoints before loading them."""

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from zerofit import __version__
from zerofit.base.errors import UserError
from zerofit.base.paths import hash_file
from zerofit.checkpoint import pickles, zero_shards
from zerofit.checkpoint.facts import FACTS, FORMAT, is_zerofit_run, read_facts
from zerofit.job import run_folder


def latest_valid_checkpoint(folder: Path, hashes: bool = True) -> Path | None:
    """Return the newest checkpoint-<step> of a run folder that can be resumed, or None.

    Args: hashes: see `damage`.
    """
    newest_first = reversed(run_folder.checkpoints(folder).values())
    return next((checkpoint for checkpoint in newest_first if not find_corruption(checkpoint, hashes)), None)


def by_sizes(checkpoints: list[Path]) -> Iterator[tuple[Path, str]]:
    """Yield each checkpoint with the result of `find_corruption`, without hashing files."""
    for checkpoint in checkpoints:
        yield checkpoint, find_corruption(checkpoint, hashes=False)


def find_corruption(checkpoint: Path, hashes: bool = True) -> str:
    """Return why this checkpoint cannot be resumed, "" if it can. Args: hashes: see `damage`."""
    reason = damage(checkpoint, hashes) or missing_states(checkpoint)
    return reason or ("" if read_facts(checkpoint) else _incomplete(checkpoint))


def damage(checkpoint: Path, hashes: bool = True) -> str:
    """Return the first fault in the files of a checkpoint, else "". It may hold a model only.

    Args: hashes: read and hash every file. False compares only the sizes, which takes no time: for a launcher, whose
        ranks hash the files (verify.py), and for a job that must end before SLURM ends it.
    """
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except OSError:
        return "trainer_state.json is missing"
    except ValueError:
        return "its trainer_state.json is damaged"
    known = read_facts(checkpoint)
    if known == {}:
        return f"its {FACTS} is damaged"
    if known is None and is_zerofit_run(checkpoint.parent):
        return f"its {FACTS} is missing"
    if known and known.get("format", 1) > FORMAT:
        return f"zerofit {known.get('zerofit')} saved it in a format that {__version__} cannot read; update zerofit"
    return (changed(checkpoint, known["files"], hashes) if known else "") or pickles.fault(checkpoint)


def missing_states(checkpoint: Path) -> str:
    """Return a sentence if the optimizer states are missing: transformers would silently start with new ones."""
    if (checkpoint / "latest").exists() or (checkpoint / "optimizer.pt").exists():
        return ""
    return "it holds a model without optimizer states (--save_only_model); start a new run from it with --model"


def changed(checkpoint: Path, files: dict[str, list], hashes: bool = True) -> str:
    """Return a sentence about the first file that has changed since it was written, else ""."""
    for name, (size, digest) in files.items():
        file = checkpoint / name
        if not file.exists():
            return f"{name} is missing"
        if (actual := file.stat().st_size) != size:
            return f"{name} has {actual:,} bytes instead of {size:,}"
        try:
            if hashes and hash_file(file) != digest:
                return f"{name} was changed or damaged (its hash differs)"
        except OSError as error:  # a bad sector
            return f"{name} cannot be read: {error.strerror}"
    return ""


def _incomplete(checkpoint: Path) -> str:
    """Return the first missing file of a checkpoint without zerofit.json; "" if it is complete."""
    ranks = max(2, len(list(checkpoint.glob("rng_state_*.pth"))))  # the file of a single rank is not numbered
    for name in [] if (checkpoint / "rng_state.pth").exists() else [f"rng_state_{rank}.pth" for rank in range(ranks)]:
        if not (checkpoint / name).exists():
            return f"{name} is missing"
    if (checkpoint / "latest").exists():  # DeepSpeed's engine
        folder = pickles.shards_folder(checkpoint)
        for pattern in ("*optim_states.pt", "*model_states.pt"):
            if not list(folder.glob(pattern)):
                return f"{folder.name}/{pattern} is missing"
        try:
            ranks, shard_files = zero_shards.saved_by(checkpoint)[1], len(list(folder.glob("*optim_states.pt")))
        except (UserError, KeyError, TypeError, ValueError):
            return f"{folder.name} does not record how many ranks saved it"
        if shard_files != ranks:
            return f"it holds the optimizer states of {shard_files} ranks, but {ranks} ranks saved it"
    for file in checkpoint.glob("*.safetensors"):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return f"{file.name} is incomplete"
    return ""
