"""Check a model's config.json, and untie the head if the weight files contain a separate one."""

import contextlib
import functools
import json
import re
from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig

from zerofit.base.errors import UserError
from zerofit.job.settings_file import RepeatedKey, without_repeated_keys
from zerofit.model.weights import files

EMBEDDINGS, HEADS = ("embed_tokens", "wte", "embed_in", "word_embeddings"), ("lm_head", "embed_out")  # modules

MAX_MODULES = 10_000  # limit for layers and other lists of modules, checked before the model is built

LISTS = re.compile(r"depth|(n|num)_(hidden_)?layers?|(n|num)_.*(layers|blocks)|.*_layers", re.IGNORECASE)

SHARES = re.compile(r".*(dropout|pdrop)(_rate|_prob)?")

TRAINING_VALUES = {"output_attentions": False, "output_hidden_states": False, "return_dict": True}

ROWS = 4096  # number of rows of the two matrices that are compared at a time


def config_of(folder: Path, remote: bool = False):
    """Return a model's configuration, with tie_word_embeddings false if the files contain a separate head."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=remote)
    untie(config, folder)
    return config


def check(config, file: Path, place: str) -> None:
    """Raise UserError for a config.json with a repeated key, or with numbers from which no model can be built.

    transformers checks few of the numbers, and building a million layers would not end.
    """
    if file.is_file():
        try:
            json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=without_repeated_keys)
        except RepeatedKey as error:
            raise UserError(f"{place}: config.json has the key {error.key!r} twice; delete one.") from None
    for key, value in _numbers(config.to_dict()):
        if LISTS.fullmatch(key) and value > MAX_MODULES:
            raise UserError(f"{place}: config.json: {key} {value:,} must be at most {MAX_MODULES:,}.")
        if SHARES.fullmatch(key) and not 0 <= value < 1:
            raise UserError(f"{place}: config.json: {key} {value} must be from 0 to below 1.")
    if not isinstance(getattr(config, "architectures", None) or [], list):
        raise UserError(f"{place}: config.json: architectures {config.architectures} must be a list of names.")
    text = config.get_text_config(decoder=True)  # encoder-decoder models are rejected later, by their class
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise UserError(f"{place}: config.json: num_hidden_layers {layers} must be 1 or more.")
    if getattr(text, "is_heterogeneous", False):
        return  # the numbers of heads differ between layers, and the configuration as a unit does not have any
    heads, shared = (getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        raise UserError(f"{place}: config.json: {heads} attention heads is not a multiple of {shared} key heads.")


def _numbers(values: dict):
    """Yield (key, number) of a configuration and of nested configurations."""
    for key, value in values.items():
        if not isinstance(key, str):  # a map between numbers, such as Aria's patches
            continue
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


def without_outputs(config) -> list[str]:
    """Turn off outputs that training does not use, and not every attention supports; return the changed names."""
    parts = (config, config.get_text_config(decoder=True))
    values = TRAINING_VALUES.items()
    changed = [name for name, value in values if any(getattr(part, name, value) != value for part in parts)]
    for part in parts:
        for name in changed:
            setattr(part, name, TRAINING_VALUES[name])
    return changed


def ties(config) -> bool:
    """Return whether a model of this configuration has one weight for embedding and head.

    The outermost configuration decides, as in transformers: the text part may lack the key or differ.
    """
    return bool(getattr(config, "tie_word_embeddings", False))


def untie(config, folder: Path) -> str:
    """Set tie_word_embeddings to false if the files contain a separate head; return the head's name, else "".

    transformers trains such a head as a separate weight (but ties it at ZeRO-3, where it compares empty tensors), and
    saves a config.json with true, so that other programs would load another model.
    """
    if not ties(config):
        return ""
    try:
        shards = tuple((file, file.stat().st_mtime_ns) for file in files.of_model(folder, str(folder)))
        head = _separate_head(shards)
    except (UserError, OSError, ValueError):  # missing or damaged files are reported elsewhere
        return ""
    for part in (config, config.get_text_config(decoder=True)) if head else ():
        part.tie_word_embeddings = False
    return head


@functools.lru_cache(maxsize=4)
def _separate_head(shards: tuple[tuple[Path, int], ...]) -> str:
    """Return the name of the head in the files, "" if it equals the embedding. Args: shards: (file, mtime)."""
    where = {name: file for file, _ in shards for name in files.tensors(file)}
    names = [_only(where, modules) for modules in (HEADS, EMBEDDINGS)]
    if not all(names):
        return ""
    with contextlib.ExitStack() as stack:
        head, table = (stack.enter_context(safe_open(where[name], "pt")).get_slice(name) for name in names)
        rows, differs = head.get_shape()[0], False
        for start in range(0, rows if head.get_shape() == table.get_shape() else 0, ROWS):
            differs = differs or not head[start : start + ROWS].float().equal(table[start : start + ROWS].float())
    return names[0] if differs else ""


def _only(names, modules) -> str:
    """Return the only weight of a module with one of these names; "" for several or no such weights."""
    matches = [name for name in names if name.endswith(tuple(f"{module}.weight" for module in modules))]
    return matches[0] if len(matches) == 1 else ""
