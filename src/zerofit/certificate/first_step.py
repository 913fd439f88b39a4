"""Recompute the loss of the first rows with a plain cross entropy, one document at a time."""

import inspect

import torch
from accelerate.utils import send_to_device
from torch.nn import functional

from zerofit.base import distributed
from zerofit.data.batches import documents, join
from zerofit.data.conversations import IGNORE
from zerofit.job.settings import Check

MAX_DOCUMENTS, MAX_TOKENS = 8, 8192  # recomputed on each rank; at least one document

STAGE_3_LIMITS = 2, 1024  # (documents, tokens): under ZeRO-3 each forward gathers all weights

MAX_DOCUMENT_TOKENS = 4096  # counted from the end, which holds the answer

MAX_LOGITS = 1 << 25  # logits of one forward: 128 MB in fp32

BOUND = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}  # relative

# A base in 8 bits needs this bound at any precision: its products round their inputs to 8 bits, and bitsandbytes
# selects the outlier columns from all rows of a batch, so the logits of a document depend on the other rows.
BOUND_8BIT = BOUND["bf16"]

MIN_TOKENS = 64  # 16-bit rounding errors average out to BOUND over this many tokens; fewer tokens widen the bound

MIN_LOSS = 0.1  # nats per token; a smaller loss is too small for a relative difference


def check(trainer) -> Check:
    """Compare the trainer's loss of each rank's first rows with (sum of cross entropies) / (supervised tokens).

    The supervised tokens of the complete first step are counted in the data. Collective.
    """
    reason = _not_checked(trainer)
    if reason:
        return Check("loss", None, f"loss: not recomputed: {reason}")
    rows, supervised = _first_rows(trainer)
    was_training = trainer.model.training
    trainer.model.eval()
    with torch.no_grad(), trainer.compute_loss_context_manager():
        try:
            trainer_loss = _trainer_loss(trainer, rows, supervised)
            total, count = _summed_cross_entropy(trainer, [d for row in rows for d in documents(row)])
        except torch.OutOfMemoryError:
            if distributed.size() > 1:  # the other ranks wait for the forwards of this rank
                raise
            return Check("loss", None, "loss: not recomputed: out of memory")
        finally:
            trainer.model.train(was_training)
    return _line(trainer, distributed.all_gather((trainer_loss, total / supervised, count)), supervised)


def _line(trainer, losses: list[tuple[float, float, int]], supervised: int) -> Check:
    """Return the check for the rank that differs most. losses: (trainer's loss, plain loss, tokens) by rank."""
    settings, differences = trainer.settings, []
    base_bound = BOUND_8BIT if settings.values.get("load_in_8bit") else BOUND[settings.compute_dtype]
    for actual, plain, count in losses:
        size = max(plain, MIN_LOSS * count / supervised, 1e-30)
        factor = max(1.0, (MIN_TOKENS / max(1, count)) ** 0.5) if base_bound > BOUND["fp32"] else 1.0
        differences.append((abs(actual - plain) / size, base_bound * factor, actual, plain))
    worst, bound, actual, plain = max(differences, key=lambda d: d[0] / d[1] if d[0] == d[0] else float("inf"))
    holds, tokens = worst <= bound, sum(count for _, _, count in losses)
    over = f"the {supervised:,} supervised tokens of the step" if counts_full_step(trainer) else "their count"
    return Check(
        "loss",
        holds,
        f"loss: {'equals' if holds else 'is NOT'} the sum of the cross entropies of {tokens:,} tokens, one document at "
        f"a time, over {over} (relative difference {worst:.1e}, bound {bound:.0e})",
        {"tokens": tokens, "supervised_in_step": supervised, "trainer": actual, "plain": plain, "relative": worst},
    )


def counts_full_step(trainer) -> bool:
    """Return whether a step divides its loss by the tokens of all its rows, which can be counted in advance."""
    args = trainer.args
    return trainer.tokens.stream is None and (args.average_tokens_across_devices or args.world_size == 1)


def _not_checked(trainer) -> str:
    settings = trainer.settings
    if trainer.objective.not_recomputed:
        return trainer.objective.not_recomputed
    if trainer.has_custom_loss:
        return "the recipe computes a custom loss"
    if settings.ranks_per_row > 1:
        return "the rows are split over ranks"
    if trainer.router_loss:
        return "the loss includes a router loss"
    if settings.values.get("adapter") in ("prompt_tuning", "p_tuning"):
        return "virtual tokens precede the rows"
    if trainer.tokens.stream is not None and settings.packing:
        return "a stream is packed during training"
    if not trainer.model_accepts_loss_kwargs:
        return f"{trainer.architecture} does not accept the token count of the step"
    return ""


def _first_rows(trainer) -> tuple[list[dict], int]:
    """Return (this rank's first rows, truncated; supervised tokens of their step on all ranks)."""
    settings, dataset, micro = trainer.settings, trainer.train_dataset, trainer.args.per_device_train_batch_size
    if trainer.tokens.stream is not None:
        rows = [trainer.tokens.dataset[i] for i in range(min(2, len(trainer.tokens)))]
    else:
        sampler = trainer.train_sampler
        epoch, place = divmod(trainer.state.global_step, len(sampler) // sampler.multiple)
        order = sampler.indices(epoch)[place * sampler.multiple : (place + 1) * sampler.multiple]
        start = settings.data_rank(distributed.rank()) * micro
        rows = [dataset[i] for i in order[start : start + micro]]
    rows = _limited(trainer, rows)
    step = (dataset[i] for i in order) if counts_full_step(trainer) else rows
    return rows, max(1, sum(_supervised(d) for row in step for d in documents(row)))


def _limited(trainer, rows: list[dict]) -> list[dict]:
    """Return packs of the first documents, truncated to the tokens and labels that one forward can hold."""
    most, most_tokens = STAGE_3_LIMITS if trainer.settings.zero == 3 else (MAX_DOCUMENTS, MAX_TOKENS)
    positions = max(16, MAX_LOGITS // trainer.model.config.get_text_config().vocab_size)
    longest = MAX_DOCUMENT_TOKENS if _selects_logits(trainer) else min(MAX_DOCUMENT_TOKENS, positions)
    packs, count, tokens = [], 0, 0
    for row in rows:
        pack = []
        for document in documents(row):
            ids, labels = (document[name][-longest:] for name in ("input_ids", "labels"))
            count, tokens = count + 1, tokens + len(ids)
            if count > 1 and (count > most or tokens > most_tokens):
                return [*packs, *([join(pack)] if pack else [])]
            kept = [i for i, label in enumerate(labels) if label != IGNORE][: positions + 1]
            last = kept[-1] if kept else 0
            pack.append({"input_ids": ids, "labels": [x if i <= last else IGNORE for i, x in enumerate(labels)]})
        packs.append(join(pack))
    return packs


def _supervised(row: dict) -> int:
    """Return the number of predicted labels; the first label of a document is not predicted."""
    return sum(label != IGNORE for label in row["labels"][1:])


def _trainer_loss(trainer, rows: list[dict], supervised: int) -> float:
    """Return compute_loss of the collated rows, scaled as in a step with `supervised` tokens."""
    batch = send_to_device(trainer.train_collator(rows), trainer.args.device)
    count = torch.tensor(supervised, device=trainer.args.device)
    with trainer.labels_counted(None):
        loss = trainer.compute_loss(trainer.model_wrapped, batch, num_items_in_batch=count)
    return loss.item() / trainer.loss_world_size


def _summed_cross_entropy(trainer, rows: list[dict]) -> tuple[float, int]:
    """Return (sum of the cross entropies of all labels, number of labels), with one forward per document.

    Under ZeRO-3 each forward is collective, so every rank runs the same number of forwards.
    """
    model, device, selects = trainer.model_wrapped, trainer.args.device, _selects_logits(trainer)
    total, count = 0.0, 0
    for i in range(max(distributed.all_gather(len(rows)))):
        row = rows[i % len(rows)]
        positions = [place for place, label in enumerate(row["labels"][1:]) if label != IGNORE]
        ids = torch.tensor([row["input_ids"]], device=device)
        targets = torch.tensor(row["labels"], device=device)[1:][positions]
        kept = {"logits_to_keep": torch.tensor(positions or [0], device=device)} if selects else {}
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **kept).logits[0]
        if i < len(rows) and positions:
            logits = logits if selects else logits[:-1][positions]
            total += _cross_entropy(logits.float(), targets, trainer.args.label_smoothing_factor)
            count += len(positions)
    return total, count


def _selects_logits(trainer) -> bool:
    """Return whether the model can compute the logits of selected positions only (logits_to_keep)."""
    return "logits_to_keep" in inspect.signature(_base_model(trainer).forward).parameters


def _base_model(trainer):
    """Return the model without the adapter; only its forward has named arguments."""
    return trainer.model.get_base_model() if trainer.settings.trains_adapter else trainer.model


def _cross_entropy(logits, targets, smoothing: float) -> float:
    """Return -sum(log p(target)); smoothing e mixes (1 - e) of it with e times the mean over the vocabulary."""
    log_probs = functional.log_softmax(logits, dim=-1)
    total = -log_probs.gather(-1, targets[:, None]).double().sum()
    if smoothing:
        total = (1 - smoothing) * total - smoothing * log_probs.double().mean(-1).sum()
    return total.item()
