"""Mixtures of experts of every class of transformers: adapters of experts, router loss, ranks, kernels, MXFP4."""

import json
import shutil
import sys

import pytest
import torch
from conftest import ROOT, TINY, run_world, runs_slow, slow_but
from peft import LoraConfig, PeftModel, get_peft_model

sys.path.insert(0, str(ROOT / "tests" / "matrix"))
import tiny_models

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.export import export
from zerofit.model import adapters, experts, load
from zerofit.model.mixtures import adapted, weights

# Those that issue trackers ask for most, and the other causal classes of transformers 5.23 with fused experts.
NAMED = ("qwen3_moe", "mixtral", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss")
OTHERS = (
    "afmoe", "aria_text", "axk1", "cohere2_moe", "deepseek_v2", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo",
    "glm4_moe_lite", "granitemoe", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "jamba",
    "jetmoe", "kimi_linear", "laguna", "lfm2_moe", "llama4_text", "longcat_flash", "mellum", "mimo_v2_flash",
    "minimax", "minimax_m2", "mistral4", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_next", "solar_open",
)  # fmt: skip
ALL = (*NAMED, *OTHERS)
OF_COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def configured(kind: str, **changes):
    """The configuration of a tiny model whose router prefers some experts; changes: of its fields."""
    config = tiny_models.config_of(kind)
    found = config.to_dict() | {"initializer_range": 0.2} | changes
    return type(config).from_dict(found)


def saved(kind: str, folder, **changes) -> str:
    """Write a tiny mixture of random weights with the bundled tokenizer."""
    torch.manual_seed(0)
    model = tiny_models.loader_of(kind).from_config(configured(kind, **changes), dtype=torch.float32)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / "model" / file, folder)
    return str(folder)


def read(kind: str, folder):
    return tiny_models.loader_of(kind).from_pretrained(folder, dtype=torch.float32).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 35).view(2, 16), use_cache=False).logits


def settings_of(folder, *flags, recipe="lora", ranks=1):
    words = ["--model", str(folder), "--data", "unread", "--use_cpu", "true", "--zero", "0", *flags]
    settings = resolve.resolve_settings(recipe, words, ranks)
    resolve.resolve_for_model(settings)
    return settings


# --- LoRA ---

EXPERTS = ("--lora_target_modules", "q_proj", "--lora_target_parameters", "experts")


def randomized(kind, folder, *flags):
    """A model with the kit's adapter, whose B is not 0."""
    settings = settings_of(folder, *flags)
    model = adapters.add_adapter(read(kind, folder), settings).eval()
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1)
    return model, settings


def adapted_names(model) -> set[str]:
    """The names of the base's weights that have A and B."""
    own = {
        name.partition(".lora_A")[0].removeprefix("base_model.model.") + ".weight"
        for name, _ in model.named_parameters()
        if ".lora_A." in name
    }
    parameters = adapted.wrappers(model)
    paths = {f"{name.rpartition('.')[0]}.weight" for name in parameters}
    return {name.replace(".base_layer", "") for name in own if name.replace(".base_layer", "") not in paths} | {
        *parameters
    }


@pytest.mark.oracle
@pytest.mark.parametrize("kind", slow_but(ALL, ("deepseek_v3", "gpt_oss")))
@pytest.mark.parametrize("flags", [(), EXPERTS], ids=["all-linear", "experts"])
def test_an_adapter_of_experts_is_plain_pefts(kind, flags, tmp_path):
    """Saved, it gives the same logits with plain peft, and merged; all-linear adapts every linear layer."""
    saved(kind, tmp_path / "base")
    flags = ("--lora_target_modules", "all-linear", *EXPERTS[2:]) if flags and kind in ("jetmoe", "zaya") else flags
    model, settings = randomized(kind, tmp_path / "base", *flags)
    names, base = adapted_names(model), read(kind, tmp_path / "base")
    fused, before = set(weights.fused(base)), logits(base)
    if flags:
        assert fused and fused <= names
    else:
        head = base.get_output_embeddings()
        linear = {name for name, m in base.named_modules() if type(m) is torch.nn.Linear and m is not head}
        left = {name for name in linear if any(word in name for word in ("out_proj", "conv1d"))}  # refused in Mamba
        assert {f"{name}.weight" for name in linear - left} <= names
    said = [line for line in settings.decisions if line.startswith("experts that LoRA adapts: ")]
    assert len(said) == 1 and ("none: they are fused" in said[0]) == (not fused & names)
    after = logits(model)
    assert (after - before).abs().max() > 1e-3
    model.save_pretrained(tmp_path / "adapter")
    plain = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(logits(plain), after)
    plain.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(read(kind, tmp_path / "merged")), after, rtol=1e-4, atol=1e-4)
