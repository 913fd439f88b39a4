"""The bytes that a plan's step counts for elementwise kernels are those that the operations of a model move."""

from collections import Counter

import pytest
import torch
from conftest import ROOT, slow_but
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from zerofit.config import resolve
from zerofit.model import fused_lora
from zerofit.plan import formulas
from zerofit.plan.speed import step, work

CONFIGS = ROOT / "tests" / "configs"
MODELS = sorted(folder.name for folder in CONFIGS.iterdir() if "moe" not in folder.name)
TOKENS, LAYERS = 512, (2, 4)
PRODUCTS = {"mm", "addmm", "bmm"}  # priced by themselves, as attention is
NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view"}


def _attend(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    rows, heads, tokens, _ = q.shape
    return q.new_empty(rows, tokens, heads, v.shape[-1]).transpose(1, 2)


def _attend_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in (q, k, v)]


attend, attend_backward = (
    torch.library.custom_op(f"tests_passes::{name}", function, mutates_args=())
    for name, function in (("attend", _attend), ("attend_backward", _attend_backward))
)
attend.register_fake(_attend)
attend_backward.register_fake(_attend_backward)


class Attention(torch.autograd.Function):
    """One operation in each direction, as FlashAttention is."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return attend(q, v)

    @staticmethod
    def backward(ctx, gradient):
        return tuple(attend_backward(*ctx.saved_tensors))


def attention(module, q, k, v, mask, *args, **kwargs):
    return Attention.apply(q, k, v).transpose(1, 2), None


class Moved(TorchDispatchMode):
    """Add up the bytes that elementwise operations read and write, each a kernel of its own, by direction."""

    def __init__(self):
        super().__init__()
        self.bytes, self.direction = Counter(), 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        space, _, name = operation._schema.name.partition("::")
        is_view = any(one.alias_info and not one.alias_info.is_write for one in operation._schema.returns)
        if space == "aten" and not is_view and name not in NO_KERNEL | PRODUCTS:
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
            self.bytes[self.direction] += sum(
                min(x.numel() * x.element_size(), x.untyped_storage().nbytes())  # of an expanded one what it has
                for x in tensors
            )
        return out


def traced(name: str, layers: int, adapted=lambda net: net) -> tuple[Counter, torch.nn.Module, object]:
    """Return the bytes of a forward and a backward (0 and 1), the model with so many layers, and its config."""
    config = AutoConfig.from_pretrained(CONFIGS / name)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(config, attn_implementation="traced", dtype=torch.bfloat16)
        net = adapted(net).train()
        ids, seen = torch.zeros(1, TOKENS, dtype=torch.long), torch.ones(1, TOKENS, dtype=torch.long)
    with Moved() as moved:
        hidden = net.get_decoder()(input_ids=ids, attention_mask=seen, use_cache=False).last_hidden_state
        moved.direction = 1
        hidden.sum().backward()
    return moved.bytes, net, config


def of_a_layer(name: str, adapted=lambda net: net) -> tuple[float, work.Passes]:
    """Return the bytes that a layer moves for a token, and the Passes of LAYERS[1] layers."""
    AttentionInterface.register("traced", attention)
    AttentionMaskInterface.register("traced", lambda *args, **kwargs: None)
    few, _, _ = traced(name, LAYERS[0], adapted)
    many, net, config = traced(name, LAYERS[1], adapted)
    moved = (many.total() - few.total()) / TOKENS / (LAYERS[1] - LAYERS[0])
    return moved, formulas.shape(config, net).work.passes


def plain(passes: work.Passes) -> float:
    """Return the bytes of both directions without weight gradients and adapters."""
    return sum(sum(costs[0]) * getattr(passes, field) for field, costs in step.PASSES.items())


@pytest.mark.oracle
@pytest.mark.parametrize("name", slow_but(MODELS, ["llama3.1-8b", "phi3-mini", "gpt2"]))
def test_the_passes_of_a_step_move_as_many_bytes_as_its_operations(name):
    """Of a layer, full fine-tuning in bf16 with transformers' modules: all of it within 10 %."""
    moved, passes = of_a_layer(name)
    planned = plain(passes) + sum(costs[0] * getattr(passes, field) for field, costs in step.NORM_WEIGHTS.items())
    assert planned / LAYERS[1] == pytest.approx(moved, rel=0.1)


@pytest.mark.oracle
@pytest.mark.parametrize("name", slow_but(["llama3.1-8b", "qwen2.5-0.5b"], ["qwen2.5-0.5b"]))
@pytest.mark.parametrize("kind", ["sum", "fp32", "in place"])
def test_the_passes_of_adapters_move_as_many_bytes_as_their_operations(name, kind, monkeypatch):
    """LoRA on all linear layers: peft's own sums, those with fp32 adapters without autocast, and the kit's."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # torch knows no "meta"

    def adapted(net):
        net = get_peft_model(net, LoraConfig(target_modules="all-linear"), autocast_adapter_dtype=False)
        if kind == "in place":
            fused_lora.install(resolve.resolve_settings("lora", [], 1), net)
        net.enable_input_require_grads()
        return net if kind == "fp32" else net.to(torch.bfloat16)

    moved, passes = of_a_layer(name, adapted)
    of_output, of_input = step.LORA[kind]
    added = sum(of_output) * passes.adapted_out + sum(of_input) * passes.adapted_in
    assert (plain(passes) + added) / LAYERS[1] == pytest.approx(moved, rel=0.1)
