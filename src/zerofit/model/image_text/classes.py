"""Find the class of an image-text checkpoint, and its towers; build the class without them.

Text needs neither towers nor projectors. A class without them keeps its name and the names of its other modules, so
that checkpoints, adapters and transformers' name conversions do not change.
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
from zerofit.model import patches
from zerofit.model.fused_loss import attribute, outputs_of_any_class
from zerofit.model.image_text import saved


def has_towers(config) -> bool:
    """Return whether the config is of an image-text class that contains a separate language model."""
    image_text, has_code = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, hasattr(config, "auto_map")
    return type(config) in image_text and config.get_text_config() is not config and not has_code


def auto_class(config):
    """Return transformers' automatic class that loads the full checkpoint.

    The language model of Mistral 4 is only registered for images.
    """
    image_text, text = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    is_image_text = type(config) in image_text and type(config) not in text
    return AutoModelForImageTextToText if has_towers(config) or is_image_text else AutoModelForCausalLM


def text_class(config):
    """Return transformers' class of the language model; None for remote code."""
    image_text, text = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if not has_towers(config):
        return text.get(type(config), None) or image_text.get(type(config), None)
    kind = type(config.get_text_config())
    return text.get(kind, None) or modeling_auto.MODEL_MAPPING.get(kind, None)


def towers_of(model) -> tuple[str, ...]:
    """Return the names of all modules and parameters outside of the language model and its head."""
    text, head = model.get_decoder(), model.get_output_embeddings()
    path = next((name for name, module in model.named_modules() if module is text), "")
    towers, outer, prefix = [], model, ""
    for word in path.split(".") if path else ():
        children = ((name, child) for name, child in outer.named_children() if name != word)
        towers += [prefix + name for name, child in children if not any(part is head for part in child.modules())]
        towers += [prefix + name for name, _ in outer.named_parameters(recurse=False)]
        outer, prefix = getattr(outer, word), f"{prefix}{word}."
    return tuple(towers)


def holds(towers, name: str) -> bool:
    """Return whether a weight of this name belongs to the towers."""
    return any(name == tower or name.startswith(f"{tower}.") for tower in towers)


@functools.cache
def _for_text(original: type, towers: tuple[str, ...], drop: bool) -> type:
    """Return the class to train on text, with or without its towers.

    It has the original name, which transformers' conversions and config.json use. If the towers are dropped, their
    weights in the files are not reported as unexpected.
    """

    def build(self, *args, **kwargs):
        original.__init__(self, *args, **kwargs)
        if drop:
            remove(self, towers)

    def save(self, folder, is_main_process: bool = True, state_dict: dict | None = None, **kwargs):
        if self.base_folder is None:  # random towers are not in files
            return original.save_pretrained(self, folder, is_main_process, state_dict, **kwargs)
        weights = self.state_dict() if state_dict is None else state_dict
        tied = self.all_tied_weights_keys  # DeepSpeed's state_dict repeats a tied head
        excluded = {name for name in weights if holds(towers, name) or tied.get(name) in weights}
        weights = {name: weight for name, weight in weights.items() if name not in excluded}
        original.save_pretrained(self, folder, is_main_process, weights, **kwargs)
        if is_main_process:
            saved.add_towers(Path(folder), self.base_folder, self.tower_names)
        return None

    ignored = [*(original._keys_to_ignore_on_load_unexpected or ()), *(rf"^{re.escape(t)}\." for t in towers)]
    members = {"towers": towers, "base_folder": None, "tower_names": (), "__init__": build, "save_pretrained": save}
    members["_keys_to_ignore_on_load_unexpected"] = ignored if drop else original._keys_to_ignore_on_load_unexpected
    members["accepts_loss_kwargs"] = True  # the losses divide by num_items_in_batch, though some classes deny it
    members |= {"__module__": original.__module__, "__doc__": original.__doc__}
    return type(original.__name__, (original,), members)


def for_text(config, drop: bool) -> type:
    """Return the class to train on text, with or without its towers."""
    original, towers, *_ = examined(config)
    if config.model_type == "llama4":
        patches.give_llama4_image_outputs()
    return _for_text(original, towers, drop)


def names_of_towers(config, names) -> list[str]:
    """Return the names in a checkpoint's files that belong to its towers."""
    if not has_towers(config):
        return []
    _, towers, *_ = examined(config)
    return [name for name, (renamed, _) in _in_model(config, names).items() if holds(towers, renamed)]


def file_names(config, names) -> dict[str, str]:
    """Return {name in the model: name in the files} of an image-text checkpoint's tensors that are only renamed.

    {} for other models, whose names in files and model are the same.
    """
    if not has_towers(config):
        return {}
    return {renamed: name for name, (renamed, is_renamed) in _in_model(config, names).items() if is_renamed}


def _in_model(config, names) -> dict[str, tuple[str, bool]]:
    """Return the result of `saved.conversions_of` for names in files, cached as an export repeats the call."""
    return _converted(config.to_json_string(use_diff=False), type(config), tuple(names))


@functools.lru_cache(maxsize=4)
def _converted(config_json: str, config_class: type, names: tuple[str, ...]) -> dict[str, tuple[str, bool]]:
    return saved.conversions_of(skeleton(config_class.from_dict(json.loads(config_json))), names)[1]


def remove(model, towers) -> None:
    """Remove the modules. A single parameter stays, because transformers initializes it (LLaVA-NeXT)."""
    for tower in towers:
        outer, _, name = tower.rpartition(".")
        if isinstance(getattr(model.get_submodule(outer), name), torch.nn.Module):
            delattr(model.get_submodule(outer), name)


# --- training a class on text ---


@functools.cache
def _examined(config_json: str, config_class: type) -> tuple[type, tuple[str, ...], str, str]:
    """Return the class, its towers, why it cannot take text, and why not without its towers; "" if it can."""
    model = skeleton(config_class.from_dict(json.loads(config_json)))
    towers = towers_of(model)
    if not towers:
        return type(model), (), "it does not contain a language model outside of its towers", ""
    reason = _why_not_text(model)
    remove(model, towers)
    return type(model), towers, reason, reason or _why_not_text(model)


def examined(config) -> tuple[type, tuple[str, ...], str, str]:
    """Return the result of `_examined` for a configuration, whose class is built once per process."""
    return _examined(config.to_json_string(use_diff=False), type(config))


def skeleton(config):
    """Return the model of the original class without memory for its weights, not sharded under ZeRO-3."""
    from transformers.modeling_utils import set_zero3_state

    with torch.device("meta"), set_zero3_state():
        return auto_class(config).from_config(copy.deepcopy(config))


def _why_not_text(model) -> str:
    """Return the error of the class for text, "" if it accepts text.

    Everything except the layers and the head is computed with values, with weights that take no memory: other code of
    the class may depend on values (Gemma's masks), and some classes use a projector for text too (Gemma-3n).
    """
    text, head = model.get_decoder(), model.get_output_embeddings()
    width = model.config.get_text_config().hidden_size
    hidden = torch.zeros(1, 4, width)
    logits = torch.zeros(1, 4, 2)
    ids = torch.ones(1, 4, dtype=torch.long)
    outputs = outputs_of_any_class()(last_hidden_state=hidden)
    outputs.logits = logits  # for a causal model inside (Llama-4)
    _without_memory(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(attribute(text, "forward", lambda *_, **__: outputs))
        stack.enter_context(attribute(head, "forward", lambda *_, **__: logits))
        try:
            with torch.no_grad():
                model.train().forward(input_ids=ids, position_ids=torch.arange(4)[None], use_cache=False)
        except Exception as error:  # classes raise various errors for a missing tower
            return f"{type(error).__name__}: {first_line(error)}"
    return ""


def _without_memory(model) -> None:
    """Replace weights and buffers by zeros of their shapes that share one number in memory."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
            setattr(module, name, torch.nn.Parameter(zeros, requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros((), dtype=buffer.dtype).expand(buffer.shape))
