"""Read a checkpoint's weights under the names of a built model, if its files use other names."""

import copy
from pathlib import Path

import torch

from zerofit.base.errors import UserError, first_line
from zerofit.model.weights import complete, files


def load(model, folder: Path) -> bool:
    """Load a full checkpoint whose files use other names than the model; return False, without reading, otherwise.

    Raises: UserError as `read`.
    """
    if (weights := read(model, folder)) is None:
        return False
    model.load_state_dict(weights)
    return True


def read(model, folder: Path) -> dict | None:
    """Return {name in the model: tensor on the CPU}; None if the files use the model's names or lack a full model.

    transformers merges the experts of a mixture when loading, and splits them when saving, but its Trainer reads a
    checkpoint without conversion. Raises: UserError for weights that are missing, unexpected or of another shape.
    """
    if hasattr(model, "peft_config") or files_have_names_of(model, folder):
        return None
    try:
        with complete.without_report(), complete.without_logs():
            loaded, info = type(model).from_pretrained(
                folder,
                config=copy.deepcopy(model.config),
                dtype=torch.float32,  # exact for all dtypes of weights and master weights
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception as error:  # e.g. one of the experts to merge is missing
        raise UserError(
            f"{folder}: its weights cannot be loaded as {type(model).__name__} ({first_line(error)}); it is incomplete "
            "or of another model, use another checkpoint."
        ) from error
    names = complete.loaded_names(loaded, info)
    check_names(folder, names.missing, names.unexpected, names.mismatched)
    return loaded.state_dict()


def files_have_names_of(model, folder: Path) -> bool:
    """Return whether the model has all names in the files; also True without safetensors of a full model."""
    try:
        names = {name for file in files.of_model(folder, str(folder)) for name in files.tensors(file)}
    except UserError:
        return True
    return names <= model.state_dict().keys()


def check_names(place, missing, unexpected, mismatched=()) -> None:
    """Raise UserError if a checkpoint has missing or unexpected weights, or weights of another shape."""
    if missing or unexpected:
        what = "lacks" if missing else "contains unexpected weights:"
        listed = complete.listed(sorted(missing or unexpected))
        raise UserError(f"{place} {what} {listed}; it is incomplete or of another model, use another checkpoint.")
    if mismatched:
        name, saved, built = mismatched[0]
        raise UserError(f"{place} has {name} in shape {saved} instead of {built}; use another checkpoint.")
