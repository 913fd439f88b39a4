"""The time of a step: its operations against torch's count, bounds that hold on every GPU, rates measured here."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from zerofit.plan import formulas
from zerofit.plan.speed import step

ROWS, LENGTH = 2, 48
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "vocab_size": 96, "attn_implementation": "eager", "use_cache": False}  # fmt: skip
SHAPE_8B = formulas.Shape(8_000_000_000, 0, 525_336_576, 4096, 32, 32, 8, 128, 14336, 128256)


def dense(**more):
    return LlamaForCausalLM(LlamaConfig(intermediate_size=160, **SIZES, **more))


def mixture():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **SIZES, experts_implementation="eager"))


def adapted():
    from peft import LoraConfig, get_peft_model

    model = dense()
    model.enable_input_require_grads()  # as gradient checkpointing needs it: each product has a gradient to its input
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


def unadapted_last():
    """LoRA on the queries: the last product of a layer has no adapter, and is not recomputed."""
    from peft import LoraConfig, get_peft_model

    model = dense()
    model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))


def counted(model, checkpointing: bool) -> dict[str, int]:
    """The operations of a real forward and backward by kernel: {"mm": ..., "bmm": ...}."""
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    ids = torch.randint(0, 96, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    found: dict[str, int] = {}
    for kernel, flops in counter.get_flop_counts()["Global"].items():
        name = "bmm" if "bmm" in str(kernel) else "mm"
        found[name] = found.get(name, 0) + flops
    return found


def setting(**more) -> formulas.Setting:
    given = {"zero": 0, "offload": "none", "every": 0, "micro": ROWS, "tokens": ROWS * LENGTH, "accumulation": 1,
             "ranks": 1}  # fmt: skip
    return formulas.Setting(**{**given, **more})


@pytest.mark.oracle
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("build", [dense, mixture, adapted, unadapted_last])
def test_operations_are_those_that_torch_counts(build, checkpointing):
    """Forward, recomputation and backward of every product: dense, routed experts, and LoRA on a frozen base."""
    model = build()
    shape = formulas.shape(model.config, model)
    found = counted(model, checkpointing)
    assert step.operations(shape, setting(every=int(checkpointing))) == found["mm"]
    heads = shape.work.heads * shape.work.head_dim * sum(layers for _, layers in shape.work.attentions)
    forwards = 4 if checkpointing else 3  # two products; twice as many in the backward
    positions = 2 * 8 * LENGTH * 3 * ROWS  # rotary frequencies times positions, once a forward
    assert found["bmm"] - 4 * ROWS * LENGTH * LENGTH * heads * forwards in (0, positions // 3, positions // 3 / ROWS)
