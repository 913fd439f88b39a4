"""Read a checkpoint's weights under the names of a model that is built, where its files have other names."""

import copy
from pathlib import Path

import torch

from zerofit.base.errors import UserError, first_line
from zerofit.model.weights import complete, files


def load(model, folder: Path) -> bool:
    """Load a full checkpoint whose files have other names than the model; False, with nothing read, for any other.

    Raises: UserError as `read`.
    """
    if (weights := read(model, folder)) is None:
        return False
    model.load_state_dict(weights)
    return True


def read(model, folder: Path) -> dict | None:
    """Return {name in the model: tensor on the CPU}, None if the files have the model's names or are no full model's.

    transformers merges the experts of a mixture as it loads, and splits them again as it saves; its Trainer reads a
    checkpoint without either. Raises: UserError for weights that are missing, left over or of another shape.
    """
    if hasattr(model, "peft_config") or files_have_names_of(model, folder):
        return None
    try:
        with complete.without_report(), complete.without_words():
            loaded, info = type(model).from_pretrained(
                folder,
                config=copy.deepcopy(model.config),
                dtype=torch.float32,  # of which each type of a model's weights is a part, and of an optimizer's copies
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception as error:  # e.g. one of the experts that are merged is missing
        raise UserError(
            f"{folder}: its weights do not fit together as those of {type(model).__name__} ({first_line(error)}): it "
            "is of another model, or not complete."
        ) from error
    names = complete.of_loaded(loaded, info)
    refuse(folder, names.missing, names.unexpected, names.mismatched)
    return loaded.state_dict()


def files_have_names_of(model, folder: Path) -> bool:
    """Return whether the model has all names in the files; True as well if there are no safetensors of a full model."""
    try:
        names = {name for file in files.of_model(folder, str(folder)) for name in files.tensors(file)}
    except UserError:
        return True
    return names <= model.state_dict().keys()


def refuse(place, missing, unexpected, mismatched=()) -> None:
    """Raise UserError if a checkpoint lacks weights, or has others, or has them in another shape."""
    if missing or unexpected:
        what = "lacks" if missing else "has no place in this model for"
        listed = complete.listed(sorted(missing or unexpected))
        raise UserError(f"{place} {what} {listed}: it is of another model, or not complete.")
    if mismatched:
        name, saved, own = mismatched[0]
        raise UserError(f"{place} has {name} in shape {saved} instead of {own}: it is of another model.")
