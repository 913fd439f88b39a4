"""Which layers are checkpointed, where their inputs are kept, and what cannot be."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from transformers import AutoConfig, AutoModelForCausalLM

from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.model import gradient_checkpointing

GPU = hardware.GPUS["h100-80g"]
LAYERS = 6
CONFIG = AutoConfig.for_model(
    "llama", hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=2, vocab_size=64,
    attn_implementation="eager",
)  # fmt: skip


def resolved(*flags, gpu=GPU):
    return resolve.resolve_settings("sft", list(flags), 1, gpu)


@pytest.mark.bad_input
def test_an_offload_without_checkpointing_is_refused():
    with pytest.raises(UserError, match="--activation_offload with --gradient_checkpointing false: "):
        resolved("--activation_offload", "true", "--gradient_checkpointing", "false")


def test_a_model_on_a_gpu_saves_its_inputs_on_the_host(monkeypatch):
    """By transformers' own means: under torch's save_on_cpu, once for each layer."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args: gpu)
    monkeypatch.setattr("transformers.modeling_utils.get_current_accelerator", lambda: gpu, raising=False)
    used = []
    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", lambda **named: used.append(named) or save_on_cpu())
    values = {
        "gradient_checkpointing": True, "gradient_checkpointing_every": 1, "gradient_checkpointing_policy": "full",
        "gradient_checkpointing_kwargs": {"use_reentrant": False}, "activation_offload": True, "use_cpu": False,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(CONFIG).train()
    gradient_checkpointing.enable(SimpleNamespace(**values), model)
    model(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert len(used) == LAYERS


@pytest.mark.parametrize(("flags", "value"), [((), False), (("--gradient_checkpointing", "true"), True)])
def test_a_class_without_checkpointing_trains_without_it_unless_asked(flags, value, tmp_path):
    AutoConfig.for_model("jetmoe").save_pretrained(tmp_path)
    words = ["--model", str(tmp_path), "--data", "none", *flags]
    settings = resolve.resolve_settings("sft", words, 1, hardware.GPUS["h100-80g"])
    resolve.resolve_for_model(settings)
    assert settings.gradient_checkpointing is value
