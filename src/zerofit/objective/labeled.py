"""Labeled: single answers, each labeled as wanted or unwanted (KTO). A pair of answers is split into two such rows."""

import contextlib
import dataclasses
import math
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import TrainerCallback

from zerofit.base import phases
from zerofit.base.errors import UserError
from zerofit.data import formats, loss_marks
from zerofit.data.batches import LABEL_COUNT, lengths_of, tables
from zerofit.data.dataset_conventions import columns, comparisons
from zerofit.data.reading import LABEL_COUNTS, Example, Examples
from zerofit.model import patches
from zerofit.objective import mismatched, pairs, preference_losses
from zerofit.objective.preference import Preference, answer_tokens

KIND = "labeled"

FROM_PAIRS = "pairs taken apart"  # format of a row with two answers

# Label values in published data, in lower case: TRL's and ms-swift's booleans, also as text or numbers.
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}

PREFIX = "kl_"  # prefix of the batch inputs for the second documents

WANTED = "wanted"  # batch input: whether each answer is wanted

WITHOUT_PROMPT = ("text", "tokens")  # formats without a marked start of the answer


def parse(place: str, row: dict[str, Any], known) -> Examples:
    """Parse a row into its answers; a pair has two. Only the turns after the last question are trained.

    Raises: UserError with the place for a missing or unknown label, and as the parsers of both formats.
    """
    pair, notes = comparisons.standard(place, row) if loss_marks.label_of(row) is None else (row, ())
    if pair.get("chosen") is not None and pair.get("rejected") is not None:
        sides = pairs.parse(place, pair)
        answers = [
            Example(f"{place}, {name}", (side,), name == "chosen")
            for name, side in zip(pairs.SIDES, sides, strict=True)
        ]
        return Examples(FROM_PAIRS, answers, pairs.not_used(pair), [*notes])
    wanted = _label(place, row)
    row = {name: value for name, value in row.items() if name not in loss_marks.LABELS}
    kind, guessed = formats.recognize(place, row, known)
    row, notes = formats.rename_columns(row, guessed), [columns.describe_guess(guessed)] if guessed else []
    if kind in WITHOUT_PROMPT:
        raise UserError(
            f"{place}: format {kind} does not mark the start of the answer for 'label'; use `prompt` and `completion`, "
            "or `messages`."
        )
    conversation = formats.parse(place, row, kind, known)
    last_question = max((i for i, turn in enumerate(conversation.turns) if turn["role"] == "user"), default=-1)
    trained = [on and i > last_question for i, on in enumerate(conversation.trained)]
    conversation = dataclasses.replace(conversation, trained=trained)
    return Examples(kind, [Example(place, (conversation,), wanted)], formats.unused_columns(row, kind, known), notes)


def _label(place: str, row: dict[str, Any]) -> bool:
    """Return whether the row's answer is wanted."""
    loss_marks.check_labels(place, row)
    value = next((row[name] for name in loss_marks.LABELS if row.get(name) is not None), None)
    if value is None:
        present = ", ".join(k for k, v in row.items() if v is not None) or "none"
        raise UserError(
            f"{place}: column 'label' is missing or null; --loss_type kto needs `prompt`, `completion` and `label` "
            f"(true: wanted), or a pair with `chosen` and `rejected`; columns found: {present}; map another name "
            "with --columns label=..."
        )
    if str(value).lower() not in LABELS:
        raise UserError(f"{place}: column 'label' must be true or false (1 or 0), found {value!r}.")
    return LABELS[str(value).lower()]


# --- checks of the training set ---


def check(settings, rows) -> list[str]:
    """Return sentences about the labels of the training rows and the weights of the loss.

    Args: rows: the training TokenizedDataset.
    Raises: UserError if all rows have the same label.
    """
    wanted = count_wanted(rows.dataset)
    unwanted = len(rows) - wanted
    if not wanted or not unwanted:
        which = "wanted (label true)" if wanted else "unwanted (label false)"
        fix = "train on them with recipes/sft.py" if wanted else "add wanted answers"
        raise UserError(
            f"--loss_type {settings.loss_type}: all {len(rows):,} training answers are {which}, but the loss needs "
            f"both kinds; {fix}{_not_used(rows.statistics)}."
        )
    sentences = [f"labels: {wanted:,} wanted and {unwanted:,} unwanted answers"]
    if FROM_PAIRS in rows.statistics["format"]:
        sentences[0] += "; each pair is split into a wanted (chosen) and an unwanted (rejected) answer"
    balance = settings.desirable_weight * wanted / max(settings.undesirable_weight * unwanted, 1e-12)
    if settings.loss_type == "kto" and not 0.99 <= balance <= 4 / 3 + 0.01 and wanted != unwanted:
        weight = settings.undesirable_weight * unwanted / wanted
        sentences.append(
            f"the ratio of weight x number of wanted to unwanted answers is {balance:.2f}; the paper recommends 1 to "
            f"1.33 (arXiv 2402.01306, equation 8): --desirable_weight {weight:.3g} to {4 / 3 * weight:.3g}"
        )
    return sentences


def _not_used(statistics: dict) -> str:
    """Return the most common reason for unusable rows, or "" if all rows are used."""
    bad = max(statistics.get("bad_rows", {}).values(), key=lambda entry: entry["rows"], default=None)
    return f"; {bad['rows']:,} rows are unusable ({bad['first'][0]}: {bad['exact'].rstrip('.')})" if bad else ""


def count_wanted(dataset) -> int:
    """Return the number of rows of a datasets.Dataset with the label true."""
    import pyarrow.compute as pc

    return sum(pc.sum(pc.list_flatten(table[KIND])).as_py() or 0 for table in tables(dataset, [KIND]))


# --- training ---

METRICS = ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen",
           "logps/rejected")  # fmt: skip

LABEL_MEANS = ("rewards", "logps")  # metrics averaged over the answers of one label

SUMS = ("rows", "loss", "wanted", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen",
        "logps/rejected")  # fmt: skip


class StepTrace(TrainerCallback):
    """Let ZeRO-3 prefetch along all forwards of a step, including the KL term's forwards without a backward."""

    def __init__(self):
        self.step = contextlib.ExitStack()

    def begin(self, engine) -> None:
        """Begin the trace of a step."""
        self.step.enter_context(patches.same_trace(engine, begins=True))

    def on_step_end(self, *args, **kwargs):
        """End the trace."""
        self.step.close()


class Labeled(Preference):
    """The mean loss of the answers of a step, from their log-probabilities.

    The KL term z of KTO is a mean over all rows of a step: each row's prompt with another row's answer (mismatched.py).
    It is computed before the first micro batch, so that the loss does not depend on the split of the step. An
    evaluation has one z, over all of its rows.
    """

    name, loss_types = "labeled", preference_losses.LABELED_LOSSES

    format, own_columns, unit, columns = KIND, frozenset(pairs.USED), "answers", (KIND,)

    counts = (*LABEL_COUNTS, "dropped_ties")  # split pairs may be ties

    sums = SUMS

    score_name, score_metric = "label accuracy", "rewards/accuracies"  # whether reward > z matches the label

    @staticmethod
    def parse(place, row, form, settings):
        return parse(place, row, formats.formats_of(settings.recipe))

    @staticmethod
    def count(rows):
        return {"wanted": count_wanted(rows)}

    check_rows = staticmethod(check)

    @staticmethod
    def extra_forwards(settings):
        documents = 2 if settings.loss_type == "kto" else 1  # documents per row, each in a separate forward
        return documents * Preference.extra_forwards(settings) + documents - 1

    def __init__(self, trainer):
        super().__init__(trainer)
        self.has_kl = self.settings.loss_type == "kto"
        self.kl = None  # z of the step or evaluation; None: computed per micro batch, as in a trial
        self.kl_of_steps = []  # z of the steps since the last log line
        self.trace = StepTrace()
        trainer.add_callback(self.trace)
        orders = {trainer.train_dataset: trainer.train_sampler.indices(0)}
        if trainer.eval_dataset is not None:
            orders[trainer.eval_dataset] = range(len(trainer.eval_dataset))
        for dataset, order in orders.items() if self.has_kl else ():
            rows, block = dataset.sequences, self.settings.effective_batch_size
            partners = mismatched.partners(order, mismatched.prompts_of(rows), block)
            dataset.sequences = mismatched.MismatchedRows(rows, partners, self.settings.max_length)
        for name in ("train_collator", "data_collator"):
            setattr(trainer, name, LabeledCollator(getattr(trainer, name), self.has_kl))

    def examples(self, inputs):
        return (answer_tokens(inputs) > 0).sum()

    def losses(self, model, inputs):
        real = answer_tokens(inputs) > 0
        kl = self.kl if self.kl is not None else self._mean(self._kl_sum(model, inputs))
        row_inputs, _ = split(inputs)
        reference = self._reference(model, inputs, row_inputs, 0)
        log_probs, outputs = self.log_probs(model, row_inputs)
        log_probs, wanted = log_probs[:, 0], inputs[WANTED]
        losses, rewards = preference_losses.labeled_losses(
            self.settings, log_probs - reference.to(log_probs), wanted, kl.to(log_probs)
        )
        losses = losses.where(real, 0.0)
        right = (rewards > self.settings.beta * kl) == wanted
        return losses, _sums(losses.detach(), rewards, log_probs.detach(), wanted, right, real), real.sum(), outputs

    def _reference(self, model, inputs, documents: dict, column: int) -> torch.Tensor:
        """Return the reference's log-probabilities of documents, (rows,). Args: column: 0: row, 1: mismatched."""
        settings = self.settings
        if "reference" in inputs:
            return inputs["reference"][:, column]
        if settings.precompute_ref_log_probs or not settings.trains_adapter:  # rows of a trial lack it
            return torch.zeros((), device=documents["input_ids"].device)
        with self.as_reference(model):
            return self.log_probs(model, documents)[0][:, 0]

    # --- the KL term ---

    def begin_step(self, batches: list[dict]) -> None:
        """Compute z of the next step from its micro batches on all ranks. Collective."""
        if self.has_kl and batches:
            self.trainer.reporter.phases.enter(phases.STEP)
            self._net().train()
            if self.settings.zero == 3:
                self.trace.begin(self._net())
            device = self.trainer.args.device
            # Separate dropout masks: a resumed run restores the random state after this, before the first row.
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(self.trainer.seed_of_step())
                self.kl = self._of_all(batches)
            self.kl_of_steps.append(self.kl.where(self.kl.isfinite(), 0.0))

    @contextlib.contextmanager
    def evaluating(self, dataloader):
        """Compute z of all rows of an evaluation, for use in the context. Collective."""
        of_step, self.kl = self.kl, None
        if self.has_kl:
            model = self._net()
            is_training = model.training
            model.eval()
            batches = self.trainer.reporter.evaluating(dataloader)
            self.kl = self._of_all({n: v for n, v in batch.items() if n != LABEL_COUNT} for batch in batches)
            model.train(is_training)
        try:
            yield
        finally:
            self.kl = of_step

    def _of_all(self, batches) -> torch.Tensor:
        """Return z over the batches of all ranks. Collective."""
        trainer, model = self.trainer, self._net()
        total = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)
        for batch in batches:
            with trainer.compute_loss_context_manager():
                total = total + self._kl_sum(model, send_to_device(batch, trainer.args.device))
        if trainer.args.world_size > 1:
            torch.distributed.all_reduce(total)
        return self._mean(total)

    def _net(self):
        """Return the engine or the model, without DDP, as gradients are not needed."""
        return self.trainer.model_wrapped if self.trainer.is_deepspeed_enabled else self.trainer.model

    def _mean(self, total: torch.Tensor) -> torch.Tensor:
        return (total[0] / total[1].clamp(min=1)).clamp(min=0).float()

    def _kl_sum(self, model, inputs) -> torch.Tensor:
        """Return (sum of log pi / ref over the mismatched documents of a batch, their number), float64."""
        real = answer_tokens(inputs) > 0
        if not self.has_kl:
            return torch.zeros(2, dtype=torch.float64, device=real.device)
        trainer, (_, documents) = self.trainer, split(inputs)
        count = trainer.label_count  # count for the rows' labels
        with torch.no_grad(), trainer.labels_counted(None):
            log_probs = self.log_probs(model, documents)[0][:, 0]
            ratios = log_probs - self._reference(model, inputs, documents, 1).to(log_probs)
        trainer.label_count = count
        return torch.stack([ratios.double().where(real, 0.0).sum(), real.sum().double()])

    # --- metrics ---

    def means(self, total):
        """Return the metrics from SUMS over any rows, without the metrics of missing labels."""
        sums = dict(zip(SUMS, total.tolist(), strict=True))
        counts = {"chosen": sums["wanted"], "rejected": sums["rows"] - sums["wanted"]}
        metrics = {name: sums[name] / (sums["rows"] or math.nan) for name in ("loss", "rewards/accuracies")}
        for label, count in counts.items():
            metrics |= {f"{kind}/{label}": sums[f"{kind}/{label}"] / count for kind in LABEL_MEANS if count}
        if all(counts.values()):
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics

    def evaluation_metrics(self, total):
        return self.means(total) | ({"kl": self.kl.item()} if self.kl is not None else {})

    def step_metrics(self):
        steps, self.kl_of_steps = self.kl_of_steps, []
        means = super().step_metrics() | ({"kl": torch.stack(steps).mean().item()} if steps else {})
        return {name: means[name] for name in METRICS if name in means}

    def pending_log_state(self):
        return super().pending_log_state() | {"kl": [kl.item() for kl in self.kl_of_steps]}

    def restore_log_state(self, state):
        super().restore_log_state(state)
        self.kl_of_steps = [torch.tensor(kl, device=self.trainer.args.device) for kl in state["kl"]]

    # --- the reference ---

    def lengths(self, sequences):
        """Return the number of tokens of each row."""
        return torch.from_numpy(lengths_of(getattr(sequences, "rows", sequences)))

    def reference_of(self, model, inputs):
        """Return the log-probabilities of a batch's documents and mismatched documents, (rows, 2)."""
        log_probs = [self.log_probs(model, documents)[0][:, 0] for documents in split(inputs) if documents]
        return torch.stack(log_probs if self.has_kl else [*log_probs, torch.zeros_like(log_probs[0])], 1)

    def rows_of_key(self, digest, sequences):
        if not self.has_kl:
            return sequences
        digest.update(sequences.partners.tobytes() + str(sequences.max_length).encode())
        return sequences.rows


def _sums(losses, rewards, log_probs, wanted, right, real) -> torch.Tensor:
    """Return SUMS over the rows of a batch; fillers do not count."""
    ones, zero = torch.ones_like(losses), torch.zeros_like(losses)
    values = [ones, losses, wanted, rewards.where(wanted, zero), rewards.where(~wanted, zero), right,
              log_probs.where(wanted, zero), log_probs.where(~wanted, zero)]  # fmt: skip
    return torch.stack([v.double() for v in values], 1).where(real[:, None], 0.0).sum(0)


class LabeledCollator:
    """Collate rows and, with prefix PREFIX, their second documents with `collate`; add WANTED.

    A row without a second document, such as the filler, is its own second document.
    """

    def __init__(self, collate, has_mismatched: bool):
        self.collate, self.has_mismatched = collate, has_mismatched

    def __call__(self, batch: list[dict]) -> dict:
        rows = [{name: row[name] for name in ("input_ids", "labels", "reference") if name in row} for row in batch]
        inputs = self.collate(rows) | {WANTED: torch.tensor([bool(row.get(KIND, [0])[0]) for row in batch])}
        if not self.has_mismatched:
            return inputs
        others = [
            row.get(mismatched.MISMATCHED) or {name: row[name] for name in ("input_ids", "labels")} for row in batch
        ]
        return inputs | {PREFIX + name: value for name, value in self.collate(others).items()}

    @property
    def packed(self) -> bool:
        """Whether `collate` concatenates rows; the trainer may turn it off."""
        return self.collate.packed

    @packed.setter
    def packed(self, value: bool) -> None:
        self.collate.packed = value

    @property
    def pad_token_id(self) -> int:
        """The padding token of `collate`."""
        return self.collate.pad_token_id


def split(inputs: dict) -> tuple[dict, dict]:
    """Return the model's inputs (for the rows, for their second documents) of a batch."""
    other = (WANTED, "reference")
    rows = {n: value for n, value in inputs.items() if not n.startswith(PREFIX) and n not in other}
    return rows, {n.removeprefix(PREFIX): value for n, value in inputs.items() if n.startswith(PREFIX)}
