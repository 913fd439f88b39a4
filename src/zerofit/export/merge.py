"""Merge an adapter into its base: plain LoRA tensor by tensor, everything else with PEFT."""

import logging
import math
import re
from pathlib import Path

import torch

from zerofit.errors import UserError
from zerofit.export.source import Saved, load_base, wrong_base_in_words
from zerofit.train.checkpoint import zero_shards

# Fields of peft's LoraConfig that do not change what A and B mean once they are trained.
_PLAIN = {"base_model_name_or_path", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern",
          "layers_to_transform", "lora_alpha", "lora_dropout", "peft_version", "r", "revision", "target_modules",
          "task_type", "use_rslora", "auto_mapping"}  # fmt: skip


def reason_for_full_merge(found: Saved) -> str:
    """Why this adapter cannot be merged one tensor at a time; "": it can."""
    from peft import LoraConfig

    config = found.adapter
    if found.bits:
        return f"its base was packed in {found.bits} bits"
    if config["peft_type"] != "LORA":
        return f"it is {config['peft_type']}"
    plain = LoraConfig().to_dict()
    other = [key for key, value in config.items() if key not in _PLAIN and value != plain.get(key)]
    if other or config.get("init_lora_weights") not in (True, False, "gaussian", "orthogonal"):
        return f"it has {', '.join(other) or config['init_lora_weights']}"
    base, tied = zero_shards.Weights(Path(found.base)), _is_tied(found)
    for name in zero_shards.Weights(found.folder).where:
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", name)
        if not match or f"{match[1]}.weight" not in base.where:
            return f"{name} has no weight of its own in the base's files"
        if tied and not re.search(r"\.\d+\.", match[1]):
            return f"{match[1]} is tied"
    return ""


def _is_tied(found: Saved) -> bool:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(found.base, trust_remote_code=found.remote)
    return bool(getattr(config, "tie_word_embeddings", False))


def merge_tensor(found: Saved, adapter, base: zero_shards.Weights, name: str) -> torch.Tensor:
    """The base's tensor of that name as it was in training, with s B A added in fp32 where the adapter has one.

    Args: adapter: name -> a tensor of the adapter.
    """
    weight = base.get(name)
    if found.base_dtype and weight.is_floating_point():
        weight = weight.to(found.base_dtype)
    key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
    down, up = adapter(f"{key}A.weight"), adapter(f"{key}B.weight")
    if down is None or not name.endswith(".weight"):
        return weight
    rank, config = down.shape[0], found.adapter
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return torch.addmm(weight.float(), up.float(), down.float(), alpha=scale)


def merge_model(found: Saved, adapter, device: str):
    """The merged model, in fp32: the base is loaded as it was trained, unpacked, and peft merges.

    Args: adapter: name -> a tensor of the adapter where it is to differ from the file's, else None.
    Raises: UserError for an adapter that peft cannot merge.
    """
    from peft import PeftModel

    kind = found.adapter["peft_type"]
    net = load_base(found, device)
    if found.bits:
        logging.getLogger("transformers.integrations.bitsandbytes").setLevel(logging.ERROR)  # says which type; so do we
        net = net.dequantize(dtype=torch.float32)  # the numbers that the adapter was trained on, not the original ones
    net = net.float()
    if getattr(net.config, "tie_word_embeddings", False) and _on_a_table(found):
        head = net.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())  # else the embedding would change with the head
        net.config.tie_word_embeddings = False
    net = wrong_base_in_words(found, lambda: PeftModel.from_pretrained(net, found.folder))
    if not hasattr(net.base_model, "merge_and_unload"):
        raise UserError(
            f"--merge: a {kind} adapter lengthens the input instead of changing weights; export it without."
        )
    if adapter is not None:
        _take(net, adapter)
    return net.merge_and_unload()


def _on_a_table(found: Saved) -> bool:
    """Whether the adapter has factors for the embedding or the head: what is named neither by layer nor new tokens."""
    names = zero_shards.Weights(found.folder).where
    return any("lora_" in name and not re.search(r"\.\d+\.", name) for name in names)


def _take(net, adapter) -> None:
    """Put the fp32 master copies in place of the adapter's rounded numbers."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            master = adapter(plain_name(name))
            if master is not None:
                parameter.data = master.to(parameter.device, torch.float32).view(parameter.shape)


def plain_name(name: str) -> str:
    """A parameter of a peft model as its files name it."""
    return name.replace(".modules_to_save.default", "").replace(".default", "")
