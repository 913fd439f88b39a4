"""Recompute the loss of the first rows by the plain formula, one document at a time."""

import inspect

import torch
from accelerate.utils import send_to_device
from torch.nn import functional

from zerofit.base import distributed
from zerofit.data.batches import documents, join
from zerofit.data.conversations import IGNORE
from zerofit.job.settings import Check

DOCUMENTS, TOKENS = 8, 8192  # recomputed on each rank at most, but a document at least

OF_STAGE_3 = 2, 1024  # the same where each forward moves all weights

LONGEST = 4096  # tokens of a document, from its end: its answer

LOGITS = 1 << 25  # numbers of logits made at once: 128 MB in fp32

BOUND = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}  # relative

# The same for a base in 8 bits at any precision: its products round their inputs to 8 bits, and bitsandbytes chooses
# the columns that it leaves out of that by all rows of a batch, so a document has other logits beside other ones.
BOUND_8BIT = BOUND["bf16"]

ENOUGH = 64  # tokens over whose mean 16-bit roundings cancel out to BOUND; of fewer the bound is wider

LEAST = 0.1  # nats a token below which a loss is too small for a relative difference


def check(trainer) -> Check:
    """Compare the trainer's loss of the first rows of each rank with sum of cross entropies / supervised tokens.

    The supervised tokens are those of the whole first step, counted in the data. Collective.
    """
    reason = _not_checked(trainer)
    if reason:
        return Check("loss", None, f"loss: not recomputed: {reason}")
    rows, supervised = _first_rows(trainer)
    was_training = trainer.model.training
    trainer.model.eval()
    with torch.no_grad(), trainer.compute_loss_context_manager():
        try:
            own = _loss_of_trainer(trainer, rows, supervised)
            total, count = _summed_cross_entropy(trainer, [d for row in rows for d in documents(row)])
        except torch.OutOfMemoryError:
            if distributed.size() > 1:  # the other ranks wait for this one's forwards
                raise
            return Check("loss", None, "loss: not recomputed: out of memory")
        finally:
            trainer.model.train(was_training)
    return _line(trainer, distributed.all_gather((own, total / supervised, count)), supervised)


def _line(trainer, of_ranks: list[tuple[float, float, int]], supervised: int) -> Check:
    """Return the line of the rank that differs most. of_ranks: (trainer's loss, plain loss, tokens) of each."""
    settings, differences = trainer.settings, []
    bound_of_many = BOUND_8BIT if settings.values.get("load_in_8bit") else BOUND[settings.precision]
    for own, plain, count in of_ranks:
        size = max(plain, LEAST * count / supervised, 1e-30)
        few = max(1.0, (ENOUGH / max(1, count)) ** 0.5) if bound_of_many > BOUND["fp32"] else 1.0
        differences.append((abs(own - plain) / size, bound_of_many * few, own, plain))
    worst, bound, own, plain = max(differences, key=lambda d: d[0] / d[1] if d[0] == d[0] else float("inf"))
    holds, tokens = worst <= bound, sum(count for _, _, count in of_ranks)
    over = f"the {supervised:,} supervised tokens of the effective batch" if whole_step(trainer) else "their number"
    return Check(
        "loss",
        holds,
        f"loss: {'equals' if holds else 'is NOT'} the sum of the cross entropies of {tokens:,} tokens, one document at "
        f"a time, over {over} (relative difference {worst:.1e}, bound {bound:.0e})",
        {"tokens": tokens, "supervised_in_step": supervised, "trainer": own, "plain": plain, "relative": worst},
    )


def whole_step(trainer) -> bool:
    """Return whether a step divides its loss by the tokens of all of its rows, which are known in advance."""
    args = trainer.args
    return trainer.tokens.stream is None and (args.average_tokens_across_devices or args.world_size == 1)


def _not_checked(trainer) -> str:
    settings = trainer.settings
    if trainer.objective.not_recomputed:
        return trainer.objective.not_recomputed
    if trainer.own_loss:
        return "the recipe has its own loss"
    if settings.ranks_per_row > 1:
        return "the rows are split over ranks"
    if trainer.router_loss:
        return "a router loss of the experts is added"
    if settings.values.get("adapter") in ("prompt_tuning", "p_tuning"):
        return "virtual tokens stand before the rows"
    if trainer.tokens.stream is not None and settings.packing:
        return "packs of a stream are made while training"
    if not trainer.model_accepts_loss_kwargs:
        return f"{trainer.architecture} divides its loss itself"
    return ""


def _first_rows(trainer) -> tuple[list[dict], int]:
    """Return (this rank's first rows, cut; supervised tokens of the step that they begin, on all ranks)."""
    settings, dataset, micro = trainer.settings, trainer.train_dataset, trainer.args.per_device_train_batch_size
    if trainer.tokens.stream is not None:
        rows = [trainer.tokens.dataset[i] for i in range(min(2, len(trainer.tokens)))]
    else:
        sampler = trainer.train_sampler
        epoch, place = divmod(trainer.state.global_step, len(sampler) // sampler.multiple)
        order = sampler.indices(epoch)[place * sampler.multiple : (place + 1) * sampler.multiple]
        own = settings.data_rank(distributed.rank()) * micro
        rows = [dataset[i] for i in order[own : own + micro]]
    rows = _few(trainer, rows)
    step = (dataset[i] for i in order) if whole_step(trainer) else rows
    return rows, max(1, sum(_supervised(d) for row in step for d in documents(row)))


def _few(trainer, rows: list[dict]) -> list[dict]:
    """Return packs of the first documents, a few of them, long ones cut and with labels for one forward each."""
    most, most_tokens = OF_STAGE_3 if trainer.settings.zero == 3 else (DOCUMENTS, TOKENS)
    positions = max(16, LOGITS // trainer.model.config.get_text_config().vocab_size)
    longest = LONGEST if _keeps_some(trainer) else min(LONGEST, positions)
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
    """Return the labels that are predicted: the first of a document is not."""
    return sum(label != IGNORE for label in row["labels"][1:])


def _loss_of_trainer(trainer, rows: list[dict], supervised: int) -> float:
    """Return compute_loss of the collated rows, as a step with `supervised` tokens would scale it."""
    batch = send_to_device(trainer.train_collator(rows), trainer.args.device)
    count = torch.tensor(supervised, device=trainer.args.device)
    with trainer.labels_counted(None):
        loss = trainer.compute_loss(trainer.model_wrapped, batch, num_items_in_batch=count)
    return loss.item() / trainer.counted_ranks


def _summed_cross_entropy(trainer, rows: list[dict]) -> tuple[float, int]:
    """Return (sum of the cross entropies of all labels, their number), by a forward for each document.

    Under ZeRO-3 each forward is collective: every rank makes as many.
    """
    model, device, some = trainer.model_wrapped, trainer.args.device, _keeps_some(trainer)
    total, count = 0.0, 0
    for i in range(max(distributed.all_gather(len(rows)))):
        row = rows[i % len(rows)]
        positions = [place for place, label in enumerate(row["labels"][1:]) if label != IGNORE]
        ids = torch.tensor([row["input_ids"]], device=device)
        targets = torch.tensor(row["labels"], device=device)[1:][positions]
        kept = {"logits_to_keep": torch.tensor(positions or [0], device=device)} if some else {}
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **kept).logits[0]
        if i < len(rows) and positions:
            logits = logits if some else logits[:-1][positions]
            total += _cross_entropy(logits.float(), targets, trainer.args.label_smoothing_factor)
            count += len(positions)
    return total, count


def _keeps_some(trainer) -> bool:
    """Return whether the model computes the logits of chosen positions alone."""
    return "logits_to_keep" in inspect.signature(_innermost(trainer).forward).parameters


def _innermost(trainer):
    """Return the model without the adapter, whose forward names its arguments."""
    return trainer.model.get_base_model() if trainer.settings.trains_adapter else trainer.model


def _cross_entropy(logits, targets, smoothing: float) -> float:
    """Return -sum(log p(target)), or with smoothing e: (1 - e) of it and e of the mean over the vocabulary."""
    log_probs = functional.log_softmax(logits, dim=-1)
    total = -log_probs.gather(-1, targets[:, None]).double().sum()
    if smoothing:
        total = (1 - smoothing) * total - smoothing * log_probs.double().mean(-1).sum()
    return total.item()
