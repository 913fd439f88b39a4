"""Preference losses against their papers' formulas; log-probabilities of documents without logits."""

import math
from types import SimpleNamespace

import pytest
import torch
from test_adapters import ALL_ADAPTERS, MORE

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.model import adapters, fused_loss
from zerofit.objective import preference_losses

OWN = [[-12.0, -15.5], [-40.25, -33.0], [-7.0, -7.0]]
REFERENCE = [[-13.0, -14.0], [-41.0, -35.5], [-7.0, -7.0]]
TOKENS = [[6, 9], [20, 11], [4, 4]]
DEFAULTS = {"beta": 0.3, "label_smoothing": 0.0, "rpo_alpha": 0.0, "simpo_gamma": 0.5}


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def log_sigmoid(x):
    return math.log(sigmoid(x))


def odds(p):
    return p / (1 - p)


# kind -> formula of its paper, from log-probabilities p (policy) and r (reference), lengths n; w: chosen, l: rejected
PAPERS = {
    "sigmoid": lambda b, e, pw, pl, rw, rl, nw, nl: (
        -(1 - e) * log_sigmoid(b * (pw - rw) - b * (pl - rl)) - e * log_sigmoid(b * (pl - rl) - b * (pw - rw))
    ),
    "sigmoid_norm": lambda b, e, pw, pl, rw, rl, nw, nl: -log_sigmoid(b / nw * (pw - rw) - b / nl * (pl - rl)),
    "ipo": lambda b, e, pw, pl, rw, rl, nw, nl: ((pw - rw) / nw - (pl - rl) / nl - 1 / (2 * b)) ** 2,
    "hinge": lambda b, e, pw, pl, rw, rl, nw, nl: max(0.0, 1 - b * ((pw - rw) - (pl - rl))),
    "robust": lambda b, e, pw, pl, rw, rl, nw, nl: (
        ((1 - e) * -log_sigmoid(b * (pw - rw - pl + rl)) - e * -log_sigmoid(b * (pl - rl - pw + rw))) / (1 - 2 * e)
    ),
    "apo_zero": lambda b, e, pw, pl, rw, rl, nw, nl: (1 - sigmoid(b * (pw - rw))) + sigmoid(b * (pl - rl)),
    "simpo": lambda b, e, pw, pl, rw, rl, nw, nl: -log_sigmoid(b / nw * pw - b / nl * pl - 0.5),
    "orpo": lambda b, e, pw, pl, rw, rl, nw, nl: (
        -pw / nw + b * -math.log(sigmoid(math.log(odds(math.exp(pw / nw)) / odds(math.exp(pl / nl)))))
    ),
}


@pytest.mark.oracle
@pytest.mark.parametrize("kind", PAPERS)
@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_a_loss_is_the_formula_of_its_paper(kind, alpha):
    smoothing = 0.1 if kind in preference_losses.SMOOTHED else 0.0
    settings = SimpleNamespace(**DEFAULTS | {"loss_type": kind, "label_smoothing": smoothing, "rpo_alpha": alpha})
    own, reference, tokens = (torch.tensor(values, dtype=torch.float64) for values in (OWN, REFERENCE, TOKENS))
    found, rewards, _ = preference_losses.losses(settings, own, reference, tokens)
    rows = zip(OWN, REFERENCE, TOKENS, strict=True)
    wanted = [PAPERS[kind](0.3, smoothing, *p, *r, *n) - alpha * p[0] / n[0] for p, r, n in rows]
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)
    if kind in ("sigmoid", "hinge", "robust", "apo_zero"):
        assert rewards[0].tolist() == pytest.approx([0.3 * 1.0, 0.3 * -1.5])


def test_a_filler_has_no_gradient():
    """Its log-probabilities are 0, where the odds are infinite; Preference.loss multiplies its loss by 0."""
    own = torch.zeros(1, 2, requires_grad=True)
    for kind in PAPERS:
        settings = SimpleNamespace(**DEFAULTS | {"loss_type": kind})
        loss, _, _ = preference_losses.losses(settings, own, torch.zeros(1, 2), torch.ones(1, 2))
        assert torch.autograd.grad(loss.where(torch.tensor([False]), 0.0).sum(), own)[0].tolist() == [[0.0, 0.0]], kind


def test_the_first_loss_of_sigmoid_is_ln_2():
    settings = SimpleNamespace(**DEFAULTS | {"loss_type": "sigmoid"})
    own = torch.tensor(OWN)
    loss, rewards, _ = preference_losses.losses(settings, own, own.clone(), torch.tensor(TOKENS))
    assert loss.tolist() == pytest.approx([math.log(2)] * 3, abs=5e-8) and not rewards.any()


@pytest.mark.oracle
@pytest.mark.parametrize("form", [(1.0, None), (0.5, None), (2.0, 5.0)])
def test_log_probabilities_without_logits_are_those_of_the_logits(form):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 20, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(50, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 50, (3, 20), generator=generator)
    labels[0, :9] = labels[2] = -100  # a prompt, and a document without any label
    documents = torch.arange(3).repeat_interleave(20)
    upstream = torch.tensor([0.3, -2.0, 1.0], dtype=torch.float64)
    scale, softcap = form
    logits = (hidden @ weight.t() + bias) * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    dense = fused_loss.dense_log_probs(logits, labels, documents, 3)
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    fused = fused_loss.document_log_probs(
        hidden.flatten(0, 1), weight, bias, targets, documents, 3, scale, softcap, rows=7
    )
    textbook = torch.stack([
        sum((logits[i, t].log_softmax(-1)[labels[i, t + 1]] for t in range(19) if labels[i, t + 1] >= 0),
            logits.new_zeros(()))
        for i in range(3)
    ])  # fmt: skip
    assert torch.allclose(dense, textbook, rtol=1e-12) and torch.allclose(fused, textbook, rtol=1e-12)
    wanted, *others = (torch.autograd.grad((s * upstream).sum(), (hidden, weight, bias), retain_graph=True)
                       for s in (textbook, dense, fused))  # fmt: skip
    for gradients in others:
        for found, right in zip(gradients, wanted, strict=True):
            assert torch.allclose(found, right, rtol=1e-9, atol=1e-12)


def test_a_frozen_head_gets_no_gradient_and_needs_none():
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
    sums = fused_loss.document_log_probs(hidden, weight, None, torch.arange(6), torch.arange(6) // 3, 2)
    sums.sum().backward()
    assert hidden.grad.abs().sum() > 0 and weight.grad is None


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ("--beta 0", "--beta is 0.0: it must be above 0"),
        ("--rpo_alpha -1", "--rpo_alpha is -1.0"),
        ("--label_smoothing 0.5", "at least 0 and below 0.5"),
        ("--label_smoothing 0.1 --loss_type ipo", "only sigmoid and robust use it"),
        ("--simpo_gamma 1", "only simpo uses it"),
        ("--packing true", "a row already contains the two sides of a pair"),
        ("--streaming true --max_steps 5", "the reference is stored by row"),
        ("--train_on all", "the loss is computed on the answers"),
        ("--data_format alpaca", "rows are preference pairs"),
        ("--label_smoothing_factor 0.1", "for pairs use --label_smoothing"),
        ("--optim sophia", "samples tokens"),
        ("--precompute_ref_log_probs false", "a second model in memory"),
        ("--precompute_ref_log_probs true --loss_type simpo", "it does not use a reference"),
        ("--precompute_ref_log_probs true --loss_type orpo", "it does not use a reference"),
        ("--adapter lora --adapter_config bias=all", "add --precompute_ref_log_probs true"),
        ("--lora_r 4", "add --adapter lora"),
        ("--load_in_4bit true", "add --adapter lora"),
        ("--adapter prompt_tuning", "virtual tokens"),
        ("--adapter lora --init_lora_weights pissa", "use true, gaussian or orthogonal"),
        ("--metric_for_best_model perplexity", "an evaluation of dpo computes eval_loss."),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(flags, cause):
    with pytest.raises(UserError) as refused:
        resolve.resolve_settings("dpo", ["--use_cpu", "true", *flags.split()], 1)
    assert cause in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "precomputed", "rate"),
    [
        ("", True, 1e-3),
        ("--adapter lora", False, 1e-3),
        ("--loss_type simpo", False, 1e-3),
        ("--loss_type orpo", False, 1e-3),
        ("--adapter lora --loss_type orpo --adapter_config bias=all", False, 1e-3),
        ("--adapter lora --precompute_ref_log_probs true --adapter_config bias=all", True, 1e-3),
    ],
)
def test_the_reference_follows_from_the_adapter(flags, precomputed, rate):
    settings = resolve.resolve_settings("dpo", ["--use_cpu", "true", *flags.split()], 1)
    assert settings.precompute_ref_log_probs is precomputed and settings.learning_rate == rate
    own_data = ["--model", str(settings.model), "--data", "p.jsonl", "--use_cpu", "true", *flags.split()]
    rate = 5e-6 if "lora" in flags else 1e-6
    assert resolve.resolve_settings("dpo", own_data, 1).learning_rate == rate


OFF = [kind for kind in ALL_ADAPTERS if kind not in adapters.PROMPTS]
VARIANTS = ["lora --use_dora true", "lora --modules_to_save lm_head", "lora --init_lora_weights orthogonal"]


@pytest.mark.parametrize("adapter", [*OFF, "lora", *VARIANTS])
def test_whatever_an_adapter_has_learned_it_can_be_turned_off(adapter):
    """The model with the adapter off is the one that training started from."""
    from transformers import AutoModelForCausalLM

    kind = adapter.split()[0]
    flags = ["--use_cpu", "true", "--adapter", *adapter.split(), *MORE.get(kind, [])]
    settings = resolve.resolve_settings("dpo", flags, 1)
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        base = model(input_ids=ids).logits
        model = adapters.add_adapter(model, settings)
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
        changed = model(input_ids=ids).logits
        with model.disable_adapter():
            off = model(input_ids=ids).logits
    assert not torch.allclose(changed, base, atol=1e-2) and torch.allclose(off, base, atol=1e-5)


def test_under_autocast_the_gradients_are_those_of_fp32_but_for_rounding():
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(40, 16, generator=generator, requires_grad=True)
    weight = torch.randn(60, 16, generator=generator, requires_grad=True)
    labels, documents = torch.randint(0, 60, (40,), generator=generator), torch.arange(40) // 10

    def gradients(autocast):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            sums = fused_loss.document_log_probs(hidden, weight, None, labels, documents, 4, rows=16)
        assert sums.dtype == torch.float32
        return torch.autograd.grad((sums * torch.tensor([1.0, -1.0, 3.0, 0.5])).sum(), (hidden, weight))

    for half, whole in zip(gradients(True), gradients(False), strict=True):
        assert half.dtype == torch.float32 and (half - whole).norm() < 0.02 * whole.norm()


def test_a_model_loses_its_dropout():
    model = torch.nn.ModuleDict({"a": torch.nn.Dropout(0.1), "b": torch.nn.Linear(2, 2)})
    model["b"].attention_dropout = 0.2
    assert preference_losses.disable_dropout(model)["a"].p == 0.0 and model["b"].attention_dropout == 0.0
