"""Merge an adapter into its base: plain LoRA tensor by tensor, other adapters with PEFT."""

import logging
import math
import re
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel

from zerofit.base.errors import UserError
from zerofit.export.source import Saved, load_base, with_base_error
from zerofit.model.image_text import classes
from zerofit.model.weights import complete, config_json, stored

# Fields of peft's LoraConfig without an effect on the merge.
_IRRELEVANT = {"base_model_name_or_path", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern",
          "layers_to_transform", "lora_alpha", "lora_dropout", "peft_version", "r", "revision", "target_modules",
          "task_type", "use_rslora", "auto_mapping"}  # fmt: skip


def reason_for_full_merge(saved: Saved) -> str:
    """Return why this adapter cannot be merged tensor by tensor, or ""."""
    config = saved.adapter
    if saved.bits:
        return f"its base is quantized to {saved.bits} bits"
    if config["peft_type"] != "LORA":
        return f"it is {config['peft_type']}"
    if complete.is_mxfp4(_base_config(saved)):
        return "its base is quantized (MXFP4)"
    plain = LoraConfig().to_dict()
    other = [key for key, value in config.items() if key not in _IRRELEVANT and value != plain.get(key)]
    if other or config.get("init_lora_weights") not in (True, False, "gaussian", "orthogonal"):
        return f"it uses {', '.join(other) or config['init_lora_weights']}"
    base_names, is_tied = BaseNames(saved).in_file, _is_tied(saved)
    for name in stored.Weights(saved.folder).where:
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", name)
        if not match or f"{match[1]}.weight" not in base_names:
            return f"{name} does not match a weight in the base's files"
        if is_tied and not re.search(r"\.\d+\.", match[1]):
            return f"{match[1]} is tied"
    return ""


def _base_config(saved: Saved):
    return config_json.config_of(Path(saved.base), saved.remote)


class BaseNames:
    """Names of a base's tensors in its model and in its files, which differ for image-text checkpoints."""

    def __init__(self, saved: Saved):
        config, in_files = _base_config(saved), list(stored.Weights(Path(saved.base)).where)
        renamed = classes.file_names(config, in_files)
        self.towers = set(classes.names_of_towers(config, in_files))  # names in the files
        # {name in the model: name in the files}, without tensors that are merged while loading
        self.in_file = renamed or {name: name for name in in_files}
        self.in_model = {file_name: name for name, file_name in self.in_file.items()}


def _is_tied(saved: Saved) -> bool:
    return config_json.ties(_base_config(saved))


def merge_tensor(saved: Saved, adapter, base: stored.Weights, name: str, names: BaseNames) -> torch.Tensor:
    """Return the base's tensor as in training, plus the adapter's s B A in fp32 if it has one.

    Args: adapter: function from a name to a tensor of the adapter.
    """
    weight = base.get(name)
    if name in names.towers:
        return weight
    name = names.in_model.get(name, name)
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

    Args: adapter: function from a name to a tensor that replaces the file's tensor, or None.
    Raises: UserError for an adapter that peft cannot merge.
    """
    kind = saved.adapter["peft_type"]
    model = load_base(saved, device)
    if saved.bits:
        logging.getLogger("transformers.integrations.bitsandbytes").setLevel(logging.ERROR)  # it logs the dtype
        model = model.dequantize(dtype=torch.float32)  # the values that the adapter was trained on
    model = model.float()
    if config_json.ties(model.config) and _adapts_embeddings(saved, model):
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())  # otherwise the embedding would also change
        model.config.tie_word_embeddings = False
    model = with_base_error(saved, lambda: PeftModel.from_pretrained(model, saved.folder))
    if not hasattr(model.base_model, "merge_and_unload"):
        raise UserError(
            f"--merge: a {kind} adapter changes the input instead of the weights; export it without --merge."
        )
    if adapter is not None:
        _load_masters(model, adapter)
    return model.merge_and_unload()


def _adapts_embeddings(saved: Saved, model) -> bool:
    """Return whether the adapter has factors for the model's embedding or head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {f"base_model.model.{name}" for name, module in model.named_modules() if module in ends}
    return any(name.partition(".lora_")[0] in tables for name in stored.Weights(saved.folder).where)


def _load_masters(model, adapter) -> None:
    """Replace the adapter's rounded weights with their fp32 master copies."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            master = adapter(plain_name(name))
            if master is not None:
                parameter.data = master.to(parameter.device, torch.float32).view(parameter.shape)


def plain_name(name: str) -> str:
    """Return the name of a PEFT model's parameter in its files."""
    return name.replace(".modules_to_save.default", "").replace(".default", "")
