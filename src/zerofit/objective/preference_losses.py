"""The formulas of the preference losses, and their flags.

x: difference of the rewards over beta, (log pi(chosen) / ref(chosen)) - (log pi(rejected) / ref(rejected)).

    sigmoid       -log sigmoid(beta x)                            DPO, arXiv 2305.18290, equation 7
    sigmoid_norm  the same with log-probabilities per token       Tulu 3, arXiv 2411.15124
    ipo           (x - 1 / (2 beta))^2, per token                 arXiv 2310.12036, equation 17
    hinge         max(0, 1 - beta x)                              SLiC, arXiv 2305.10425; RSO, arXiv 2309.06657
    robust        unbiased under flipped labels                   rDPO, arXiv 2403.00409
    apo_zero      1 - sigmoid(r chosen) + sigmoid(r rejected)     APO, arXiv 2408.06266, equation 7
    simpo         -log sigmoid(beta x - gamma), per token,        SimPO, arXiv 2405.14734, equation 6
                  without a reference model
    orpo          -log p - beta log sigmoid(log odds ratio)       ORPO, arXiv 2403.07691, equations 3 to 7
                  per token, without a reference model: SFT and preference in one

Of a single answer with a label, r = log pi / ref and z the KL term (labeled.py):

    kto                w sigmoid(beta (z - r)), r - z of an unwanted answer    KTO, arXiv 2402.01306, equation 7
    apo_zero_unpaired  the same with z = 0                                     APO, arXiv 2408.06266

sigmoid with --label_smoothing e is the conservative DPO: (1 - e) of the loss, and e of that of the swapped pair. The
names and the use of tokens follow TRL 1.16 (of its CPOTrainer for simpo).
"""

import re

import torch
from torch.nn.functional import logsigmoid

from zerofit.base.errors import UserError
from zerofit.data.published import rendered
from zerofit.job.settings import decide
from zerofit.job.technique import AllBut, Conflict, Technique
from zerofit.model import adapters, attention

OF_LABELED = ("kto", "apo_zero_unpaired")  # of single answers with a label; the others compare two

OF_PAIRS = ("sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "apo_zero", "simpo", "orpo")

PER_TOKEN = ("sigmoid_norm", "ipo", "simpo", "orpo")

REFERENCE_FREE = ("simpo", "orpo")

SMOOTHED = ("sigmoid", "robust")


def losses(settings, own, reference, tokens):
    """Return (loss, reward of chosen and rejected, scores that rank the two) of each pair: (n,), (n, 2), (n, 2).

    Args: own, reference: summed log-probabilities of the answers, (n, 2): chosen, rejected; tokens: their lengths.
    """
    kind, beta, smoothing = settings.loss_type, settings.beta, settings.label_smoothing
    ratios = own if kind in REFERENCE_FREE else own - reference
    scores = own
    if kind in PER_TOKEN:
        ratios, scores = ratios / tokens, own / tokens
    rewards = beta * ratios
    margin = rewards[:, 0] - rewards[:, 1]
    if kind == "ipo":
        loss = (margin / beta - 1 / (2 * beta)) ** 2
    elif kind == "hinge":
        loss = torch.relu(1 - margin)
    elif kind == "apo_zero":
        loss = 1 - rewards[:, 0].sigmoid() + rewards[:, 1].sigmoid()
    elif kind == "robust":
        loss = (smoothing * logsigmoid(-margin) - (1 - smoothing) * logsigmoid(margin)) / (1 - 2 * smoothing)
    elif kind == "simpo":
        loss = -logsigmoid(margin - settings.simpo_gamma)
    elif kind == "orpo":
        chosen, rejected = _log_odds(scores).unbind(1)
        loss = -scores[:, 0] - beta * logsigmoid(chosen - rejected)
    else:
        loss = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
    if settings.rpo_alpha:  # RPO, arXiv 2404.19733: the SFT loss of the chosen answer, per token
        loss = loss - settings.rpo_alpha * own[:, 0] / tokens[:, 0]
    return loss, rewards.detach(), scores.detach()


def losses_of_answers(settings, ratios, wanted, kl):
    """Return (loss, reward) of each labeled answer, (n,).

    Args: ratios: summed log-probabilities over the reference's; wanted: the labels; kl: z, 0 for apo_zero_unpaired.
    """
    distance = (ratios - kl).where(wanted, kl - ratios)
    weights = torch.where(wanted, settings.desirable_weight, settings.undesirable_weight)
    return weights * (1 - (settings.beta * distance).sigmoid()), (settings.beta * ratios).detach()


def _log_odds(log_probs):
    """Return log(p / (1 - p)) of log p; p is at most 1 - 1e-6, as a certain answer (and a filler) has infinite odds."""
    log_probs = log_probs.clamp(max=-1e-6)
    return log_probs - torch.log(-torch.expm1(log_probs))


def disable_dropout(model):
    """Return the model without dropout, which would draw other masks for the reference than for the model."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in attention.DROPOUT_KEYS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def resolve(settings) -> None:
    """Check the flags of the preference losses where the recipe has them, and set those that follow from others.

    Raises: UserError naming flag, cause and fix.
    """
    if "precompute_ref_log_probs" not in settings.values:
        return
    _check_unused(settings)
    _check_adapter(settings)
    kind = settings.loss_type
    if kind in REFERENCE_FREE:
        if settings.precompute_ref_log_probs:
            raise UserError(f"--precompute_ref_log_probs with --loss_type {kind}: it has no reference; leave it out.")
        decide(settings, "precompute_ref_log_probs", False)
        settings.decisions.append(f"loss_type {kind}: trains without a reference model")
    elif settings.values.get("initial_adapter"):
        if settings.precompute_ref_log_probs is False:
            raise UserError(
                "--precompute_ref_log_probs false with --initial_adapter: the reference is the model with that "
                "adapter; with its adapter off it is the base alone; leave the flag out."
            )
        decide(settings, "precompute_ref_log_probs", True, "the reference is the model with its initial adapter")
    elif settings.trains_adapter and settings.precompute_ref_log_probs is None:
        decide(settings, "precompute_ref_log_probs", False, "the reference is the model with its adapter off")
    elif settings.precompute_ref_log_probs is False and not settings.trains_adapter:
        raise UserError(
            "--precompute_ref_log_probs false: without --adapter the reference would be a second model in memory; "
            "leave the flag out, or use --adapter lora."
        )
    elif settings.precompute_ref_log_probs is None:
        decide(settings, "precompute_ref_log_probs", True, "no second model in memory; 8 bytes a row")


def _check_unused(settings) -> None:
    of_labeled = settings.loss_type in OF_LABELED
    if of_labeled and settings.rpo_alpha:
        raise UserError(
            f"--rpo_alpha with --loss_type {settings.loss_type}: its rows are no pairs with a chosen answer; leave one "
            "of the two out."
        )
    if of_labeled and not settings.desirable_weight and not settings.undesirable_weight:
        raise UserError("--desirable_weight 0 --undesirable_weight 0: nothing would be learned; raise one of them.")
    for name in ("desirable_weight", "undesirable_weight"):
        if settings.source[name] != "default" and not of_labeled:
            raise UserError(
                f"--{name} with --loss_type {settings.loss_type}: only {' and '.join(OF_LABELED)} have it; leave one "
                "of the two out."
            )
    if settings.loss_type == "kto" and settings.effective_batch_size == 1:
        raise UserError(
            "--loss_type kto with --effective_batch_size 1: the KL term is a mean over a step's answers, each with the "
            "question of another one; use 2 or more."
        )
    if settings.label_smoothing and settings.loss_type not in SMOOTHED:
        raise UserError(
            f"--label_smoothing with --loss_type {settings.loss_type}: only {' and '.join(SMOOTHED)} have it; leave "
            "one of the two out."
        )
    if settings.source["simpo_gamma"] != "default" and settings.loss_type != "simpo":
        raise UserError(
            f"--simpo_gamma with --loss_type {settings.loss_type}: only simpo has it; leave one of the two out."
        )


def _check_adapter(settings) -> None:
    if not settings.trains_adapter:
        for name in adapters.FLAGS:
            if settings.source[name] != "default":
                raise UserError(
                    f"--{name} without --adapter: it belongs to an adapter; add --adapter lora, or leave it out."
                )
    elif not settings.precompute_ref_log_probs and settings.loss_type not in REFERENCE_FREE:
        for pair in settings.adapter_config or []:
            if re.match("bias=(?!none)", pair):
                raise UserError(
                    f"--adapter_config {pair} with recipes/dpo.py: trained biases stay when the adapter is off, which "
                    "then is not the reference; add --precompute_ref_log_probs true."
                )


# What is made for rows of one document, or for a mean over tokens; and what moves the answers or the reference.
TECHNIQUE = Technique(
    name="preference loss",
    flag="loss_type",  # which only recipes of preference pairs have
    example="--loss_type sigmoid",
    conflicts=(
        Conflict("packing", (True,), "the two sides of a pair are one row already", "leave it out"),
        Conflict("streaming", (True,), "the pairs and their reference are kept by row", "leave it out"),
        Conflict("sp_size", None, "no rank has the whole answer whose log-probability counts", "leave it out"),
        Conflict("train_on", AllBut("assistant"), "the loss is on the answers", "leave it out"),
        Conflict(
            "data_format",
            AllBut("auto", *rendered.VALUES),
            "rows are preference pairs",
            "leave it out, or use --columns",
        ),
        Conflict("label_smoothing_factor", None, "it smooths tokens", "for pairs use --label_smoothing"),
        Conflict("optim", ("sophia",), "it samples tokens for its Hessian", "use an AdamW"),
        Conflict("adapter", adapters.PROMPTS, "its virtual tokens shift the answers", "use --adapter lora"),
        Conflict(
            "init_lora_weights",
            AllBut("true", "gaussian", "orthogonal"),
            "it changes the base, so the model with the adapter off is not the reference",
            "use true, gaussian or orthogonal",
        ),
    ),
    resolve=resolve,
)
