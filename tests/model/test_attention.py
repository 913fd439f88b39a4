"""Packed documents never see each other: same logits, same loss, same gradients as one by one."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, run_world
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    TrainingArguments,
)

from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.data.batches import Collator, PackedCollator
from zerofit.data.tokens import PackedDataset
from zerofit.model import attention
from zerofit.model.experimental import flash_3
from zerofit.model.load import load_model, load_tokenizer
from zerofit.parallel import sequence_parallel

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=5),
}


def documents():
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 64, (n,), generator=generator).tolist() for n in (7, 3, 12, 1, 9)]
    return [{"input_ids": r, "labels": r} for r in rows]


@pytest.mark.oracle
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_equals_one_by_one(name, checkpointing, record_property):
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation="sdpa")
    packed = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation=attention.register())
    packed.load_state_dict(plain.state_dict())
    plain.config.use_cache = packed.config.use_cache = False
    if checkpointing:
        packed.gradient_checkpointing_enable()
    packed.train()
    rows = documents()
    count = sum(len(r["labels"]) - 1 for r in rows)
    single = []
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        out = plain(input_ids=ids, labels=ids, num_items_in_batch=count)
        out.loss.backward() if ids.shape[1] > 1 else None
        single.append(out.logits[0])
    packs = PackedDataset(type("Rows", (list,), {"__getitem__": _get})(rows), 32)
    assert len(packs) == 1
    order = packs.packs[0]
    out = packed(**PackedCollator()([packs[0]]), num_items_in_batch=count)
    out.loss.backward()
    wanted = torch.cat([single[i] for i in order])
    record_property("relative_difference", ((out.logits[0] - wanted).norm() / wanted.norm()).item())
    torch.testing.assert_close(out.logits[0], wanted, rtol=1e-5, atol=1e-6)
    gradients = dict(packed.named_parameters())
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[key].grad, parameter.grad, rtol=1e-5, atol=1e-6)


def _get(self, key):
    return [row[key] for row in self] if isinstance(key, str) else list.__getitem__(self, key)


def test_changing_one_document_leaves_the_others_untouched():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(CONFIGS["llama"]), attn_implementation=attention.register()
    ).eval()
    rows = documents()
    collate = PackedCollator()
    pack = {k: [t for r in rows for t in r[k]] for k in ("input_ids", "labels")}
    pack["lengths"] = [len(r["input_ids"]) for r in rows]
    before = model(**collate([pack]), use_cache=False).logits
    changed = dict(pack, input_ids=[(t + 1) % 64 for t in pack["input_ids"][:7]] + pack["input_ids"][7:])
    after = model(**collate([changed]), use_cache=False).logits
    assert torch.equal(before[0, 7:], after[0, 7:])
    assert not torch.allclose(before[0, :7], after[0, :7])


def test_plain_sdpa_would_contaminate():
    """Why the kit refuses it: the same batch through transformers' sdpa with a padding mask reads across documents."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"]), attn_implementation="sdpa").eval()
    ids = torch.tensor([[t for r in documents() for t in r["input_ids"]]])
    changed = ids.clone()
    changed[0, :7] = (changed[0, :7] + 1) % 64
    positions = torch.cat([torch.arange(len(r["input_ids"])) for r in documents()])[None]
    logits = [
        model(input_ids=i, position_ids=positions, attention_mask=torch.ones_like(i)).logits for i in (ids, changed)
    ]
    assert not torch.allclose(logits[0][0, 7:], logits[1][0, 7:], atol=1e-3)


def test_padded_batches_fall_back_to_sdpa():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(CONFIGS["llama"]), attn_implementation=attention.register()
    ).eval()
    rows = documents()
    batch = Collator(0)(rows)
    logits = model(**batch).logits
    for i, row in enumerate(rows):
        alone = model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        torch.testing.assert_close(logits[i, : len(alone)], alone, rtol=1e-4, atol=1e-5)


def test_a_sliding_window_holds_without_boundaries_too():
    torch.manual_seed(0)
    config = CONFIGS["mistral-window"]
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
    other = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention.register()).eval()
    other.load_state_dict(plain.state_dict())
    ids = torch.tensor([documents()[2]["input_ids"]])
    torch.testing.assert_close(other(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-5, atol=1e-6)


def test_the_start_up_self_test_finds_contamination(tokenizer):
    """Relative logit difference 0 for our attention, large for one that ignores the boundaries."""
    torch.manual_seed(0)
    arguments = TrainingArguments(use_cpu=True)
    for name, mixes in ((attention.register(), False), ("sdpa", True)):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"]), attn_implementation=name)
        if mixes:  # what happens to a row of documents without boundaries and positions
            forward = model.forward
            model.forward = lambda input_ids, attention_mask=None, use_cache=None, forward=forward, **kw: forward(
                input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False
            )
        found = attention.packed_logit_error(model, documents(), 0, arguments)
        assert (found > 0.05) == mixes and (found < 1e-5) == (not mixes)


@pytest.mark.slow
def test_padding_free_rows_train_like_padded_ones(tmp_path):
    flags = [
        "--data", str(TINY / "train.jsonl"), "--max_samples", "60", "--effective_batch_size", "8", "--zero", "2",
        "--num_train_epochs", "1", "--learning_rate", "1e-4", "--logging_steps", "1", "--save_strategy", "no",
        "--num_samples", "0",
    ]  # fmt: skip
    runs = run_world(2, {v: ("sft", [*flags, "--padding_free", v]) for v in ("true", "false")}, tmp_path)
    torch.testing.assert_close(torch.tensor(runs["true"].losses), torch.tensor(runs["false"].losses), rtol=1e-4, atol=0)


@pytest.mark.slow  # test_stream compares packed rows on one and two ranks too
def test_packing_trains_the_same_on_one_and_two_ranks(tmp_path):
    flags = [
        "--data", str(TINY / "train.jsonl"), "--max_samples", "200", "--packing", "--max_length", "96",
        "--eval_data", str(TINY / "eval.jsonl"), "--effective_batch_size", "8", "--num_train_epochs", "1",
        "--learning_rate", "1e-4", "--logging_steps", "1", "--save_strategy", "no", "--num_samples", "1",
    ]  # fmt: skip
    one = run_world(1, {"one": ("sft", [*flags, "--per_device_train_batch_size", "2"])}, tmp_path)["one"]
    two = run_world(2, {"two": ("sft", [*flags, "--per_device_train_batch_size", "1", "--zero", "2"])}, tmp_path)["two"]
    torch.testing.assert_close(torch.tensor(one.losses), torch.tensor(two.losses), rtol=1e-4, atol=0)
    evaluations = [r.json("result.json")["eval_loss"] for r in (one, two)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-4)


SMALL = SHAPE | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SSM = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
TWO_KINDS = ["sliding_attention", "full_attention"]
APART = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {"sliding_window": 5}, "phi3": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5, "layer_types": TWO_KINDS}, "olmo2": {}, "smollm3": {},
    "gpt2": {"n_positions": 256}, "qwen3_moe": EXPERTS | {"num_experts": 4}, "mixtral": {"num_local_experts": 4},
    "deepseek_v3": EXPERTS | {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip
MIXED = {  # detected by the check on the model
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": SSM | {"num_local_experts": 2, "layer_types": ["mamba", "attention"]},
    "minimax": {"num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "recurrent_gemma": {
        "lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "falcon_h1": SSM | {"mamba_d_ssm": 64}, "mamba": {"state_size": 8}, "rwkv": {"attention_hidden_size": 32},
    "mamba2": {"state_size": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "jamba": {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
}  # fmt: skip
RAISES = {
    "gemma2": {}, "gpt_oss": {"num_local_experts": 4, "layer_types": TWO_KINDS},
    "qwen3_next": EXPERTS | {
        "num_experts": 4, "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip
WITH_SDPA = ("jamba", "llama4_text")  # of those below
EARLY = ("gemma2", "gpt_oss", "mamba", "mamba2", "rwkv", "jamba", "bloom", "llama4_text")


def small(kind, dtype=torch.float32):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL | (APART | MIXED | RAISES)[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register()).to(dtype)
    model.gradient_checkpointing_enable() if model.supports_gradient_checkpointing else None
    return model.train()


def proof(model):
    arguments = TrainingArguments(use_cpu=True)
    return attention.packed_logit_error(model, documents(), 0, arguments), attention.cross_document_gradient(
        model, documents(), arguments
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", APART)
def test_architectures_that_pass_the_self_test(kind, dtype):
    model = small(kind, dtype)
    apart, leak = proof(model)
    assert apart < (1e-5 if dtype == torch.float32 else 0.02) and leak == 0
    assert model.training and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MIXED)
def test_architectures_whose_state_crosses_documents_are_found(kind, dtype):
    """By the gradient, in any precision; logits alone miss some: LFM2 is 1e-4 off with random weights."""
    assert proof(small(kind, dtype))[1] > 1e-4


@pytest.mark.parametrize("kind", RAISES)
def test_architectures_that_the_attention_cannot_serve_raise(kind):
    """transformers before 5.20 mixes the documents of a linear attention instead: then the self-test tells."""
    try:
        _, leak = proof(small(kind))
    except ValueError as error:
        assert "soft cap" in str(error) or "packed sequences apart" in str(error)
    else:
        assert kind == "qwen3_next" and leak > 1e-3


def settings(*flags):
    """Settings that only attention.resolve_for_model is missing in."""
    found = resolve.resolve_settings("sft", ["--data", str(TINY / "train.jsonl"), "--model", "m", *flags], 1)
    found.unseal()
    return found


@pytest.mark.bad_input
@pytest.mark.parametrize("kind", EARLY)
def test_refused_or_padded_before_the_weights_are_loaded(kind):
    config = AutoConfig.for_model(kind)
    with pytest.raises(UserError, match=r"^--packing: .*; train without --packing"):
        attention.resolve_for_model(settings("--packing"), config)
    found = settings("--padding_free", "true")
    attention.resolve_for_model(found, config)
    assert (found.padding_free, found.attn_implementation) == (False, "sdpa" if kind in WITH_SDPA else "eager")


@pytest.mark.bad_input
def test_a_window_that_only_the_mask_knows():
    config = AutoConfig.for_model("qwen2_moe", use_sliding_window=True, sliding_window=64)
    with pytest.raises(UserError, match="its window of 64 tokens in the mask only"):
        attention.resolve_for_model(settings("--packing", "--max_length", "128"), config)
    attention.resolve_for_model(settings("--packing", "--max_length", "64"), config)


@pytest.mark.bad_input
@pytest.mark.parametrize("flags", [["--packing"], []])
@pytest.mark.parametrize("name", ["flex_attention", "flash_attention_2", "flash_attention_3"])
def test_what_cannot_train_on_a_cpu_is_refused(name, flags):
    with pytest.raises(UserError, match=f"--attn_implementation {name}: .*; use sdpa"):
        settings("--attn_implementation", name, *flags)


@pytest.mark.bad_input
@pytest.mark.parametrize("name, line", [("2", "flash-attn"), ("3", r"'transformers\[kernels\]'")])
def test_missing_flash_attention_names_its_install_line(name, line):
    with pytest.raises(UserError, match=f"is not installed: pip install {line}"):
        attention.check_available(f"flash_attention_{name}", use_cpu=False)


@pytest.mark.bad_input
def test_eager_is_refused_for_packed_rows():
    refused = "--attn_implementation eager: documents in one row would attend to each other"
    for flags in (["--packing"], ["--padding_free", "true"]):
        with pytest.raises(UserError, match=refused):
            settings("--attn_implementation", "eager", *flags)


@pytest.mark.parametrize("name", ["flex_attention", "flash_attention_3"])
def test_dropout_is_never_left_out(name):
    found = settings().replace(attn_implementation=name)
    attention.resolve_for_model(found, LlamaConfig(**SHAPE))
    with pytest.raises(UserError, match=r"does not support dropout, .*config.json has attention_dropout 0.1"):
        attention.resolve_for_model(found, LlamaConfig(**SHAPE, attention_dropout=0.1))


@pytest.mark.parametrize("flags, ranks", [([], 1), (["--sp_size", "2"], 2)])
@pytest.mark.parametrize("gpu, precision, dropout, line", [
    ("h100-80g", "bf16", 0.0, ""), ("h100-80g", "fp32", 0.0, "fp32: the varlen kernel supports bf16"),
    ("h100-80g", "bf16", 0.1, "attention_dropout 0.1:"), ("h100-80g", "fp16", 0.0, ""),
    ("t4-16g", "fp16", 0.0, "the varlen kernel needs an Ampere GPU"), ("h100-80g", "bf16 weights", 0.0, ""),
])  # fmt: skip
def test_a_gpu_without_the_varlen_kernel_is_told_of_the_loop(flags, ranks, gpu, precision, dropout, line):
    kinds = {"bf16": ["--bf16", "true"], "fp32": ["--bf16", "false"], "fp16": ["--fp16", "true"]}
    kinds["bf16 weights"] = ["--bf16", "false", "--dtype", "bfloat16"]  # without autocast
    flags = ["--data", "none", "--model", "m", *kinds[precision], *flags]
    found = resolve.resolve_settings("sft", flags, ranks, hardware.GPUS[gpu])
    resolve.resolve_for_model(found, LlamaConfig(**SHAPE, attention_dropout=dropout))
    (said,) = [one for one in found.decisions if "loops over documents, which is slower" in one] or [""]
    assert found.precision == precision.replace("bf16 weights", "fp32")
    assert found.compute_dtype == precision.removesuffix(" weights")
    assert said.startswith(line) and bool(said) is bool(line)


class OnGpu(torch.Tensor):
    """A tensor that says that it lies on a GPU."""

    is_cuda = property(lambda self: True)


@pytest.mark.parametrize("capability, dtype, size", [
    ((7, 5), torch.float16, 16), ((9, 0), torch.float32, 16), ((9, 0), torch.float16, 264), ((9, 0), torch.float16, 12),
])  # fmt: skip
def test_the_loop_on_a_gpu_calls_a_kernel_that_holds_no_scores(monkeypatch, capability, dtype, size):
    """FlashAttention raises for these; of torch's other kernels only the one that holds all scores groups heads."""
    called, plain = [], torch.nn.functional.scaled_dot_product_attention

    def sdpa(q, k, v, **more):
        called.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return plain(q, k, v, **more)

    attention._is_ampere_or_later.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    query, key, value = (torch.randn(1, heads, 8, size, dtype=dtype) for heads in (4, 2, 2))
    named = {"cu_seq_lens_q": torch.tensor([0, 3, 8], dtype=torch.int32), "max_length_q": 5}
    on_gpu, _ = attention.packed_attention(None, *(x.as_subclass(OnGpu) for x in (query, key, value)), None, **named)
    on_cpu, _ = attention.packed_attention(None, query, key, value, None, **named)
    attention._is_ampere_or_later.cache_clear()
    assert called[:2] == [((1, 4, tokens, size),) * 3 for tokens in (3, 5)]
    torch.testing.assert_close(on_gpu.as_subclass(torch.Tensor), on_cpu)


def test_layers_with_heads_that_are_too_wide_for_the_kernel_are_told():
    """Gemma-4's global layers have 512 numbers a head, the others 256."""
    found = resolve.resolve_settings("sft", ["--data", "none", "--model", "m"], 1, hardware.GPUS["h100-80g"])
    attention.resolve_for_model(found, Gemma4TextConfig(num_hidden_layers=6))
    line = "head_dim 512: the varlen kernel supports multiples of 8 up to 256; attention in these layers loops"
    assert [one.startswith(line) for one in found.decisions if "loops over documents" in one] == [True]


@pytest.mark.parametrize("capability, dtype, repeats", [
    ((7, 5), torch.float16, True), ((9, 0), torch.float32, True), ((9, 0), torch.float16, False),
])  # fmt: skip
def test_rows_without_a_mask_too(monkeypatch, capability, dtype, repeats):
    """An evaluation whose rows need no padding, and the certificate's forwards."""
    called, plain = [], torch.nn.functional.scaled_dot_product_attention

    def sdpa(q, k, v, **more):
        called.append(tuple(k.shape))
        return plain(q, k, v, **more)

    attention._is_ampere_or_later.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    query, key, value = (torch.randn(1, heads, 8, 16, dtype=dtype) for heads in (4, 2, 2))
    on_gpu, _ = attention.packed_attention(module, *(x.as_subclass(OnGpu) for x in (query, key, value)), None)
    on_cpu, _ = attention.packed_attention(module, query, key, value, None)
    attention._is_ampere_or_later.cache_clear()
    assert called == [(1, 4 if repeats else 2, 8, 16), (1, 2, 8, 16)]
    torch.testing.assert_close(on_gpu.as_subclass(torch.Tensor), on_cpu)


@pytest.mark.parametrize("gpu, precision, ours", [
    ("t4-16g", "--fp16 true", True), ("h100-80g", "--fp16 true", False), ("h100-80g", "--bf16 true", False),
    ("h100-80g", "--bf16 false", True), ("h100-80g", "--bf16 false --dtype bfloat16", False),
])  # fmt: skip
def test_plain_sdpa_is_called_so_where_no_flash_attention_runs(monkeypatch, gpu, precision, ours):
    from transformers import AttentionInterface

    registered = []
    monkeypatch.setattr(AttentionInterface, "register", lambda *of: registered.append(of))
    flags = ["--data", "none", *precision.split()]
    attention.hold_no_scores(resolve.resolve_settings("sft", flags, 1, hardware.GPUS[gpu]))
    assert registered == [("sdpa", attention.sdpa_without_scores)] * ours


@pytest.mark.parametrize("flag", ["bf16", "pure_bf16"])
def test_bf16_is_refused_on_a_gpu_that_has_none(flag):
    with pytest.raises(UserError, match=rf"^--{flag}: T4 does not support bf16; use --fp16 true"):
        resolve.resolve_settings("sft", ["--data", "none", f"--{flag}", "true"], 1, hardware.GPUS["t4-16g"])


def test_dropout_keeps_documents_apart_in_the_loop():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**SHAPE, attention_dropout=0.5), attn_implementation=attention.register()
    )
    before = torch.get_rng_state()
    apart, leak = proof(model)
    assert apart < 1e-5 and leak == 0 and torch.equal(before, torch.get_rng_state())
    batch = PackedCollator()(documents())
    model.train()
    assert not torch.equal(*(model(**batch, use_cache=False).logits for _ in range(2)))


def test_one_document_neither_moves_anothers_logits_nor_its_gradient():
    """Weight gradients of document B's loss are bitwise the same whatever stands in document A."""
    model = small("qwen3")
    batch = PackedCollator()(documents())
    start_b, end_b = batch["cu_seq_lens_q"][2:4].tolist()
    changed = dict(batch, input_ids=batch["input_ids"].clone())
    changed["input_ids"][0, :start_b] = (batch["input_ids"][0, :start_b] + 1) % 64
    gradients = []
    for given in (batch, changed):
        labels = torch.full_like(batch["labels"], -100)
        labels[0, start_b + 1 : end_b] = batch["labels"][0, start_b + 1 : end_b]
        model.zero_grad()
        model(**dict(given, labels=labels), use_cache=False).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert any(g.abs().max() > 1e-3 for g in gradients[0])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_flex_attention_keeps_documents_apart():
    """Its forward; torch has no backward on a CPU. Run eagerly, to spend no half minute on compiling it."""
    torch.manual_seed(0)
    for config in CONFIGS.values():
        plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
        flex = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="flex_attention").eval()
        flex.load_state_dict(plain.state_dict())
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            together = flex(**PackedCollator()(documents()), use_cache=False).logits[0]
            alone = [plain(input_ids=torch.tensor([row["input_ids"]])).logits[0] for row in documents()]
            torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match="backward on CPU"), torch.compiler.set_stance("force_eager"):
        attention.cross_document_gradient(flex, documents(), TrainingArguments(use_cpu=True))


@pytest.mark.oracle
def test_flex_attention_computes_gemma2s_soft_cap_and_windows_as_eager_does():
    """Packed against eager one by one, and one document's logits whatever stands in another; on a CPU, the forward."""
    torch.manual_seed(0)
    config = Gemma2Config(**SHAPE, sliding_window=5, attn_logit_softcapping=0.5, query_pre_attn_scalar=1)
    eager = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    flex = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="flex_attention").eval()
    flex.load_state_dict(eager.state_dict())
    batch = PackedCollator()(documents())
    start, end = batch["cu_seq_lens_q"][1:3].tolist()
    changed = dict(batch, input_ids=batch["input_ids"].clone())
    changed["input_ids"][0, :start] = (batch["input_ids"][0, :start] + 1) % 64
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        together, other = (flex(**given, use_cache=False).logits[0] for given in (batch, changed))
        alone = torch.cat([eager(input_ids=torch.tensor([row["input_ids"]])).logits[0] for row in documents()])
        eager.config.attn_logit_softcapping = None
        for layer in eager.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        uncapped = torch.cat([eager(input_ids=torch.tensor([row["input_ids"]])).logits[0] for row in documents()])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    assert (alone - uncapped).abs().max() > 1e-4  # the cap is felt
    assert torch.equal(together[start:end], other[start:end]) and not torch.equal(together, other)


# --- FlashAttention 3 on Hopper, on a stand-in of its switch: no GPU has run it ---


class FlashSwitch:
    """Stands for torch's switch and for the two kernels: a loop over documents, and it with an error of FA3's."""

    def __init__(self, monkeypatch, of_fa3=lambda out: out, leaks=False, capability=(9, 0), installed=True):
        self.calls, self.of_fa3, self.leaks, self.heads = [], of_fa3, leaks, set()
        real = flash_3._problem
        for name, instead in (("activate_flash_attention_impl", self.calls.append),
                              ("restore_flash_attention_impl", lambda: self.calls.append("restored"))):  # fmt: skip
            monkeypatch.setattr(torch.nn.attention, name, instead)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(flash_3, "find_spec", lambda name: installed or None)
        monkeypatch.setattr(attention, "varlen", self.varlen)
        monkeypatch.setattr(
            flash_3, "_problem", lambda text, dtype, _, ranks: real(text, dtype, torch.device("cpu"), ranks)
        )

    def varlen(self, query, key, value, bounds, longest, window, scaling):
        self.heads.add((query.shape[1], key.shape[1]))
        on = self.calls[-1:] == ["FA3"]
        if on and self.leaks:
            bounds = bounds[[0, -1]]
        kwargs = {"cu_seq_lens_q": bounds, "sliding_window": window, "scaling": scaling}
        out = attention.packed_attention(None, query, key, value, None, **kwargs)[0].transpose(1, 2)[0].transpose(0, 1)
        return (self.of_fa3(out) if on else out)[None]

    def line(self, config, **values) -> str:
        given = {"use_cpu": False, "attn_implementation": attention.NAME, "compute_dtype": "bf16", "sp_size": 1}
        settings = SimpleNamespace(decisions=[], full_determinism=False, **given | values)
        flash_3.self_test_kernel(settings, config)
        return "".join(settings.decisions)


@pytest.mark.parametrize("name", CONFIGS)
def test_flash_attention_3_is_used_where_it_computes_the_same(name, monkeypatch):
    switch = FlashSwitch(monkeypatch, of_fa3=lambda out: out * 1.001)
    assert "attention by FlashAttention 3" in switch.line(CONFIGS[name])
    runs = 1 + bool(getattr(CONFIGS[name], "sliding_window", None))
    assert switch.calls == ["FA3", "restored"] * runs + ["FA3"]


def fails(out):
    raise RuntimeError("FA3 backward unsupported: window")


@pytest.mark.fault
@pytest.mark.parametrize("wrong, why", [
    ({"of_fa3": lambda out: out * 1.1}, "% (bound 2.0%)"),
    ({"of_fa3": lambda out: out * float("nan")}, "FlashAttention 3 differs from it by nan"),
    ({"leaks": True}, "documents in one row attend to each other"),
    ({"of_fa3": fails}, "(FA3 backward unsupported: window)"),
    ({"installed": False}, "flash_attn_interface of FlashAttention 3 is not installed"),
])  # fmt: skip
def test_flash_attention_3_that_fails_its_self_test_is_off_with_one_line(wrong, why, monkeypatch):
    switch = FlashSwitch(monkeypatch, **wrong)
    line = switch.line(CONFIGS["llama"])
    assert line.startswith("attention by FlashAttention 2: ") and why in line
    assert switch.calls[-1:] in (["restored"], [])


def test_split_rows_have_flash_attention_3_for_the_heads_of_a_rank(monkeypatch):
    """4 ranks of a model with 4 heads and 2 of keys, which are repeated."""
    switch = FlashSwitch(monkeypatch)
    line = switch.line(CONFIGS["llama"], attn_implementation=sequence_parallel.NAME, sp_size=4)
    assert "attention by FlashAttention 3" in line and switch.heads == {(1, 1)}


def test_gpus_of_which_some_are_not_hopper_share_flash_attention_2_with_a_line(monkeypatch):
    switch = FlashSwitch(monkeypatch)
    monkeypatch.setattr(flash_3.distributed, "all_gather", lambda value: [value, False] if value is True else [value])
    line = switch.line(CONFIGS["llama"])
    assert line.startswith("attention by FlashAttention 2: ") and "1 of 2 GPUs are not Hopper" in line
    assert not switch.calls


@pytest.mark.parametrize("values", [
    {"use_cpu": True}, {"attn_implementation": "eager"}, {"compute_dtype": "fp32"}, {"capability": (8, 0)},
])  # fmt: skip
def test_other_attention_and_other_gpus_are_left_alone(values, monkeypatch):
    switch = FlashSwitch(monkeypatch, capability=values.pop("capability", (9, 0)))
    assert switch.line(CONFIGS["llama"], **values) == "" and not switch.calls


def test_torch_still_has_the_switch_to_flash_attention_3():
    assert "FA3" in torch.nn.attention.list_flash_attention_impls()
    assert (
        inspect.signature(torch.nn.attention._fa3.register_flash_attention_fa3).parameters["module_path"].default
        == flash_3.MODULE
    )


@pytest.mark.slow
def test_the_self_test_leaves_training_alone_in_every_stage(tmp_path):
    """Packed runs pass the self-test under DDP and ZeRO 2 and 3 and give the same losses."""
    flags = [
        "--data", str(TINY / "train.jsonl"), "--max_samples", "60", "--packing", "--max_length", "96", "--max_steps",
        "3", "--effective_batch_size", "4", "--learning_rate", "1e-4", "--logging_steps", "1", "--save_strategy", "no",
        "--num_samples", "1",
    ]  # fmt: skip
    cases = {f"zero{z}": ("sft", [*flags, "--zero", z]) for z in "023"}
    cases |= {f"lora{z}": ("lora", [*flags, "--zero", z]) for z in "03"}
    runs = run_world(2, cases, tmp_path)
    for recipe in ("zero", "lora"):
        found = [torch.tensor(r.losses) for name, r in runs.items() if name.startswith(recipe)]
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-4, atol=0)


def test_a_class_without_sdpa_gets_eager():
    flags = ["--model", str(ROOT / "tests" / "configs" / "gemma2-2b"), "--data", "none"]
    settings = resolve.resolve_settings("sft", flags, 1)
    resolve.resolve_for_model(settings)
    assert settings.attn_implementation == "eager"
    assert "attn_implementation eager: Gemma2ForCausalLM does not support sdpa" in settings.decisions
    settings = resolve.resolve_settings("sft", [*flags, "--attn_implementation", "sdpa"], 1)
    with pytest.raises(UserError, match="--attn_implementation sdpa: Gemma2ForCausalLM does not support it; use eager"):
        resolve.resolve_for_model(settings)


@pytest.mark.parametrize("kind, has_flex", [("gemma2", True), ("mimo_v2_flash", False)])
def test_a_gpu_is_told_of_flex_attention_where_the_class_has_it(kind, has_flex):
    """tests/model/test_flex.py has the self-test that it follows on."""
    found = resolve.resolve_settings("sft", ["--data", "none", "--model", "m"], 1, hardware.GPUS["h100-80g"])
    found.unseal()
    attention.resolve_for_model(found, AutoConfig.for_model(kind))
    (line,) = (line for line in found.decisions if line.startswith("attn_implementation eager: "))
    assert ("; flex_attention, which needs no memory for S x S scores, replaces" in line) is has_flex


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cu130", "2.15.0", "3.0.0"])
def test_cudnn_is_left_out_of_every_release(version, monkeypatch):
    """No release is known to be right: tests/gpu/test_attention.py computes the known cases."""
    from types import SimpleNamespace

    monkeypatch.setattr(torch, "__version__", version)
    torch.backends.cuda.enable_cudnn_sdp(True)
    settings = SimpleNamespace(use_cpu=False, decisions=[])
    attention.avoid_wrong_kernels(settings)
    assert not torch.backends.cuda.cudnn_sdp_enabled() and len(settings.decisions) == 1
    torch.backends.cuda.enable_cudnn_sdp(True)


def test_the_self_test_forks_no_other_ranks_generator(monkeypatch):
    """fork_rng without `devices` would take the state of every GPU of the machine, and warn."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    net = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"]), attn_implementation=attention.register())
    assert attention.cross_document_gradient(net, documents(), TrainingArguments(use_cpu=True)) == 0


SHORT, WINDOW = [40, 7, 170, 1], 16
X86, AMX = {"avx2": True}, {"avx2": True, "amx_bf16": True}  # what a CPU can do


def attend(dtype, lengths, window=None, autocast=False):
    """Return output and gradients of packed rows with values of bf16, computed in `dtype`, by document."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(lengths), 16) for heads in (4, 2, 2)]
    qkv = [torch.randn(shape, generator=generator).mul(2).bfloat16() for shape in shapes]
    # Rotary embeddings leave q and k in fp32 under autocast.
    kinds = (torch.float32, torch.float32, torch.bfloat16) if autocast else (dtype,) * 3
    qkv = [x.to(kind).requires_grad_() for x, kind in zip(qkv, kinds, strict=True)]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = attention.packed_attention(
            None, *qkv, None, cu_seq_lens_q=bounds, max_length_q=max(lengths), sliding_window=window
        )[0]
    upstream = torch.randn(out.shape, generator=generator).bfloat16()
    out.backward(upstream.to(out.dtype))
    return out, [out.detach().double(), *(x.grad.double() for x in qkv)]


@pytest.mark.oracle
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("autocast", [False, True])
def test_short_documents_in_bf16_round_less_on_a_cpu_than_sdpa(autocast, window, monkeypatch, record_property):
    """Forward and backward against fp64; AMX says that the CPU attends in bf16."""
    wanted = attend(torch.float64, SHORT, window)[1]
    errors = {}
    for name, cpu in {"fp32": X86, "bf16": AMX}.items():
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda cpu=cpu: cpu)
        out, found = attend(torch.bfloat16, SHORT, window, autocast)
        assert out.dtype == torch.bfloat16
        errors[name] = [((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]
    record_property("relative_difference", max(errors["fp32"]))
    assert all(a < b for a, b in zip(errors["fp32"], errors["bf16"], strict=True))
    assert max(errors["fp32"]) < 2**-9  # one rounding to bf16


def test_which_documents_a_cpu_attends_to_in_fp32(monkeypatch):
    cpu, longest = torch.device("cpu"), attention.FP32_TOKENS
    for can, tokens, dtype, wanted in [
        (X86, longest, torch.bfloat16, torch.float32),
        (X86 | {"avx512_bf16": True}, longest + 1, torch.bfloat16, torch.bfloat16),
        (X86 | {"avx512_bf16": False}, longest + 1, torch.bfloat16, torch.float32),
        (X86, 1, torch.float64, torch.float64),
        (X86, 1, torch.float16, torch.float16),
        (AMX, 1, torch.bfloat16, torch.bfloat16),
        ({"neon": True}, 1, torch.bfloat16, torch.bfloat16),
    ]:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda can=can: can)
        assert attention._dtype_of_document(cpu, dtype, tokens) == wanted
    assert attention._dtype_of_document(torch.device("cuda"), torch.bfloat16, 1) == torch.bfloat16


def test_varlen_attention_copies_no_value_that_fits(monkeypatch):
    from torch.nn.attention import varlen

    seen = {}

    def kernel(q, k, v, *bounds, enable_gqa=False, **rest):
        seen["value"] = v
        return q

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    query, bounds = torch.zeros(1, 2, 5, 8), torch.tensor([0, 5])
    for size in (8, 4):
        value = torch.ones(1, 2, 5, size)
        out = attention.varlen(query, query, value, bounds, 5, 0, None)
        assert (seen["value"].data_ptr() == value.data_ptr()) is (size == 8)
        assert seen["value"].shape == (5, 2, 8) and out.shape == (1, 5, 2, size)


def test_whatever_loads_a_model_leaves_cudnn_out():
    """Training, probe and replay load by model.load_model; chat and the comparison of an export by saved.load."""
    from zerofit.export import source

    settings = resolve.resolve_settings("sft", [], 1)
    attention.register()
    for load in (
        lambda: load_model(settings, load_tokenizer(settings)),
        lambda: source.load(source.Saved(TINY / "model")),
    ):
        torch.backends.cuda.enable_cudnn_sdp(True)
        load()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
