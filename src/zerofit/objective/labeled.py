"""Labeled: single answers, each with a label that says whether it is wanted (KTO).

A pair of two answers is taken apart into two such rows.
"""

import contextlib
import dataclasses
import math
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import TrainerCallback

from zerofit.base import phases
from zerofit.base.errors import UserError
from zerofit.data import formats, meaning
from zerofit.data.batches import LABEL_COUNT, lengths_of, tables
from zerofit.data.published import columns, comparisons
from zerofit.data.reading import OF_LABELED, Example, Examples
from zerofit.model import patches
from zerofit.objective import mismatched, pairs, preference_losses
from zerofit.objective.preference import Preference, answer_tokens

KIND = "labeled"

FROM_PAIRS = "pairs taken apart"  # the format of a row that holds two answers

# Values of the label in published data, in lower case: TRL's and ms-swift's booleans, and the same as text or numbers.
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}

PREFIX = "kl_"  # of the inputs of a batch that hold the second documents

WANTED = "wanted"  # input of a batch: whether each answer is

WITHOUT_PROMPT = ("text", "tokens")  # formats that do not say where the answer begins


def parse(place: str, row: dict[str, Any], known) -> Examples:
    """Parse a row into its answers; a pair has two.

    Only the turns behind the last question are trained.
    Raises: UserError naming the place for a label that is missing or unknown, and as the parsers of both forms.
    """
    pair, notes = comparisons.standard(place, row) if meaning.label_of(row) is None else (row, ())
    if pair.get("chosen") is not None and pair.get("rejected") is not None:
        sides = pairs.parse(place, pair)
        answers = [
            Example(f"{place}, {name}", (side,), name == "chosen")
            for name, side in zip(pairs.SIDES, sides, strict=True)
        ]
        return Examples(FROM_PAIRS, answers, pairs.not_used(pair), [*notes])
    wanted = _label(place, row)
    row = {name: value for name, value in row.items() if name not in meaning.LABELS}
    kind, guessed = formats.recognize(place, row, known)
    row, notes = formats.renamed(row, guessed), [columns.said(guessed)] if guessed else []
    if kind in WITHOUT_PROMPT:
        raise UserError(
            f"{place}: format {kind}: nothing says where the answer begins that 'label' is about; give a `prompt` and "
            "a `completion`, or `messages`."
        )
    conversation = formats.parse(place, row, kind, known)
    asked = max((i for i, turn in enumerate(conversation.turns) if turn["role"] == "user"), default=-1)
    trained = [on and i > asked for i, on in enumerate(conversation.trained)]
    conversation = dataclasses.replace(conversation, trained=trained)
    return Examples(kind, [Example(place, (conversation,), wanted)], formats.not_used(row, kind, known), notes)


def _label(place: str, row: dict[str, Any]) -> bool:
    """Return whether the row's answer is wanted."""
    meaning.check_labels(place, row)
    value = next((row[name] for name in meaning.LABELS if row.get(name) is not None), None)
    if value is None:
        present = ", ".join(k for k, v in row.items() if v is not None) or "none"
        raise UserError(
            f"{place}: column 'label' is missing or null; a row of --loss_type kto has a prompt, a completion and a "
            f"label (true: wanted), or is a pair with `chosen` and `rejected`; columns here: {present}; --columns "
            "label=... maps another name."
        )
    if str(value).lower() not in LABELS:
        raise UserError(f"{place}: column 'label' must be true or false (1 or 0), found {value!r}.")
    return LABELS[str(value).lower()]


# --- how many of each ---


def check(settings, rows) -> list[str]:
    """Return sentences about the labels of the training rows and the weights of the loss.

    Args: rows: the TokenizedDataset that is trained on.
    Raises: UserError where all rows have the same label.
    """
    wanted = count_wanted(rows.dataset)
    unwanted = len(rows) - wanted
    if not wanted or not unwanted:
        which = "wanted (label true)" if wanted else "unwanted (label false)"
        mend = "train on them with recipes/sft.py" if wanted else "add answers that are wanted"
        raise UserError(
            f"--loss_type {settings.loss_type}: each of the {len(rows):,} training answers is {which}, so there is "
            f"nothing to tell apart; {mend}{_not_used(rows.statistics)}."
        )
    said = [f"labels: {wanted:,} answers are wanted, {unwanted:,} are not"]
    if FROM_PAIRS in rows.statistics["format"]:
        said[0] += "; pairs are taken apart, each into a chosen answer that is wanted and a rejected one that is not"
    balance = settings.desirable_weight * wanted / max(settings.undesirable_weight * unwanted, 1e-12)
    if settings.loss_type == "kto" and not 0.99 <= balance <= 4 / 3 + 0.01 and wanted != unwanted:
        weight = settings.undesirable_weight * unwanted / wanted
        said.append(
            f"the weights and numbers of both kinds of answers are as {balance:.2f} to 1, and the paper advises 1 to "
            f"1.33 (arXiv 2402.01306, equation 8): --desirable_weight {weight:.3g} to {4 / 3 * weight:.3g} would be so"
        )
    return said


def _not_used(statistics: dict) -> str:
    """Return why the commonest of the rows that cannot be used are not among the answers; "" if all are."""
    bad = max(statistics.get("bad_rows", {}).values(), key=lambda entry: entry["rows"], default=None)
    return f"; {bad['rows']:,} rows cannot be used ({bad['first'][0]}: {bad['exact'].rstrip('.')})" if bad else ""


def count_wanted(dataset) -> int:
    """Return how many rows of a datasets.Dataset have the label true."""
    import pyarrow.compute as pc

    return sum(pc.sum(pc.list_flatten(table[KIND])).as_py() or 0 for table in tables(dataset, [KIND]))


# --- training ---

METRICS = ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen",
           "logps/rejected")  # fmt: skip

OF_LABEL = ("rewards", "logps")  # metrics that are means over the answers of one label

SUMS = ("rows", "loss", "wanted", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen",
        "logps/rejected")  # fmt: skip


class StepTrace(TrainerCallback):
    """Has ZeRO-3 gather ahead along all forwards of a step, of which those for the KL term have no backward."""

    def __init__(self):
        self.step = contextlib.ExitStack()

    def begin(self, engine) -> None:
        """Begin the trace of a step."""
        self.step.enter_context(patches.same_trace(engine, begins=True))

    def on_step_end(self, *args, **kwargs):
        """End it."""
        self.step.close()


class Labeled(Preference):
    """A loss of each answer's log-probability, a mean over the answers of the whole step.

    The KL term z of KTO is a mean over the rows of an optimizer step, on all ranks and of all micro batches: each row's
    prompt with the answer of another row (mismatched.py). So it is computed before the first micro batch of the step,
    and the split of the step changes no loss. An evaluation has one z, over all of its rows.
    """

    name, loss_types = "labeled", preference_losses.OF_LABELED

    format, own_columns, unit, columns = KIND, frozenset(pairs.USED), "answers", (KIND,)

    counts = (*OF_LABELED, "dropped_ties")  # pairs that are taken apart may be ties

    sums = SUMS

    score_name, score_metric = "label accuracy", "rewards/accuracies"  # the reward is on the side of z that is wanted

    @staticmethod
    def parse(place, row, form, settings):
        return parse(place, row, formats.known_to(settings.recipe))

    @staticmethod
    def count(rows):
        return {"wanted": count_wanted(rows)}

    check_rows = staticmethod(check)

    @staticmethod
    def extra_forwards(settings):
        documents = 2 if settings.loss_type == "kto" else 1  # of a row, each in a forward of its own
        return documents * Preference.extra_forwards(settings) + documents - 1

    def __init__(self, trainer):
        super().__init__(trainer)
        self.has_kl = self.settings.loss_type == "kto"
        self.kl = None  # of the step or evaluation that is computed; None: of a micro batch by itself, as in a trial
        self.kl_of_steps = []  # since the last log line
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
        own_inputs, _ = split(inputs)
        reference = self._reference(model, inputs, own_inputs, 0)
        own, outputs = self.log_probs(model, own_inputs)
        own, wanted = own[:, 0], inputs[WANTED]
        losses, rewards = preference_losses.losses_of_answers(
            self.settings, own - reference.to(own), wanted, kl.to(own)
        )
        losses = losses.where(real, 0.0)
        right = (rewards > self.settings.beta * kl) == wanted
        return losses, _sums(losses.detach(), rewards, own.detach(), wanted, right, real), real.sum(), outputs

    def _reference(self, model, inputs, documents: dict, column: int) -> torch.Tensor:
        """Return the reference's log-probabilities of the rows' documents, (rows,). column: 0 own, 1 mismatched."""
        settings = self.settings
        if "reference" in inputs:
            return inputs["reference"][:, column]
        if settings.precompute_ref_log_probs or not settings.trains_adapter:  # a trial, whose rows come without
            return torch.zeros((), device=documents["input_ids"].device)
        with self.as_reference(model):
            return self.log_probs(model, documents)[0][:, 0]

    # --- the KL term ---

    def begin_step(self, batches: list[dict]) -> None:
        """Compute z of the step that begins, from its micro batches on all ranks. Collective."""
        if self.has_kl and batches:
            self.trainer.reporter.phases.enter(phases.STEP)
            self._net().train()
            if self.settings.zero == 3:
                self.trace.begin(self._net())
            device = self.trainer.args.device
            # Dropout masks of its own: a resumed run restores the saved random state after this, before the first row.
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(self.trainer.seed_of_step())
                self.kl = self._of_all(batches)
            self.kl_of_steps.append(self.kl.where(self.kl.isfinite(), 0.0))

    @contextlib.contextmanager
    def evaluating(self, dataloader):
        """Compute z of all rows of an evaluation for the body. Collective."""
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
        """Return the engine, or the model itself: no gradient is exchanged."""
        return self.trainer.model_wrapped if self.trainer.is_deepspeed_enabled else self.trainer.model

    def _mean(self, total: torch.Tensor) -> torch.Tensor:
        return (total[0] / total[1].clamp(min=1)).clamp(min=0).float()

    def _kl_sum(self, model, inputs) -> torch.Tensor:
        """Return (sum of log pi / ref over the mismatched documents of a batch, their number), float64."""
        real = answer_tokens(inputs) > 0
        if not self.has_kl:
            return torch.zeros(2, dtype=torch.float64, device=real.device)
        trainer, (_, documents) = self.trainer, split(inputs)
        count = trainer.label_count  # of the rows' own labels
        with torch.no_grad(), trainer.labels_counted(None):
            own = self.log_probs(model, documents)[0][:, 0]
            ratios = own - self._reference(model, inputs, documents, 1).to(own)
        trainer.label_count = count
        return torch.stack([ratios.double().where(real, 0.0).sum(), real.sum().double()])

    # --- metrics ---

    def means(self, total):
        """Return the metrics from SUMS over any rows; those of a label that no row has are left out."""
        sums = dict(zip(SUMS, total.tolist(), strict=True))
        counts = {"chosen": sums["wanted"], "rejected": sums["rows"] - sums["wanted"]}
        metrics = {name: sums[name] / (sums["rows"] or math.nan) for name in ("loss", "rewards/accuracies")}
        for label, count in counts.items():
            metrics |= {f"{kind}/{label}": sums[f"{kind}/{label}"] / count for kind in OF_LABEL if count}
        if all(counts.values()):
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics

    def evaluation_metrics(self, total):
        return self.means(total) | ({"kl": self.kl.item()} if self.kl is not None else {})

    def step_metrics(self):
        steps, self.kl_of_steps = self.kl_of_steps, []
        means = super().step_metrics() | ({"kl": torch.stack(steps).mean().item()} if steps else {})
        return {name: means[name] for name in METRICS if name in means}

    def unlogged(self):
        return super().unlogged() | {"kl": [kl.item() for kl in self.kl_of_steps]}

    def take_unlogged(self, kept):
        super().take_unlogged(kept)
        self.kl_of_steps = [torch.tensor(kl, device=self.trainer.args.device) for kl in kept["kl"]]

    # --- the reference ---

    def lengths(self, sequences):
        """Return the tokens of each row."""
        return torch.from_numpy(lengths_of(getattr(sequences, "rows", sequences)))

    def reference_of(self, model, inputs):
        """Return the log-probabilities of a batch's documents and mismatched documents, (rows, 2)."""
        own = [self.log_probs(model, documents)[0][:, 0] for documents in split(inputs) if documents]
        return torch.stack(own if self.has_kl else [*own, torch.zeros_like(own[0])], 1)

    def rows_of_key(self, digest, sequences):
        if not self.has_kl:
            return sequences
        digest.update(sequences.partners.tobytes() + str(sequences.max_length).encode())
        return sequences.rows


def _sums(losses, rewards, own, wanted, right, real) -> torch.Tensor:
    """Return SUMS over the rows of a batch; fillers do not count."""
    ones, zero = torch.ones_like(losses), torch.zeros_like(losses)
    values = [ones, losses, wanted, rewards.where(wanted, zero), rewards.where(~wanted, zero), right,
              own.where(wanted, zero), own.where(~wanted, zero)]  # fmt: skip
    return torch.stack([v.double() for v in values], 1).where(real[:, None], 0.0).sum(0)


class LabeledCollator:
    """Collate rows with `collate`, their second documents too, as inputs whose names begin with PREFIX; add WANTED.

    A row without a second document, such as the filler, is its own: it has the shape.
    """

    def __init__(self, collate, has_mismatched: bool):
        self.collate, self.has_mismatched = collate, has_mismatched

    def __call__(self, batch: list[dict]) -> dict:
        own = [{name: row[name] for name in ("input_ids", "labels", "reference") if name in row} for row in batch]
        inputs = self.collate(own) | {WANTED: torch.tensor([bool(row.get(KIND, [0])[0]) for row in batch])}
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
        """The token that `collate` pads with."""
        return self.collate.pad_token_id


def split(inputs: dict) -> tuple[dict, dict]:
    """Return (the model's inputs of the rows, those of their second documents) of a batch."""
    beside = (WANTED, "reference")
    own = {n: value for n, value in inputs.items() if not n.startswith(PREFIX) and n not in beside}
    return own, {n.removeprefix(PREFIX): value for n, value in inputs.items() if n.startswith(PREFIX)}
