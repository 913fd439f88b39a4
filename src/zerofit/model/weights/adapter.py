"""Check that an adapter's names are in its base, and that its file has every weight that they ask for."""

import re
import warnings
from difflib import get_close_matches
from pathlib import Path

import torch
from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoConfig

from zerofit.base import process
from zerofit.base.errors import UserError
from zerofit.model.image_text import classes
from zerofit.model.weights import files, finite
from zerofit.model.weights.complete import listed

FILE = "adapter_model.safetensors"

SECONDS = 5  # for an expression and the names of all modules: a usual one takes milliseconds

# Field of peft's configurations -> the expression by which it compares an entry with the whole name of a module.
NAMES = {
    **dict.fromkeys(("target_modules", "feedforward_modules", "exclude_modules"), r"(.*\.)?{}"),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), r"(.*\.)?({})"),
    "layers_to_transform": r".*\.{}\..*",
    "layers_pattern": r"(.*\.)?{}\.\d+\..*",
    "modules_to_save": r"(.*\.)?{}(\..*)?",
}


def expressions(config, field: str) -> dict[str, str]:
    """Return {entry: its expression} of a field of peft's configuration; a text alone is one already, names are not."""
    value = getattr(config, field, None)
    if value in (None, "", "all-linear"):
        return {}
    if isinstance(value, str) and field != "layers_pattern":
        return {value: value}
    is_names = field in ("target_modules", "feedforward_modules", "exclude_modules")
    entries = [str(entry) for entry in ([value] if isinstance(value, str | int) else value)]
    return {entry: NAMES[field].format(re.escape(entry) if is_names else entry) for entry in entries}


def check_expressions(config, model, place: str) -> None:
    """Raise UserError for an expression in an adapter's configuration that is not valid, or takes too long."""
    names = [name for name, _ in model.named_modules()]
    for field in NAMES:
        for entry, expression in expressions(config, field).items():
            try:
                with process.time_limit(SECONDS):
                    for name in names:
                        re.fullmatch(expression, name)
            except (re.error, TimeoutError) as error:
                raise UserError(
                    f"{place}: {field} {entry} is no expression that can be compared with the model's names: {error}."
                ) from None


def unmatched(config, field: str, names, model) -> tuple[str, str] | None:
    """Return (an entry that none of these names match, near names of the model as a question); None if all match."""
    for entry, expression in expressions(config, field).items():
        if not any(re.fullmatch(expression, name) for name in names):
            ends = {end for name, _ in model.named_modules() for end in (name, name.rpartition(".")[2])} - {entry}
            close = get_close_matches(entry, sorted(ends), 3)
            return entry, f"did you mean {' or '.join(close)}?" if close else "leave it out, or name one that is there."
    return None


def check(folder: Path, base: Path, remote: bool = False) -> None:
    """Raise UserError if the adapter lacks weights, which peft would leave as drawn, others, or NaN.

    Args: base: the folder of its base model; remote: --trust_remote_code.
    """
    finite.check(load_file(folder / FILE), str(folder), FILE)
    held = files.tensors(folder / FILE).keys()
    expected = _names(folder, base, remote)
    if missing := sorted(expected - held):
        raise UserError(
            f"{folder}: {len(missing)} of the adapter's {len(expected)} weights are not in {FILE} and would be random "
            f"numbers or zero: {listed(missing)}. The copy is not complete, or adapter_config.json is of another one."
        )
    # An embedding that was saved as a whole beside them is the base's own, and peft loads it.
    kinds = {_kind(name) for name in expected}
    if expected and (others := sorted(name for name in held - expected if _kind(name) in kinds)):
        raise UserError(
            f"{folder}: {len(others)} weights of the adapter have no place in its base {base} and would be left out: "
            f"{listed(others)}. Name the base that it was trained on with --base."
        )


def _kind(name: str) -> str:
    """Return what a weight is, e.g. lora_A of "....q_proj.lora_A.weight"."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _names(folder: Path, base: Path, remote: bool) -> set[str]:
    """Return the names of the adapter's weights on a base without memory; none where peft cannot build it so.

    Raises: as `check_expressions`.
    """
    try:
        config = PeftConfig.from_pretrained(folder)
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = True  # others compute with the base's weights
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come again when it is loaded
            base_config = AutoConfig.from_pretrained(base, trust_remote_code=remote)
            model = classes.auto_class(base_config).from_config(base_config, trust_remote_code=remote)
            check_expressions(config, model, str(folder))
            return set(get_peft_model_state_dict(get_peft_model(model, config), save_embedding_layers=False))
    except UserError:
        raise
    except Exception as error:  # a kind of adapter that needs values: loading it decides
        if missing := re.match(r"The required package '([\w-]+)'", str(error)):  # scipy, of init_lora_weights loftq
            raise UserError(f"{folder}: peft reads it with {missing[1]} alone: pip install {missing[1]}.") from None
        return set()
