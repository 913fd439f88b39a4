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

For a single labeled answer, with r = log pi / ref and the KL term z (labeled.py):

    kto                w sigmoid(beta (z - r)), r - z of an unwanted answer    KTO, arXiv 2402.01306, equation 7
    apo_zero_unpaired  the same with z = 0                                     APO, arXiv 2408.06266

sigmoid with --label_smoothing e is conservative DPO: (1 - e) x the loss + e x the loss of the swapped pair. Names and
token counts follow TRL 1.16 (CPOTrainer for simpo).
"""

import re

import torch
from torch.nn.functional import logsigmoid

from zerofit.base.errors import UserError
from zerofit.data.dataset_conventions import rendered
from zerofit.job.settings import decide
from zerofit.job.technique import AllBut, Conflict, Technique
from zerofit.model import adapters, attention

LABELED_LOSSES = ("kto", "apo_zero_unpaired")  # for single labeled answers; the others compare two

PAIR_LOSSES = ("sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "apo_zero", "simpo", "orpo")

PER_TOKEN = ("sigmoid_norm", "ipo", "simpo", "orpo")

REFERENCE_FREE = ("simpo", "orpo")

SMOOTHED = ("sigmoid", "robust")


def losses(settings, log_probs, reference, tokens):
    """Return (loss, rewards of chosen and rejected, scores for ranking) of each pair: (n,), (n, 2), (n, 2).

    Args: log_probs, reference: summed log-probabilities of the answers, (n, 2): chosen, rejected; tokens: lengths.
    """
    kind, beta, smoothing = settings.loss_type, settings.beta, settings.label_smoothing
    ratios = log_probs if kind in REFERENCE_FREE else log_probs - reference
    scores = log_probs
    if kind in PER_TOKEN:
        ratios, scores = ratios / tokens, log_probs / tokens
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
        loss = loss - settings.rpo_alpha * log_probs[:, 0] / tokens[:, 0]
    return loss, rewards.detach(), scores.detach()


def labeled_losses(settings, ratios, wanted, kl):
    """Return (loss, reward) of each labeled answer, (n,).

    Args: ratios: summed log-probabilities over the reference's; wanted: the labels; kl: z, 0 for apo_zero_unpaired.
    """
    distance = (ratios - kl).where(wanted, kl - ratios)
    weights = torch.where(wanted, settings.desirable_weight, settings.undesirable_weight)
    return weights * (1 - (settings.beta * distance).sigmoid()), (settings.beta * ratios).detach()


def _log_odds(log_probs):
    """Return log(p / (1 - p)) of log p, with p limited to 1 - 1e-6, as fillers have infinite odds."""
    log_probs = log_probs.clamp(max=-1e-6)
    return log_probs - torch.log(-torch.expm1(log_probs))


def disable_dropout(model):
    """Return the model without dropout, whose masks would differ between reference and model."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in attention.DROPOUT_KEYS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def resolve(settings) -> None:
    """Check the flags of the preference losses if the recipe has them, and set dependent ones.

    Raises: UserError with flag, cause and fix.
    """
    if "precompute_ref_log_probs" not in settings.values:
        return
    _check_unused(settings)
    _check_adapter(settings)
    kind = settings.loss_type
    if kind in REFERENCE_FREE:
        if settings.precompute_ref_log_probs:
            raise UserError(
                f"--precompute_ref_log_probs with --loss_type {kind}: it does not use a reference; leave it out."
            )
        decide(settings, "precompute_ref_log_probs", False)
        settings.decisions.append(f"loss_type {kind}: trains without a reference model")
    elif settings.values.get("initial_adapter"):
        if settings.precompute_ref_log_probs is False:
            raise UserError(
                "--precompute_ref_log_probs false with --initial_adapter: the reference is the model with this "
                "adapter, not the base model; leave the flag out."
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
        decide(settings, "precompute_ref_log_probs", True, "avoids a second model in memory; 8 bytes per row")


def _check_unused(settings) -> None:
    is_labeled = settings.loss_type in LABELED_LOSSES
    if is_labeled and settings.rpo_alpha:
        raise UserError(
            f"--rpo_alpha with --loss_type {settings.loss_type}: its rows are single answers, not pairs; leave one of "
            "the two out."
        )
    if is_labeled and not settings.desirable_weight and not settings.undesirable_weight:
        raise UserError("--desirable_weight 0 --undesirable_weight 0: the loss would always be 0; raise one of them.")
    for name in ("desirable_weight", "undesirable_weight"):
        if settings.source[name] != "default" and not is_labeled:
            raise UserError(
                f"--{name} with --loss_type {settings.loss_type}: only {' and '.join(LABELED_LOSSES)} use it; leave "
                "one of the two out."
            )
    if settings.loss_type == "kto" and settings.effective_batch_size == 1:
        raise UserError(
            "--loss_type kto with --effective_batch_size 1: the KL term pairs each answer of a step with another "
            "question; use 2 or more."
        )
    if settings.label_smoothing and settings.loss_type not in SMOOTHED:
        raise UserError(
            f"--label_smoothing with --loss_type {settings.loss_type}: only {' and '.join(SMOOTHED)} use it; leave "
            "one of the two out."
        )
    if settings.source["simpo_gamma"] != "default" and settings.loss_type != "simpo":
        raise UserError(
            f"--simpo_gamma with --loss_type {settings.loss_type}: only simpo uses it; leave one of the two out."
        )


def _check_adapter(settings) -> None:
    if not settings.trains_adapter:
        for name in adapters.FLAGS:
            if settings.source[name] != "default":
                raise UserError(f"--{name} needs an adapter; add --adapter lora, or leave it out.")
    elif not settings.precompute_ref_log_probs and settings.loss_type not in REFERENCE_FREE:
        for pair in settings.adapter_config or []:
            if re.match("bias=(?!none)", pair):
                raise UserError(
                    f"--adapter_config {pair} with recipes/dpo.py: trained biases stay on when the adapter is off, so "
                    "the model would differ from the reference; add --precompute_ref_log_probs true."
                )


# Conflicts: features for rows of one document or a mean over tokens, or that shift the answers or the reference.
TECHNIQUE = Technique(
    name="preference loss",
    flag="loss_type",  # only in recipes of preference pairs
    example="--loss_type sigmoid",
    conflicts=(
        Conflict("packing", (True,), "a row already contains the two sides of a pair", "leave it out"),
        Conflict("streaming", (True,), "the reference is stored by row", "leave it out"),
        Conflict("sp_size", None, "the log-probability of an answer needs all its tokens on one rank", "leave it out"),
        Conflict("train_on", AllBut("assistant"), "the loss is computed on the answers", "leave it out"),
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
            "it changes the base, so the model with the adapter off differs from the reference",
            "use true, gaussian or orthogonal",
        ),
    ),
    resolve=resolve,
)
