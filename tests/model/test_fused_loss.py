"""The loss without logits and the tiled MLP: numbers, bytes and refusals."""

import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run_world
from hypothesis import given, settings
from hypothesis import strategies as st
from test_training import flags
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.data.batches import CountingCollator, PackedCollator
from zerofit.model import attention, fused_loss, tiled_mlp
from zerofit.train import nan_guard

sys.path.insert(0, str(ROOT / "benchmarks"))
from allocations import Allocations


class NoWaits(TorchDispatchMode):
    """Fails on operations for which the host would wait for a GPU: those that read a value, or count."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        aten = torch.ops.aten
        by_mask = operation is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        if by_mask or operation in (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default):
            raise AssertionError(f"{operation} waits for the device")
        return operation(*args, **(kwargs or {}))


def apart(a, b) -> float:
    """Relative difference in norm."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def problem(tokens=157, vocabulary=500, features=32, dtype=torch.float32, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, features, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, features, generator=generator) * 0.4).to(dtype).requires_grad_()
    offset = torch.randn(vocabulary, generator=generator).to(dtype).requires_grad_() if bias else None
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = -100
    return hidden, weight, offset, labels


def dense(hidden, weight, bias, labels, scale=1.0, softcap=None):
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def value_and_gradients(function, inputs, divisor=100.0, **more):
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) if t is not None else None for t in inputs[:3]]
    value = function(*leaves, inputs[3], **more)
    (value / divisor).backward()
    return [value.detach(), *(t.grad for t in leaves if t is not None and t.requires_grad)]


@pytest.mark.oracle
@pytest.mark.parametrize("rows", [1, 64, 1000])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (1.0, 5.0), (2.0, 5.0)])
@pytest.mark.parametrize("bias", [True, False])
def test_fp32_equals_the_dense_loss(rows, scale, softcap, bias, record_property):
    inputs = problem(bias=bias)
    wanted = value_and_gradients(dense, inputs, scale=scale, softcap=softcap)
    found = value_and_gradients(fused_loss.linear_cross_entropy, inputs, scale=scale, softcap=softcap, rows=rows)
    largest = max(apart(a, b) for a, b in zip(found, wanted, strict=True))
    record_property("relative_difference", largest)
    assert largest < 1e-6


@pytest.mark.oracle
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(2, 60), st.integers(1, 50), st.booleans(), st.integers(0, 999))
def test_every_chunk_size_gives_the_same(tokens, vocabulary, rows, bias, seed):
    inputs = problem(tokens, vocabulary, 8, torch.float64, bias, seed)
    wanted = value_and_gradients(dense, inputs)
    found = value_and_gradients(fused_loss.linear_cross_entropy, inputs, rows=rows)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.oracle
@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_is_as_close_to_fp64_as_the_dense_loss(dtype, digits):
    """The loss to 1e-4; gradients, over 8 chunks, within 1.5 times the dense loss's own rounding error."""
    inputs = problem(tokens=512, vocabulary=1000, features=64, dtype=dtype)
    exact = value_and_gradients(dense, [t if t.dtype == torch.long else t.double() for t in detached(inputs)])
    rounded = value_and_gradients(dense, inputs)
    found = value_and_gradients(fused_loss.linear_cross_entropy, inputs, rows=48)
    assert found[0].dtype == torch.float32 and apart(found[0], exact[0]) < 1e-4
    for a, b, c in zip(found[1:], rounded[1:], exact[1:], strict=True):
        assert a.dtype == dtype and apart(a, c) < 1.5 * max(apart(b, c), digits / 2)


def detached(inputs):
    return [t.detach().requires_grad_(t.requires_grad) if t.dtype != torch.long else t for t in inputs]


@pytest.mark.oracle
def test_fp16_gradients_do_not_vanish_before_the_loss_scale():
    """A million tokens a step: p / 1e6 is no fp16 number, but scaled by 65536 in the backward it is."""
    inputs = problem(dtype=torch.float16)
    exact = value_and_gradients(
        dense, [t if t.dtype == torch.long else t.double() for t in detached(inputs)], 1e6 / 65536
    )
    found = value_and_gradients(fused_loss.linear_cross_entropy, inputs, 1e6 / 65536)
    assert all(apart(a, b) < 2e-3 for a, b in zip(found[1:], exact[1:], strict=True))


@pytest.mark.oracle
def test_autocast_with_fp32_weights():
    inputs = problem()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = value_and_gradients(dense, inputs)
        found = value_and_gradients(fused_loss.linear_cross_entropy, inputs, rows=50)
    assert apart(found[0], wanted[0]) < 1e-6
    assert all(a.dtype == torch.float32 and apart(a, b) < 8e-3 for a, b in zip(found[1:], wanted[1:], strict=True))


def test_no_label_at_all():
    hidden, weight, bias, labels = problem()
    found = value_and_gradients(fused_loss.linear_cross_entropy, (hidden, weight, bias, torch.full_like(labels, -100)))
    assert all((t == 0).all() for t in found)


@pytest.mark.parametrize("documents", [None, (torch.arange(157) // 40, 4)])
def test_a_count_from_the_host_gives_the_same_numbers_and_a_wrong_one_nan(documents):
    inputs = problem()
    inputs[3][-1] = -100
    count = int((inputs[3] != -100).sum())

    def loss(*leaves, **more):
        if documents is None:
            return fused_loss.linear_cross_entropy(*leaves, rows=64, **more)
        return fused_loss.document_log_probs(*leaves, *documents, rows=64, **more).sum()

    wanted = value_and_gradients(loss, inputs)
    with NoWaits():
        found = value_and_gradients(loss, inputs, count=count)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    for other in (count - 1, count + 1):
        assert all(t.isnan().any() for t in value_and_gradients(loss, inputs, count=other))


def test_a_second_backward_is_refused():
    value = fused_loss.linear_cross_entropy(*problem())
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already run"):
        value.backward()


def test_bytes():
    """A chunk of logits, the gradients, and nothing else of note; a frozen head gets no gradient at all."""
    tokens, vocabulary, features, rows = 512, 8000, 16, 64
    hidden, weight, bias, labels = problem(tokens, vocabulary, features)
    chunk, head = 4 * rows * vocabulary, 4 * vocabulary * features
    with Allocations() as wanted:
        dense(hidden, weight, bias, labels).backward()
    with Allocations() as full:
        fused_loss.linear_cross_entropy(hidden, weight, bias, labels, rows=rows).backward()
    with Allocations() as frozen:
        fused_loss.linear_cross_entropy(hidden, weight.detach(), bias.detach(), labels, rows=rows).backward()
    with Allocations() as evaluated, torch.no_grad():
        fused_loss.linear_cross_entropy(hidden, weight, bias, labels, rows=rows)
    assert wanted.largest == 4 * tokens * vocabulary and wanted.peak > 3 * wanted.largest
    assert full.largest == chunk
    small = 4 * hidden.nbytes  # of the size of the hidden states: their gradient, labels, indices
    assert chunk < evaluated.peak < chunk + small
    assert chunk < frozen.peak < chunk + small < chunk + head
    assert chunk + head < full.peak < chunk + head + small < 0.25 * wanted.peak


@pytest.mark.parametrize(("vocabulary", "rows"), [(512, 4096), (32_000, 4096), (128_256, 2048), (262_144, 1024)])
def test_rows_per_chunk(vocabulary, rows):
    assert fused_loss.rows_per_chunk(vocabulary) == rows


# --- whole models ---

SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "soft cap": ("gemma2", {"final_logit_softcapping": 1.5}),
    "divided": ("granite", {"logits_scaling": 8.0}),
    "multiplied": ("cohere", {"logit_scale": 0.25}),
    "bias": ("phi", {}),
    "router loss": ("mixtral", {"output_router_logits": True, "num_local_experts": 4}),
    "conv1d": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}),
}


def make(name):
    kind, more = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # logits that a cap or a scale changes
    return model


def batch(vocabulary=320):
    ids = torch.randint(3, vocabulary, (2, 24), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :5], labels[0, 12] = -100, -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def step(model, **more):
    model.zero_grad()
    out = model(**batch(), use_cache=False, **more)
    out.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return out.loss.detach(), gradients, out.logits


@pytest.mark.oracle
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("items", [None, torch.tensor(70)])
def test_models_without_their_logits(name, items, record_property):
    model = make(name)
    keys = list(model.state_dict())
    wanted, gradients, logits = step(model, num_items_in_batch=items)
    fused = fused_loss.FusedLoss(model, rows=16)
    with fused.on():
        found, fused_gradients, none = step(model, num_items_in_batch=items)
    assert none.shape[-1] == 0 and apart(found, wanted) < 1e-6
    assert gradients.keys() == fused_gradients.keys()
    largest = max(apart(fused_gradients[n], g) for n, g in gradients.items() if g.norm() > 0)
    record_property("relative_difference", largest)
    assert largest < 2e-5
    again, _, logits_again = step(model, num_items_in_batch=items)  # outside of `on`, and saving, as ever
    assert again == wanted and torch.equal(logits, logits_again)
    assert list(model.state_dict()) == keys
    if name == "tied":
        model.train(False)
        assert model.generate(batch()["input_ids"], max_new_tokens=2, do_sample=False).shape == (2, 26)


def trained(model, inputs, loss_context, bad=False):
    """Return the parameters after two steps as stage 0 takes them, the first without a finite gradient if `bad`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    trainer = SimpleNamespace(
        is_deepspeed_enabled=False, accelerator=SimpleNamespace(scaler=None), settings=None, model=model,
        optimizer=SimpleNamespace(optimizer=optimizer, _is_overflow=None),
    )  # fmt: skip
    guard, skipped = nan_guard.NanGuard(trainer), []
    for number in range(2):
        with NoWaits(), loss_context():
            loss = model(**inputs, use_cache=False).loss
            (loss * (float("nan") if bad and number == 0 else 1.0)).backward()
            guard.grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            guard.hold_back()
            optimizer.step()
        guard.look_back()
        skipped.append(trainer.optimizer._is_overflow)
        optimizer.zero_grad()
    assert not hasattr(optimizer, "found_inf") and skipped == [bad, False]
    return [p.detach().clone() for p in model.parameters()]


def test_the_host_waits_for_nothing_until_the_optimizer_is_queued():
    """Packed rows: forward, loss, backward, clipping and the step; a step without a finite gradient leaves no trace."""
    rows = [{"input_ids": list(range(3, 3 + n)), "labels": [-100] * 2 + list(range(5, 3 + n))} for n in (9, 14)]
    inputs = CountingCollator(PackedCollator())(rows)
    inputs = {name: value for name, value in inputs.items() if name not in ("cu_seq_lens_q", "cu_seq_lens_k")}
    count = inputs.pop("label_count")
    assert count == 7 + 12
    model = make("untied")
    model.set_attn_implementation(attention.register())
    start = {name: value.clone() for name, value in model.state_dict().items()}
    fused = fused_loss.FusedLoss(model, rows=16)
    both = trained(model, inputs, lambda: fused.on(count=count))
    model.load_state_dict(start)
    second = trained(model, inputs, lambda: fused.on(count=count), bad=True)
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with fused.on():
        model(**inputs, use_cache=False).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(second, model.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(second, both, strict=True))


def test_a_model_step_never_holds_the_logits():
    model = make("untied")
    fused = fused_loss.FusedLoss(model, rows=4)
    with Allocations() as dense_bytes:
        step(model)
    with fused.on(), Allocations() as bytes_held:
        step(model)
    assert dense_bytes.largest >= 4 * 48 * 320 > bytes_held.largest
    with fused.on(), Allocations() as bytes_held, torch.inference_mode():
        model.eval()(**batch(), use_cache=False)
    assert bytes_held.largest < 4 * 48 * 320 / 2


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("kind", "more", "text"),
    [
        ("bamba", {"z_loss_coefficient": 0.1}, "outside of its loss function|needs its logits"),
        ("inkling_text", {}, "truncates its logits"),
        ("bart", {"d_model": 32, "is_decoder": True}, "logits"),
    ],
)
def test_models_that_it_cannot_take(kind, more, text):
    with torch.device("meta"):
        config = AutoConfig.for_model(kind, **more)
        config.num_hidden_layers = 2
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(fused_loss.NotFused, match=text):
        fused_loss.FusedLoss(model)


def test_adapters_on_the_head():
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(make("untied"), LoraConfig(target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM"))
    with pytest.raises(fused_loss.NotFused, match="not a plain linear layer"):
        fused_loss.FusedLoss(adapted)
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    saved = get_peft_model(make("untied"), config)
    wanted, gradients, _ = step(saved)
    with fused_loss.FusedLoss(saved, rows=16).on():
        found, fused_gradients, _ = step(saved)
    assert apart(found, wanted) < 1e-6 and any("lm_head" in n for n in gradients)
    assert max(apart(fused_gradients[n], g) for n, g in gradients.items() if g.norm() > 0) < 2e-5


# --- the MLP in tiles ---


@pytest.mark.oracle
@pytest.mark.parametrize("tiles", [1, 2, 3, 7, 60])
def test_tiled_models_are_the_same(tiles, record_property):
    model = make("tied")
    wanted, gradients, _ = step(model)
    for module in tiled_mlp.find(model):
        tiled_mlp.tile(module, tiles)
    found, tiled, _ = step(model)
    assert apart(found, wanted) < 1e-6
    largest = max(apart(tiled[n], g) for n, g in gradients.items())
    record_property("relative_difference", largest)
    assert largest < 1e-5


def test_a_tiled_mlp_holds_its_intermediate_for_one_tile_only():
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

    module, hidden = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=512)), torch.randn(1, 800, 32)
    hidden.requires_grad_()
    with Allocations() as whole:
        module(hidden).sum().backward()
    tiled_mlp.tile(module, 8)
    with Allocations() as tiled:
        module(hidden).sum().backward()
    assert whole.largest == 4 * 800 * 512 and tiled.largest == 4 * 100 * 512
    assert tiled.peak < 0.3 * whole.peak


@pytest.mark.bad_input
def test_mlps_that_cannot_be_cut():
    for name in ("router loss",):
        with pytest.raises(UserError, match="mixture of experts"):
            tiled_mlp.find(make(name))


# --- mixtures of experts ---


def test_the_router_loss_counts_once_a_step_and_is_not_in_the_models_own_loss():
    model = make("router loss").requires_grad_(False)
    with_it, without = (model(**batch(), output_router_logits=on).loss for on in (True, False))
    router, given = fused_loss.router_loss(model), batch()
    outputs = model(**given)
    assert torch.equal(outputs.loss, without) and not torch.equal(with_it, without)
    assert model.config.router_aux_loss_coef == router.coefficient > 0  # what is saved with the model
    tokens = (given["labels"][:, 1:] != -100).sum()
    parts = [
        router.share(outputs, (row[1:] != -100).sum(), tokens) for row in given["labels"]
    ]  # two micro batches, the second is longer
    assert parts[0] < parts[1] and float(sum(parts)) == pytest.approx(router.coefficient * float(outputs.aux_loss))
    assert float(without + sum(parts)) == pytest.approx(float(with_it))
    assert fused_loss.router_loss(make("tied")) is None


@pytest.mark.bad_input
def test_a_router_loss_whose_coefficient_is_not_known_is_refused():
    model = make("tied")
    model.config.output_router_logits = True
    with pytest.raises(UserError, match="but LlamaForCausalLM does not have a router loss"):
        fused_loss.router_loss(model)


# --- flags ---


def parsed(*flags, recipe="sft"):
    """Settings without fused_loss.resolve and the resolvers after it."""
    found = resolve.resolve_settings(recipe, list(flags), 1, arguments_only=True)
    found.unseal()
    return found


def test_auto_follows_the_vocabulary_and_what_speaks_against_it():
    small, large = (AutoConfig.for_model("llama", vocab_size=v) for v in (512, 128_256))
    for more, config, wanted in [
        ((), small, False),
        ((), large, True),
        (("--fused_loss", "true"), small, True),
        (("--label_smoothing_factor", "0.1"), large, False),
        (("--torch_compile", "true"), large, False),
    ]:
        found = parsed(*more)
        fused_loss.resolve_for_model(found, config)
        assert found.fused_loss is wanted
        assert any(text.startswith(f"fused_loss {str(wanted).lower()}: ") for text in found.decisions) == (
            "--fused_loss" not in more
        )
    for more in (("--label_smoothing_factor", "0.1"), ("--torch_compile", "true")):
        with pytest.raises(UserError, match=f"--fused_loss with {more[0]}"):
            resolve.resolve_settings("sft", ["--fused_loss", "true", *more], 1)
    with pytest.raises(UserError, match="--fused_loss with --lora_target_modules lm_head: the head has an adapter"):
        resolve.resolve_settings("lora", ["--fused_loss", "true", "--lora_target_modules", "lm_head"], 1)


def test_tile_flags():
    for wrong, says in (("0", "--tiled_mlp is 0: it must be 1 or more"), ("x", "number of tiles"), ("-1", "number of")):
        with pytest.raises(UserError, match=says):
            tiled_mlp.resolve(parsed("--tiled_mlp", wrong))
    found = parsed("--tiled_mlp", "auto", "--max_length", "8192", "--per_device_train_batch_size", "2")
    tiled_mlp.resolve_for_model(found, AutoConfig.for_model("llama", hidden_size=4096))
    assert found.tiled_mlp == 4


# --- recipes ---


def cases(recipes, stages, variants, **more):
    return {
        f"{recipe}-{zero}-{name}": (recipe, flags(recipe, zero, micro=2, more=(*chosen, "--max_steps", "4"), **more))
        for recipe in recipes
        for zero in stages
        for name, chosen in variants.items()
    }


def check(runs, reference, tolerance, steps=None):
    """Losses of every step and gradient norms of the first `steps` (later, bf16 rounding has moved the weights)."""
    for name, run in runs.items():
        wanted = runs[f"{name.rsplit('-', 1)[0]}-{reference}"]
        norms = run.grad_norms[:steps], wanted.grad_norms[:steps]
        for found, other in ((run.losses, wanted.losses), norms):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(other), rtol=tolerance, atol=0, msg=name)
        assert (
            run.json("result.json")["eval_loss"] is None
            or abs(run.json("result.json")["eval_loss"] / wanted.json("result.json")["eval_loss"] - 1) < tolerance
        )


DENSE, FUSED, TILED = ("--fused_loss", "false"), ("--fused_loss", "true"), ("--tiled_mlp", "3")


@pytest.mark.slow
def test_recipes_give_the_dense_curve(tmp_path):
    """Two ranks, two accumulation steps, gradient checkpointing, evaluation: fused and tiled at once."""
    evaluated = ("--eval_fraction", "0.1")
    variants = {"dense": (*DENSE, *evaluated), "both": (*FUSED, *TILED, *evaluated)}
    runs = run_world(2, cases(("lora",), "0", variants) | cases(("sft",), "3", variants), tmp_path)
    assert all(run.json("result.json")["eval_loss"] for run in runs.values())
    assert all(run.json("record.json")["labels_counted"] == ("both" in name) for name, run in runs.items())
    check(runs, "dense", 1e-5)


@pytest.mark.slow
@pytest.mark.timeout(3000)  # 18 runs
@pytest.mark.parametrize(("bf16", "tolerance", "steps"), [(False, 1e-5, None), (True, 3e-3, 2)])
def test_every_stage(tmp_path, bf16, tolerance, steps):
    variants = {"dense": DENSE, "fused": FUSED, "tiled": TILED}
    check(run_world(2, cases(("sft", "lora"), "023", variants, bf16=bf16), tmp_path), "dense", tolerance, steps)


@pytest.mark.slow
def test_packed_rows(tmp_path):
    packed = ("--packing", "--max_length", "96")
    variants = {"dense": (*DENSE, *packed), "fused": (*FUSED, *packed), "tiled": (*TILED, *packed)}
    check(run_world(2, cases(("sft",), "03", variants), tmp_path), "dense", 1e-5)


@pytest.mark.slow
def test_a_head_that_trains_beside_the_adapter(tmp_path):
    more = ("--modules_to_save", "lm_head")
    variants = {"dense": (*DENSE, *more), "fused": (*FUSED, *more)}
    check(run_world(2, cases(("lora",), "03", variants), tmp_path), "dense", 1e-5)


@pytest.mark.bad_input
def test_a_mistake_is_met_before_the_model():
    with pytest.raises(UserError, match="the head has an adapter"):
        resolve.resolve_settings("lora", ["--fused_loss", "true", "--lora_target_modules", "lm_head"], 1)


def test_the_sum_of_a_document_is_the_same_in_any_order():
    """A GPU adds in an order of its own each time, and a checkpoint that is read back must give the same loss."""
    torch.manual_seed(0)
    tokens, words = 3000, 11
    logits, targets = 9 * torch.randn(tokens, words), torch.randint(words, (tokens,))
    documents = torch.arange(tokens) % 2

    def summed(order):
        labels = torch.cat([torch.tensor([fused_loss.IGNORED]), targets[order]])[None]
        padded = torch.cat([logits[order], torch.zeros(1, words)])[None]
        return fused_loss.dense_log_probs(padded, labels, torch.cat([documents[order], torch.tensor([0])]), 2)

    first = summed(torch.arange(tokens))
    assert all(torch.equal(first, summed(torch.randperm(tokens))) for _ in range(5))
