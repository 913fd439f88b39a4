"""Merge an adapter into its base: plain LoRA tensor by tensor, everything else with PEFT."""

import logging
import math
import re
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel

from zerofit.base.errors import UserError
from zerofit.export.source import Saved, load_base, with_wrong_base_named
from zerofit.model.image_text import classes
from zerofit.model.weights import complete, config_json, stored

# Fields of peft's LoraConfig that do not change what A and B mean once they are trained.
_PLAIN = {"base_model_name_or_path", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern",
          "layers_to_transform", "lora_alpha", "lora_dropout", "peft_version", "r", "revision", "target_modules",
          "task_type", "use_rslora", "auto_mapping"}  # fmt: skip


def reason_for_full_merge(saved: Saved) -> str:
    """Return why this adapter cannot be merged tensor by tensor; "" if it can."""
    config = saved.adapter
    if saved.bits:
        return f"its base was packed in {saved.bits} bits"
    if config["peft_type"] != "LORA":
        return f"it is {config['peft_type']}"
    if complete.is_mxfp4(_base_config(saved)):
        return "its base is packed (MXFP4)"
    plain = LoraConfig().to_dict()
    other = [key for key, value in config.items() if key not in _PLAIN and value != plain.get(key)]
    if other or config.get("init_lora_weights") not in (True, False, "gaussian", "orthogonal"):
        return f"it has {', '.join(other) or config['init_lora_weights']}"
    own, is_tied = BaseNames(saved).own, _is_tied(saved)
    for name in stored.Weights(saved.folder).where:
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", name)
        if not match or f"{match[1]}.weight" not in own:
            return f"{name} has no separate weight in the base's files"
        if is_tied and not re.search(r"\.\d+\.", match[1]):
            return f"{match[1]} is tied"
    return ""


def _base_config(saved: Saved):
    return config_json.config_of(Path(saved.base), saved.remote)


class BaseNames:
    """The names of a base's tensors: in its model, where its files have others (image-text checkpoints)."""

    def __init__(self, saved: Saved):
        config, in_files = _base_config(saved), list(stored.Weights(Path(saved.base)).where)
        renamed = classes.file_names(config, in_files)
        self.towers = set(classes.names_of_towers(config, in_files))  # in the files
        # name in the model -> in the files; tensors that are merged as they are loaded have none
        self.own = renamed or {name: name for name in in_files}
        self.of_file = {name: own for own, name in self.own.items()}


def _is_tied(saved: Saved) -> bool:
    return bool(getattr(_base_config(saved), "tie_word_embeddings", False))


def merge_tensor(saved: Saved, adapter, base: stored.Weights, name: str, names: BaseNames) -> torch.Tensor:
    """Return the base's tensor as it was in training, plus s B A in fp32 where the adapter has one.

    Args: adapter: name -> a tensor of the adapter.
    """
    weight = base.get(name)
    if name in names.towers:
        return weight
    name = names.of_file.get(name, name)
    if saved.base_dtype and weight.is_floating_point():
        weight = weight.to(saved.base_dtype)
    key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
    down, up = adapter(f"{key}A.weight"), adapter(f"{key}B.weight")
    if down is None or not name.endswith(".weight"):
        return weight
    rank, config = down.shape[0], saved.adapter
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return torch.addmm(weight.float(), up.float(), down.float(), alpha=scale)


def merge_model(saved: Saved, adapter, device: str):
    """Return the merged model in fp32: load the base as in training, dequantize it, merge with PEFT.

    Args: adapter: name -> a tensor of the adapter that replaces the file's, else None.
    Raises: UserError for an adapter that peft cannot merge.
    """
    kind = saved.adapter["peft_type"]
    model = load_base(saved, device)
    if saved.bits:
        logging.getLogger("transformers.integrations.bitsandbytes").setLevel(logging.ERROR)  # logs the dtype, as we do
        model = model.dequantize(dtype=torch.float32)  # the quantized values that the adapter was trained on
    model = model.float()
    if getattr(model.config, "tie_word_embeddings", False) and _on_a_table(saved, model):
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())  # else the embedding would change too
        model.config.tie_word_embeddings = False
    model = with_wrong_base_named(saved, lambda: PeftModel.from_pretrained(model, saved.folder))
    if not hasattr(model.base_model, "merge_and_unload"):
        raise UserError(
            f"--merge: a {kind} adapter lengthens the input instead of changing weights; export it without."
        )
    if adapter is not None:
        _take(model, adapter)
    return model.merge_and_unload()


def _on_a_table(saved: Saved, model) -> bool:
    """Return whether the adapter has factors for the model's embedding or head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {f"base_model.model.{name}" for name, module in model.named_modules() if module in ends}
    return any(name.partition(".lora_")[0] in tables for name in stored.Weights(saved.folder).where)


def _take(net, adapter) -> None:
    """Replace the adapter's rounded weights by their fp32 masters."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            master = adapter(plain_name(name))
            if master is not None:
                parameter.data = master.to(parameter.device, torch.float32).view(parameter.shape)


def plain_name(name: str) -> str:
    """Return the name that a PEFT model's files give to one of its parameters."""
    return name.replace(".modules_to_save.default", "").replace(".default", "")
