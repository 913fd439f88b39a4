"""Each change to a library does what it is for, computes the same, and is still needed."""

import json

import bitsandbytes
import pytest
import torch
from conftest import TINY
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from zerofit.model import patches
from zerofit.plan import simulate

PLAIN = bitsandbytes.matmul_4bit
LAYERS = (4, 8)
HIDDEN, INTERMEDIATE = 256, 512
PACKED_LAYER_BYTES = (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE) // 2
# Nothing is kept gathered for later use: what stays is what somebody holds.
NOTHING_LIVE = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 1000,
    },
}  # fmt: skip


@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setattr(bitsandbytes, "matmul_4bit", PLAIN)
    patches.release_gathered_4bit_weights()
    yield bitsandbytes.matmul_4bit
    bitsandbytes.matmul_4bit = PLAIN


def packed_weight(rows: int, columns: int, **attributes):
    weight, state = bitsandbytes.functional.quantize_4bit(
        torch.randn(rows, columns),
        blocksize=64,
        compress_statistics=True,
        quant_type="nf4",
        quant_storage=torch.float32,
    )
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter, state


def test_bitsandbytes_still_keeps_a_view_of_the_weight():
    """When this fails, patches.release_gathered_4bit_weights can go."""
    weight, state = packed_weight(128, 64)
    out = PLAIN(torch.randn(2, 64, requires_grad=True), weight, quant_state=state)
    assert out.grad_fn.tensors[1].untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


@pytest.mark.oracle
@pytest.mark.parametrize("bias", [True, False])
def test_a_gathered_4bit_product_is_the_same(patched, bias, record_property):
    torch.manual_seed(0)
    weight, state = packed_weight(128, 64, ds_id=7)
    results = []
    for product in (PLAIN, patched):
        x = torch.linspace(-1, 1, 3 * 5 * 64).view(3, 5, 64).requires_grad_()
        added = torch.linspace(0, 1, 128).requires_grad_() if bias else None
        out = product(x, weight, quant_state=state, bias=added)
        (out**2).sum().backward()
        results.append([out.detach(), x.grad])
        if product is patched:
            assert "Product" in type(out.grad_fn).__name__  # not the plain one by accident
            if bias:
                assert torch.allclose(added.grad, 2 * out.detach().flatten(0, 1).sum(0))
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(plain, ours)
    record_property("relative_difference", 0.0)


def test_only_parameters_that_zero_3_gathers_are_taken(patched):
    weight, state = packed_weight(128, 64)
    out = patched(torch.randn(2, 64, requires_grad=True), weight, quant_state=state)
    assert "MatMul4Bit" in type(out.grad_fn).__name__


def random_model(folder, layers: int):
    config = AutoConfig.from_pretrained(TINY / "model")
    config.update({"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": layers,
                   "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": HIDDEN // 4})  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY / "model").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("checkpointing", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_qlora_step_at_stage_3_holds_no_gathered_layer(checkpointing, tmp_path):
    """Real packed weights, the real engine as rank 0 of 2: bytes beside the model's own do not grow with its depth."""
    (tmp_path / "live.json").write_text(json.dumps(NOTHING_LIVE))
    questions = []
    for layers in LAYERS:
        model = random_model(tmp_path / str(layers), layers)
        flags = ["--model", model, "--data", "none", "--zero", "3", "--load_in_4bit", "true", "--bf16", "true",
                 "--deepspeed", str(tmp_path / "live.json"), "--max_length", "64", "--per_device_train_batch_size", "1",
                 "--effective_batch_size", "2", "--lora_r", "1", "--gradient_checkpointing", checkpointing]  # fmt: skip
        questions.append(simulate.question("lora", flags, 2, device="cpu", fake=False))
    answers = simulate.run_all(questions)
    assert not [answer for answer in answers if isinstance(answer, Exception)], answers
    for phase in ("backward", "step"):
        few, many = (answer["peak"][phase]["buffers"] for answer in answers)
        grows = (many - few) / (LAYERS[1] - LAYERS[0])
        assert grows < 0.25 * PACKED_LAYER_BYTES, (phase, grows, PACKED_LAYER_BYTES)
