"""Check a model's config.json, and correct it where the files of weights say otherwise: a head that is not tied."""

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

MOST = 10_000  # layers, and entries of other lists of modules; a model is built of them before its size is known

LISTS = re.compile(r"depth|(n|num)_(hidden_)?layers?|(n|num)_.*(layers|blocks)|.*_layers", re.IGNORECASE)

SHARES = re.compile(r".*(dropout|pdrop)(_rate|_prob)?")

OFF = {"output_attentions": False, "output_hidden_states": False, "return_dict": True}  # as each step needs them

ROWS = 4096  # of the two matrices, compared at a time


def config_of(folder: Path, remote: bool = False):
    """Return a model's configuration, whose tie_word_embeddings is false if the files hold a head that differs."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=remote)
    untie(config, folder)
    return config


def check(config, file: Path, place: str) -> None:
    """Refuse a config.json with a key twice, and numbers of which no model can be built or trained.

    transformers builds a million layers without an end, and checks few of the numbers. Raises: UserError.
    """
    if file.is_file():
        try:
            json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=without_repeated_keys)
        except RepeatedKey as error:
            raise UserError(f"{place}: config.json has the key {error.key!r} twice; keep one of them.") from None
    for key, value in _numbers(config.to_dict()):
        if LISTS.fullmatch(key) and value > MOST:
            raise UserError(f"{place}: config.json asks for {key} {value:,}, and no model has more than {MOST:,}.")
        if SHARES.fullmatch(key) and not 0 <= value < 1:
            raise UserError(f"{place}: config.json: {key} {value} must be from 0 to below 1.")
    if not isinstance(getattr(config, "architectures", None) or [], list):
        raise UserError(f"{place}: config.json: architectures {config.architectures} must be a list of names.")
    text = config.get_text_config(decoder=True)  # of an encoder-decoder model, which is refused by its class
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise UserError(f"{place}: config.json: num_hidden_layers {layers}: such a model has no layers to train.")
    if getattr(text, "is_heterogeneous", False):
        return  # each layer has numbers of heads of its own, and the whole one refuses to name any
    heads, shared = (getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        raise UserError(f"{place}: config.json: {heads} attention heads cannot share {shared} heads of keys evenly.")


def _numbers(values: dict):
    """Yield (key, number) of a configuration and of those inside of it."""
    for key, value in values.items():
        if not isinstance(key, str):  # a map between numbers, as Aria's of patches
            continue
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


def without_outputs(config) -> list[str]:
    """Turn off the outputs that training does not read, which not every attention has; return their names."""
    parts = (config, config.get_text_config(decoder=True))
    found = [name for name, value in OFF.items() if any(getattr(part, name, value) != value for part in parts)]
    for part in parts:
        for name in found:
            setattr(part, name, OFF[name])
    return found


def untie(config, folder: Path) -> str:
    """Set tie_word_embeddings to false if the files hold a head that is not the embedding; return its name, else "".

    transformers trains such a head as a weight of its own (but ties it at ZeRO-3, where it compares empty tensors), and
    saves a config.json that says true, by which others load another model.
    """
    if not getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False):
        return ""
    try:
        shards = tuple((file, file.stat().st_mtime_ns) for file in files.of_model(folder, str(folder)))
        head = _separate_head(shards)
    except (UserError, OSError, ValueError):  # no files yet, or damaged ones: said elsewhere
        return ""
    for part in (config, config.get_text_config(decoder=True)) if head else ():
        part.tie_word_embeddings = False
    return head


@functools.lru_cache(maxsize=4)
def _separate_head(shards: tuple[tuple[Path, int], ...]) -> str:
    """Return the name of the head in these files, "" if it is the embedding. Args: shards: with their times."""
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
    """Return the one weight of a module of these names, "" if there is none or several."""
    found = [name for name in names if name.endswith(tuple(f"{module}.weight" for module in modules))]
    return found[0] if len(found) == 1 else ""
