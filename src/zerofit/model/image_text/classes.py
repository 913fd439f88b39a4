"""Find the class that a checkpoint is loaded with, and its towers; build that class without them.

Text needs neither towers nor projectors. A class without them keeps its name and the names of its other modules, so
that checkpoints, adapters and upstream's conversions of names are those of the original class.
"""

import contextlib
import copy
import functools
import json
import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto import modeling_auto

from zerofit.base.errors import first_line
from zerofit.model.fused_loss import attribute, outputs_of_any_class
from zerofit.model.image_text import saved


def has_towers(config) -> bool:
    """Return whether the config is of an image-text class with a language model of its own inside."""
    of_images, own_code = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, hasattr(config, "auto_map")
    return type(config) in of_images and config.get_text_config() is not config and not own_code


def auto_class(config):
    """Return the class of transformers' automatic ones that loads the whole checkpoint.

    Mistral 4's language model is known to that of images alone.
    """
    of_images, of_text = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    only_there = type(config) in of_images and type(config) not in of_text
    return AutoModelForImageTextToText if has_towers(config) or only_there else AutoModelForCausalLM


def text_class(config):
    """Return transformers' class of the layers that text goes through; None if it has none (remote code)."""
    of_images, of_text = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if not has_towers(config):
        return of_text.get(type(config), None) or of_images.get(type(config), None)
    text = type(config.get_text_config())
    return of_text.get(text, None) or modeling_auto.MODEL_MAPPING.get(text, None)


def towers_of(model) -> tuple[str, ...]:
    """Return the names of the modules and parameters beside the language model and its head."""
    text, head = model.get_decoder(), model.get_output_embeddings()
    path = next((name for name, module in model.named_modules() if module is text), "")
    found, outer, prefix = [], model, ""
    for word in path.split(".") if path else ():
        children = ((name, child) for name, child in outer.named_children() if name != word)
        found += [prefix + name for name, child in children if not any(part is head for part in child.modules())]
        found += [prefix + name for name, _ in outer.named_parameters(recurse=False)]
        outer, prefix = getattr(outer, word), f"{prefix}{word}."
    return tuple(found)


def holds(towers, name: str) -> bool:
    """Return whether a weight of this name is one of the towers'."""
    return any(name == tower or name.startswith(f"{tower}.") for tower in towers)


@functools.cache
def _for_text(original: type, towers: tuple[str, ...], drop: bool) -> type:
    """Return the class to train on text, with or without its towers.

    It has the name of the original one, of which upstream's conversions and config.json are. Where the towers are left
    out, the weights that files have for them are no unexpected ones.
    """

    def build(self, *args, **kwargs):
        original.__init__(self, *args, **kwargs)
        if drop:
            remove(self, towers)

    def save(self, folder, is_main_process: bool = True, state_dict: dict | None = None, **kwargs):
        if self.base_folder is None:  # random towers, which no file has
            return original.save_pretrained(self, folder, is_main_process, state_dict, **kwargs)
        weights = self.state_dict() if state_dict is None else state_dict
        tied = self.all_tied_weights_keys  # DeepSpeed's have a tied head a second time
        left = {name for name in weights if holds(towers, name) or tied.get(name) in weights}
        weights = {name: weight for name, weight in weights.items() if name not in left}
        original.save_pretrained(self, folder, is_main_process, weights, **kwargs)
        if is_main_process:
            saved.add_towers(Path(folder), self.base_folder, self.of_towers)
        return None

    ignored = [*(original._keys_to_ignore_on_load_unexpected or ()), *(rf"^{re.escape(t)}\." for t in towers)]
    own = {"towers": towers, "base_folder": None, "of_towers": (), "__init__": build, "save_pretrained": save}
    own["_keys_to_ignore_on_load_unexpected"] = ignored if drop else original._keys_to_ignore_on_load_unexpected
    own["accepts_loss_kwargs"] = True  # upstream's losses divide by what they are given; some deny it for images
    return type(original.__name__, (original,), own | {"__module__": original.__module__, "__doc__": original.__doc__})


def for_text(config, drop: bool) -> type:
    """Return the class to train on text: the original one, or without its towers."""
    original, towers, *_ = examined(config)
    return _for_text(original, towers, drop)


def names_of_towers(config, names) -> list[str]:
    """Return which of the names in a checkpoint's files are those of its towers."""
    if not has_towers(config):
        return []
    _, towers, *_ = examined(config)
    return [name for name, (renamed, _) in _in_model(config, names).items() if holds(towers, renamed)]


def file_names(config, names) -> dict[str, str]:
    """Return {name in the model: name in files} of an image-text checkpoint's tensors that are loaded as they are.

    {} for another model, whose names in files are its own.
    """
    if not has_towers(config):
        return {}
    return {renamed: name for name, (renamed, whole) in _in_model(config, names).items() if whole}


def _in_model(config, names) -> dict[str, tuple[str, bool]]:
    """Return what `saved.conversions_of` tells of names in files; an export asks several times for the same ones."""
    return _converted(config.to_json_string(use_diff=False), type(config), tuple(names))


@functools.lru_cache(maxsize=4)
def _converted(config_json: str, config_class: type, names: tuple[str, ...]) -> dict[str, tuple[str, bool]]:
    return saved.conversions_of(skeleton(config_class.from_dict(json.loads(config_json))), names)[1]


def remove(model, towers) -> None:
    """Remove the modules; a single parameter stays, as upstream's own initialization looks for it (LLaVA-NeXT)."""
    for tower in towers:
        outer, _, name = tower.rpartition(".")
        if isinstance(getattr(model.get_submodule(outer), name), torch.nn.Module):
            delattr(model.get_submodule(outer), name)


# --- what text needs of a class ---


@functools.cache
def _examined(config_json: str, config_class: type) -> tuple[type, tuple[str, ...], str, str]:
    """Return the class, its towers, why text cannot go through it, and why not without its towers; "" if it can."""
    model = skeleton(config_class.from_dict(json.loads(config_json)))
    towers = towers_of(model)
    if not towers:
        return type(model), (), "it has no language model beside its towers", ""
    cannot = _why_no_text(model)
    remove(model, towers)
    return type(model), towers, cannot, cannot or _why_no_text(model)


def examined(config) -> tuple[type, tuple[str, ...], str, str]:
    """Return what `_examined` does for a configuration, whose class is built once in a process."""
    return _examined(config.to_json_string(use_diff=False), type(config))


def skeleton(config):
    """Return the model of the original class without memory for its weights; not sharded under ZeRO-3."""
    from transformers.modeling_utils import set_zero3_state

    with torch.device("meta"), set_zero3_state():
        return auto_class(config).from_config(copy.deepcopy(config))


def _why_no_text(model) -> str:
    """Return the error with which the class refuses text, "" if it takes it.

    Everything but the layers and the head is computed with values, of weights that take no memory: what the class does
    beside its layers may depend on them (Gemma's masks), and some use a projector for text too (Gemma-3n).
    """
    text, head = model.get_decoder(), model.get_output_embeddings()
    width = model.config.get_text_config().hidden_size
    hidden = torch.zeros(1, 4, width)
    logits = torch.zeros(1, 4, 2)
    ids = torch.ones(1, 4, dtype=torch.long)
    outputs = outputs_of_any_class()(last_hidden_state=hidden)
    outputs.logits = logits  # of a whole causal model inside (Llama-4)
    _without_memory(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(attribute(text, "forward", lambda *_, **__: outputs))
        stack.enter_context(attribute(head, "forward", lambda *_, **__: logits))
        try:
            with torch.no_grad():
                model.train().forward(input_ids=ids, position_ids=torch.arange(4)[None], use_cache=False)
        except Exception as error:  # of any class: what a class does with a tower that is not there
            return f"{type(error).__name__}: {first_line(error)}"
    return ""


def _without_memory(model) -> None:
    """Replace weights and buffers by zeros of their shapes that all lie at one address."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            setattr(module, name, torch.nn.Parameter(zeros, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros((), dtype=buffer.dtype).expand(buffer.shape))
