"""Check that an adapter's target names match its base, and that its file contains all of its weights."""

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

SECONDS = 5  # time limit for an expression and the names of all modules, which usually takes milliseconds

# Field of peft's configurations -> the expression that peft compares with the full name of a module.
NAMES = {
    **dict.fromkeys(("target_modules", "feedforward_modules", "exclude_modules"), r"(.*\.)?{}"),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), r"(.*\.)?({})"),
    "layers_to_transform": r".*\.{}\..*",
    "layers_pattern": r"(.*\.)?{}\.\d+\..*",
    "modules_to_save": r"(.*\.)?{}(\..*)?",
}


def expressions(config, field: str) -> dict[str, str]:
    """Return {entry: expression} for a field of peft's configuration; a single string is already an expression."""
    value = getattr(config, field, None)
    if value in (None, "", "all-linear"):
        return {}
    if isinstance(value, str) and field != "layers_pattern":
        return {value: value}
    is_names = field in ("target_modules", "feedforward_modules", "exclude_modules")
    entries = [str(entry) for entry in ([value] if isinstance(value, str | int) else value)]
    return {entry: NAMES[field].format(re.escape(entry) if is_names else entry) for entry in entries}


def check_expressions(config, model, place: str) -> None:
    """Raise UserError for an expression in an adapter's configuration that is invalid or takes too long."""
    names = [name for name, _ in model.named_modules()]
    for field in NAMES:
        for entry, expression in expressions(config, field).items():
            try:
                with process.time_limit(SECONDS):
                    for name in names:
                        re.fullmatch(expression, name)
            except (re.error, TimeoutError) as error:
                raise UserError(
                    f"{place}: {field} {entry} cannot be matched with the model's names: {error}; correct it."
                ) from None


def unmatched(config, field: str, names, model) -> tuple[str, str] | None:
    """Return (an entry that matches none of the names, advice with similar names); None if all entries match."""
    for entry, expression in expressions(config, field).items():
        if not any(re.fullmatch(expression, name) for name in names):
            ends = {end for name, _ in model.named_modules() for end in (name, name.rpartition(".")[2])} - {entry}
            close = get_close_matches(entry, sorted(ends), 3)
            return entry, f"did you mean {' or '.join(close)}?" if close else "correct it or leave it out."
    return None


def check(folder: Path, base: Path, remote: bool = False) -> None:
    """Raise UserError if the adapter's file lacks weights, has unexpected weights, or contains NaN.

    Args: base: the folder of its base model; remote: --trust_remote_code.
    """
    finite.check(load_file(folder / FILE), str(folder), FILE)
    in_file = files.tensors(folder / FILE).keys()
    expected = _names(folder, base, remote)
    if missing := sorted(expected - in_file):
        raise UserError(
            f"{folder}: {len(missing)} of the adapter's {len(expected)} weights are not in {FILE} and would be random "
            f"numbers or zero: {listed(missing)}. The copy is incomplete, or adapter_config.json is of another adapter."
        )
    # peft also loads a full embedding, which may be saved in the same file.
    kinds = {_kind(name) for name in expected}
    if expected and (others := sorted(name for name in in_file - expected if _kind(name) in kinds)):
        raise UserError(
            f"{folder}: {len(others)} weights of the adapter do not exist in its base {base} and would be ignored: "
            f"{listed(others)}. Set the base that it was trained on with --base."
        )


def _kind(name: str) -> str:
    """Return the kind of a weight, e.g. lora_A for "....q_proj.lora_A.weight"."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _names(folder: Path, base: Path, remote: bool) -> set[str]:
    """Return the names of the adapter's weights on a base without memory; an empty set if peft cannot build it.

    Raises: as `check_expressions`.
    """
    try:
        config = PeftConfig.from_pretrained(folder)
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = True  # other values compute with the base's weights
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # loading the adapter repeats them
            base_config = AutoConfig.from_pretrained(base, trust_remote_code=remote)
            model = classes.auto_class(base_config).from_config(base_config, trust_remote_code=remote)
            check_expressions(config, model, str(folder))
            return set(get_peft_model_state_dict(get_peft_model(model, config), save_embedding_layers=False))
    except UserError:
        raise
    except Exception as error:  # the adapter needs values; loading it will report errors
        if missing := re.match(r"The required package '([\w-]+)'", str(error)):  # scipy for init_lora_weights loftq
            raise UserError(f"{folder}: peft needs {missing[1]} to read it: pip install {missing[1]}.") from None
        return set()
