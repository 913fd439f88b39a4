"""Load the pickles of a checkpoint (.pt, .pth) without running arbitrary code."""

import contextlib
import importlib
import os
import pickle
import re
from pathlib import Path

import numpy
import torch

from zerofit.base.errors import UserError

# Globals in the pickles of transformers' and DeepSpeed's checkpoints. Loading a pickle can call any global in it.
KNOWN_GLOBALS = (
    "deepspeed.utils.tensor_fragment.fragment_address", "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler", "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "numpy.ndarray", "numpy.dtype", "numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct",
)  # fmt: skip

# transformers 5.17 loads an optimizer to cpu:0 on a rank without a GPU, a location that torch 2.11 does not support.
torch.serialization.register_package(
    100, lambda _: None, lambda storage, location: storage if location.startswith("cpu:") else None
)

FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # environment variable with which torch.load ignores weights_only=False


def shards_folder(checkpoint: Path) -> Path:
    """Return the folder of DeepSpeed's shards, which the file `latest` names.

    Raises: UserError if `latest` does not name a folder of the checkpoint.
    """
    try:
        name = (checkpoint / "latest").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        raise UserError(f"{checkpoint / 'latest'}: cannot be read; use another checkpoint.") from None
    if not re.fullmatch(r"\w[\w.-]*", name) or not (checkpoint / name).is_dir():
        raise UserError(f"{checkpoint / 'latest'}: does not name a folder of this checkpoint; use another checkpoint.")
    return checkpoint / name


def fault(checkpoint: Path) -> str:
    """Return the reason why the checkpoint's pickles must not be loaded; "" if they may be."""
    if link := _link_out_of(checkpoint):
        return f"{link.relative_to(checkpoint)} is a link to a file outside the checkpoint"
    files = {*checkpoint.rglob("*.pt"), *checkpoint.rglob("*.pth")}
    if (checkpoint / "latest").exists():
        try:
            files |= set(shards_folder(checkpoint).glob("*.pt"))  # the folder may be a link to its sibling
        except UserError:
            return "its file latest does not name a folder of the checkpoint"
    for file in sorted(files):
        if reason := _fault_of(file):
            return f"{file.relative_to(checkpoint)} {reason}"
    return ""


def _link_out_of(checkpoint: Path) -> Path | None:
    """Return the first link in the folder whose target is outside of it, or None."""
    top = checkpoint.resolve()
    for file in sorted(checkpoint.rglob("*")):
        if not file.is_symlink():
            continue
        try:
            if not file.resolve().is_relative_to(top):
                return file
        except (OSError, RuntimeError):  # a loop of links
            return file
    return None


def _names(file: Path) -> set[str]:
    """Return the globals in the pickle that torch does not allow by default."""
    return set(torch.serialization.get_unsafe_globals_in_checkpoint(file))


def _fault_of(file: Path) -> str:
    try:
        unknown = sorted(_names(file) - set(KNOWN_GLOBALS))
    except (RuntimeError, ValueError, OSError, EOFError, IndexError, pickle.UnpicklingError):
        # Also a file of torch before 1.6, which is not an archive: torch.load would load it unchecked.
        return "is incomplete, or not an archive of torch.save"
    return f"would run {unknown[0]} when it is loaded" if unknown else ""


def load(file: Path):
    """Load one file, memory-mapped.

    Raises: UserError for a file that is damaged or contains unknown globals.
    """
    if reason := _fault_of(file):
        raise UserError(f"{file}: {reason}; use another checkpoint.")
    with torch.serialization.safe_globals(_allowed(_names(file))):
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def _allowed(names) -> list[tuple]:
    """Return (object, name) of each name, as torch.serialization.safe_globals takes them."""
    allowed = []
    for name in names:
        module, _, attribute = name.rpartition(".")
        with contextlib.suppress(ImportError, AttributeError):  # numpy of another version
            allowed.append((getattr(importlib.import_module(module), attribute), name))
    if "numpy.dtype" in names:  # loading creates a dtype class that the pickle does not name
        allowed.append((type(numpy.dtype(numpy.uint32)), "numpy.dtypes.UInt32DType"))
    return allowed


@contextlib.contextmanager
def known_globals_only():
    """Restrict every torch.load in the context to known globals, including DeepSpeed's with weights_only=False."""
    before = {name: os.environ.get(name) for name in (FORCE, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")}
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)  # torch rejects both together
    os.environ[FORCE] = "1"
    try:
        with torch.serialization.safe_globals(_allowed(KNOWN_GLOBALS)):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
