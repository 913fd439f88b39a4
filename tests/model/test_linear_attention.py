"""Convolutions, linear attentions and state spaces compute the documents of a row apart, as each alone."""

import copy
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import transformers
from conftest import ROOT, run_world
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, TrainingArguments, Zamba2Config

from zerofit.data.batches import PackedCollator
from zerofit.model import attention, quantization
from zerofit.model.image_text import classes
from zerofit.model.kernels import linear_attention

sys.path.insert(0, str(ROOT / "tests" / "matrix"))
import matrix
import tiny_models

# A gated delta rule, a state space, a convolution, a delta rule of another package's kernel
FEW = ("qwen3_5_text", "granitemoehybrid", "lfm2", "kimi_linear")
KINDS = (
    *FEW, "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "bailing_hybrid", "bamba", "falcon_h1", "nemotron_h",
    "zamba2", "lfm2_moe", "lfm3",
)  # fmt: skip
KINDS = tuple(kind for kind in KINDS if kind in CONFIG_MAPPING)  # an earlier transformers has fewer
SOME = [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
LENGTHS = (20, 1, 70, 14)  # one is longer than a chunk


def documents(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 64, (n,), generator=generator).tolist() for n in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


@pytest.fixture
def functions_are_restored(monkeypatch):
    """Undo after the test what is changed in the modules of these configurations."""

    def remember(config):
        module = sys.modules[classes.text_class(config).__module__]
        for name in linear_attention.kernels_of(config):
            monkeypatch.setattr(module, name, getattr(module, name))

    return remember


def config_of(kind):
    if kind == "zamba2":
        return Zamba2Config(
            vocab_size=64, hidden_size=32, num_hidden_layers=3, layers_block_type=["mamba", "mamba", "hybrid"],
            mamba_d_state=8, mamba_ngroups=1, n_mamba_heads=8, num_attention_heads=4, num_key_value_heads=4,
            intermediate_size=48, num_mem_blocks=1, adapter_rank=4, chunk_size=8,
        )  # fmt: skip
    config = tiny_models.config_of(kind)
    if kind == "lfm2":
        config.layer_types = ["conv", "full_attention"]
    return config


def built(config, **more):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention.register(), **more)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", SOME)
def test_documents_of_a_row_are_what_they_are_alone(kind, functions_are_restored, record_property):
    """Logits, loss and gradients of every weight, against transformers' model on each document alone."""
    config = config_of(kind)
    functions_are_restored(config)
    rows, plain = documents(), built(config).train()
    count = sum(len(row["labels"]) - 1 for row in rows)
    alone = [plain(torch.tensor([r["input_ids"]]), labels=torch.tensor([r["labels"]]), num_items_in_batch=count)
             for r in rows]  # fmt: skip
    sum(out.loss for out, row in zip(alone, rows, strict=True) if len(row["labels"]) > 1).backward()
    packed = built(config).train()
    packed.load_state_dict(plain.state_dict())
    linear_attention.keep_documents_apart(config)
    out = packed(**PackedCollator(seq_idx=True)(rows), num_items_in_batch=count)
    out.loss.backward()
    wanted = torch.cat([one.logits[0] for one in alone])
    record_property("relative_difference", ((out.logits[0] - wanted).norm() / wanted.norm()).item())
    torch.testing.assert_close(out.logits[0], wanted, rtol=1e-5, atol=1e-5)
    for (name, p), q in zip(packed.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SOME)
def test_no_gradient_reaches_another_document(kind, dtype, functions_are_restored):
    """By the self-test of a run, with recomputed layers; and without the change it finds what mixes."""
    config, arguments = config_of(kind), TrainingArguments(use_cpu=True)
    functions_are_restored(config)
    model = built(config).to(dtype)
    model.gradient_checkpointing_enable()
    model.train()
    linear_attention.keep_documents_apart(config)
    rows = documents((20, 33, 14))
    assert attention.cross_document_gradient(model, rows, arguments, seq_idx=True) == 0
    error = attention.packed_logit_error(model, rows, 0, arguments, seq_idx=True)
    assert error < (1e-5 if dtype == torch.float32 else 0.02)


def test_only_models_that_read_it_are_given_the_number_of_each_document():
    batch = PackedCollator(seq_idx=True)(documents((2, 1, 3)))
    assert batch["seq_idx"].tolist() == [[0, 0, 1, 2, 2, 2]] and batch["seq_idx"].dtype == torch.int32
    assert "seq_idx" not in PackedCollator()(documents())
    told = {kind for kind in (*KINDS, "llama", "mamba", "gpt2") if linear_attention.reads_documents(config_of(kind))}
    assert told == {*KINDS, "mamba"}  # whose convolution could be told


def test_what_is_told_nothing_is_refused_before_the_weights_are_loaded():
    for kind in ("jamba", "zamba", "falcon_mamba"):
        assert "Mamba-1 scan carries" in attention.cannot_pack(AutoConfig.for_model(kind), attention.NAME, 64)
    for kind in KINDS:
        assert attention.cannot_pack(config_of(kind), attention.NAME, 64) is None


def test_a_kernel_is_told_the_boundaries_by_its_own_name(monkeypatch, functions_are_restored):
    """Kimi's layers pass cu_seq_lens_q, fla's chunk_kda reads cu_seqlens, and transformers drops what it does not."""
    config, told = tiny_models.config_of("kimi_linear"), {}
    functions_are_restored(config)
    module = sys.modules[classes.text_class(config).__module__]

    def chunk_kda(q, k, v, g, beta, cu_seqlens=None, **more):
        told["bounds"] = cu_seqlens
        return v, None

    fla = SimpleNamespace(ops=SimpleNamespace(kda=SimpleNamespace(chunk_kda=chunk_kda)))
    monkeypatch.setitem(sys.modules, "fla", fla)  # where transformers looks for it
    monkeypatch.setattr(module, "chunk_kimi_delta_attention", chunk_kda)
    linear_attention.keep_documents_apart(config)
    batch = PackedCollator(seq_idx=True)(documents())
    built(config)(**batch, use_cache=False)
    assert torch.equal(told["bounds"], batch["cu_seq_lens_q"])


@pytest.mark.parametrize("package", [None, SimpleNamespace(), SimpleNamespace(ops=SimpleNamespace(kda=None))])
def test_a_package_without_the_kernel_is_none(package, monkeypatch):
    """transformers then computes in PyTorch: from 5.20 on it refuses boundaries there, before it drops them."""
    monkeypatch.setitem(sys.modules, "fla", package)  # None: cannot be imported
    assert linear_attention._is_in_pytorch("chunk_kda", "fla")


def test_a_row_of_one_document_and_padded_rows_are_computed_as_before(functions_are_restored):
    config = tiny_models.config_of("qwen3_5_text")
    functions_are_restored(config)
    model, ids = built(config).eval(), torch.tensor([documents()[2]["input_ids"]] * 2)
    before = model(ids).logits
    linear_attention.keep_documents_apart(config)
    assert torch.equal(model(ids).logits, before)
    one = model(**PackedCollator(seq_idx=True)(documents()[2:3])).logits
    torch.testing.assert_close(one[0], before[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen3_5_text", *(pytest.param(k, marks=pytest.mark.slow) for k in
                                                      ("qwen3_5", "nemotron_h", "falcon_h1", "lfm2"))])  # fmt: skip
def test_a_run_without_padding_has_the_losses_of_a_padded_one(kind, tmp_path):
    """And one with packed rows is accepted."""
    tiny_models.checkpoint(kind, tmp_path / "model")
    flags = [*matrix.COMMON, *matrix.PLAIN, "--model", str(tmp_path / "model")]
    cases = {
        name: ("sft", [*flags, *words])
        for name, words in {
            "padded": ["--padding_free", "false"],
            "free": ["--padding_free", "true"],
            "packed": ["--packing", "true"],
        }.items()
    }
    runs = run_world(1, cases, tmp_path)
    torch.testing.assert_close(
        torch.tensor(runs["free"].losses), torch.tensor(runs["padded"].losses), rtol=1e-4, atol=0
    )
    for name in ("free", "packed"):
        assert runs[name].json("record.json")["checks"]["documents_apart"][0]
        decisions = runs[name].json("run.json")["decisions"]
        assert sum("loop over the documents of a row without" in line for line in decisions) == 1


# --- kernels of other layers than attention ---


@pytest.mark.slow
def test_adapters_and_packed_bases_leave_out_what_a_kernel_reads(tmp_path):
    """Mamba-2's out_proj, in models that peft knows and in others; each run passes its own checks."""
    kinds = ("granitemoehybrid", "nemotron_h", "falcon_h1", "qwen3_5_text", "kimi_linear", "lfm2_moe")
    for kind in kinds:
        tiny_models.checkpoint(kind, tmp_path / kind)
    flags = [*matrix.COMMON, "--zero", "0", "--fused_loss", "false", "--gradient_checkpointing", "false"]
    cases = {
        f"{kind}-{bits}": ("lora", [*flags, "--model", str(tmp_path / kind), "--load_in_4bit", str(bits == 4).lower()])
        for kind in kinds for bits in (16, 4)
    }  # fmt: skip
    for name, run in run_world(1, cases, tmp_path).items():
        checks = run.json("record.json")["checks"]
        assert checks["loss"][0] and checks["base_weights"][0] and checks["documents_apart"][0], (name, checks)
        adapted = set(safetensors.torch.load_file(run.folder / "final" / "adapter_model.safetensors"))
        of_kernels = linear_attention.read_by_kernels(config_of(name.rpartition("-")[0]))
        assert of_kernels in ((), ("out_proj",)) and bool(of_kernels) == name.startswith(("gran", "nemo", "falc"))
        assert any("in_proj" in key or "q_proj" in key for key in adapted), name
        if of_kernels:
            assert not any("out_proj" in key for key in adapted), name


def test_a_weight_that_a_kernel_reads_is_not_packed():
    """In the plan's count, below an adapter too."""
    model = AutoModelForCausalLM.from_config(config_of("granitemoehybrid")).requires_grad_(False)
    left = [m.out_proj.weight.numel() for m in model.modules() if hasattr(m, "out_proj")]
    every = [m.weight.numel() for m in model.modules() if type(m) is torch.nn.Linear]
    head = model.get_output_embeddings().weight.numel()
    assert quantization.packed_weights(model) == sum(every) - sum(left) - head > 0 and len(left) == 1


@pytest.mark.parametrize(
    ("kind", "packages", "priced"),
    [
        ("qwen3_next", "flash-linear-attention and causal-conv1d", True),
        ("qwen3_5", "flash-linear-attention and causal-conv1d", True),
        ("kimi_linear", "flash-linear-attention and causal-conv1d", True),
        ("olmo_hybrid", "flash-linear-attention and causal-conv1d", True),
        ("falcon_h1", "mamba-ssm and causal-conv1d", False),
        ("nemotron_h", "mamba-ssm and causal-conv1d", False),
        ("jamba", "mamba-ssm and causal-conv1d", False),
        ("llama", "", False),
        ("gpt_oss", "", False),
    ],
)
def test_models_that_are_slow_without_their_kernels_are_named(monkeypatch, kind, packages, priced):
    monkeypatch.setattr(linear_attention, "find_spec", lambda name: None)
    missing = linear_attention.missing_kernels(AutoConfig.for_model(kind))
    if not packages:
        assert missing is None
        return
    what, install = missing
    assert f"but much slower, without {packages}" in what and ("1.22 instead of 0.70 s a step" in what) == priced
    assert install.count("pip install ") == len(packages.split(" and "))
    monkeypatch.setattr(linear_attention, "find_spec", lambda name: name)
    assert linear_attention.missing_kernels(AutoConfig.for_model(kind)) is None


def test_a_hybrid_without_such_layers_needs_no_kernels(monkeypatch):
    monkeypatch.setattr(linear_attention, "find_spec", lambda name: None)
    mixed, alone = (
        AutoConfig.for_model("lfm2", num_hidden_layers=2, layer_types=[kind, "full_attention"])
        for kind in ("conv", "full_attention")
    )
    what, install = linear_attention.missing_kernels(mixed)
    assert what.endswith("without causal-conv1d") and install == "pip install causal-conv1d --no-build-isolation"
    assert linear_attention.missing_kernels(alone) is None


def test_every_package_that_transformers_looks_for_is_known():
    """Of all models; transformers may look for a new one, or call its function by another name."""
    models, named = Path(transformers.__file__).parent / "models", set()
    for file in models.glob("*/modeling_*.py"):
        named |= set(re.findall(r'use_kernel_func_from_hub_with_fallback\(\s*"\w+", "(\w+)"', file.read_text()))
    assert named == set(linear_attention.PACKAGES)
