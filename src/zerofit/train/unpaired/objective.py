"""The losses of single answers with a label: the KL term of a step, the inputs and the metrics."""

import contextlib
import math

import torch
from accelerate.utils import send_to_device
from transformers import TrainerCallback

from zerofit.base import phases
from zerofit.data.batches import LABEL_COUNT, document_of_each_token, lengths_of
from zerofit.data.unpaired import mismatched
from zerofit.model import fused_loss, patches, preference_loss

NAMES = ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen",
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


class Unpaired:
    """What a PreferenceTrainer computes of answers with a label.

    The KL term z of KTO is a mean over the rows of an optimizer step, on all ranks and of all micro batches: each row's
    prompt with the answer of another row (data/unpaired/mismatched.py). So it is computed before the first micro batch
    of the step, and the split of the step changes no loss. An evaluation has one z, over all of its rows.
    """

    unit, sums, score_name = "answers", SUMS, "label accuracy"

    documents = 1  # of a row, whose log-probabilities are in the loss

    def __init__(self, trainer):
        self.trainer, self.settings = trainer, trainer.settings
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
            setattr(trainer, name, mismatched.UnpairedCollator(getattr(trainer, name), self.has_kl))

    def items(self, inputs) -> torch.Tensor:
        """Return the number of rows of a batch that are no filler."""
        return (_answer_tokens(inputs) > 0).sum()

    def losses(self, model, inputs):
        """Return (losses of the rows, their sums for the metrics, rows that are no filler, the model's outputs)."""
        trainer, real = self.trainer, _answer_tokens(inputs) > 0
        kl = self.kl if self.kl is not None else self._mean(self._kl_sum(model, inputs))
        own_inputs, _ = mismatched.split(inputs)
        reference = self._reference(model, inputs, own_inputs, 0)
        own, outputs = trainer.log_probs(model, own_inputs)
        own, wanted = own[:, 0], inputs[mismatched.LABELS]
        losses, rewards = preference_loss.losses_of_answers(self.settings, own - reference.to(own), wanted, kl.to(own))
        losses = losses.where(real, 0.0)
        right = (rewards > self.settings.beta * kl) == wanted
        return losses, _sums(losses.detach(), rewards, own.detach(), wanted, right, real), real.sum(), outputs

    def _reference(self, model, inputs, documents: dict, column: int) -> torch.Tensor:
        """Return the reference's log-probabilities of the rows' documents, (rows,). column: 0 own, 1 mismatched."""
        trainer, settings = self.trainer, self.settings
        if "reference" in inputs:
            return inputs["reference"][:, column]
        if settings.precompute_ref_log_probs or not settings.trains_adapter:  # a trial, whose rows come without
            return torch.zeros((), device=documents["input_ids"].device)
        with trainer.as_reference(model):
            return trainer.log_probs(model, documents)[0][:, 0]

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
        """Context of an evaluation: z is that of all its rows. Collective."""
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
        real = _answer_tokens(inputs) > 0
        if not self.has_kl:
            return torch.zeros(2, dtype=torch.float64, device=real.device)
        trainer, (_, documents) = self.trainer, mismatched.split(inputs)
        count = trainer.label_count  # of the rows' own labels
        with torch.no_grad(), trainer.labels_counted(None):
            own = trainer.log_probs(model, documents)[0][:, 0]
            ratios = own - self._reference(model, inputs, documents, 1).to(own)
        trainer.label_count = count
        return torch.stack([ratios.double().where(real, 0.0).sum(), real.sum().double()])

    # --- metrics ---

    def means(self, total: torch.Tensor) -> dict[str, float]:
        """Return the metrics from SUMS over any rows; those of a label that no row has are left out."""
        sums = dict(zip(SUMS, total.tolist(), strict=True))
        counts = {"chosen": sums["wanted"], "rejected": sums["rows"] - sums["wanted"]}
        found = {name: sums[name] / (sums["rows"] or math.nan) for name in ("loss", "rewards/accuracies")}
        for label, count in counts.items():
            found |= {f"{kind}/{label}": sums[f"{kind}/{label}"] / count for kind in OF_LABEL if count}
        if all(counts.values()):
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found

    def of_evaluation(self, total: torch.Tensor) -> dict[str, float]:
        """Return the metrics of an evaluation from its sums."""
        return self.means(total) | ({"kl": self.kl.item()} if self.kl is not None else {})

    def of_steps(self, total: torch.Tensor) -> dict[str, float]:
        """Return the metrics of the steps since the last line from their sums."""
        steps, self.kl_of_steps = self.kl_of_steps, []
        found = self.means(total) | ({"kl": torch.stack(steps).mean().item()} if steps else {})
        return {name: found[name] for name in NAMES if name in found}

    def score(self, metrics: dict[str, float]) -> float:
        """Return the share of held-out answers whose reward is on the side of z that their label says."""
        return metrics["eval_rewards/accuracies"]

    # --- the reference before the first step ---

    def lengths(self, sequences) -> torch.Tensor:
        """Return the tokens of each row."""
        return torch.from_numpy(lengths_of(getattr(sequences, "rows", sequences)))

    def reference_of(self, model, inputs) -> torch.Tensor:
        """Return the log-probabilities of a batch's documents and mismatched documents, (rows, 2)."""
        own = [self.trainer.log_probs(model, documents)[0][:, 0] for documents in mismatched.split(inputs) if documents]
        return torch.stack(own if self.has_kl else [*own, torch.zeros_like(own[0])], 1)

    def key(self, digest, sequences) -> object:
        """Add to a hash which answers are paired with which prompts, and return the datasets.Dataset of the rows."""
        if not self.has_kl:
            return sequences
        digest.update(sequences.partners.tobytes() + str(sequences.max_length).encode())
        return sequences.rows


def _answer_tokens(inputs) -> torch.Tensor:
    """Return the supervised tokens of each row, (rows,); 0 for fillers."""
    documents, count = document_of_each_token(inputs)
    labeled = torch.nn.functional.pad(inputs["labels"][..., 1:], (0, 1), value=fused_loss.IGNORED) != fused_loss.IGNORED
    zeros = torch.zeros(count, dtype=torch.long, device=labeled.device)
    return zeros.index_add(0, documents, labeled.flatten().long())


def _sums(losses, rewards, own, wanted, right, real) -> torch.Tensor:
    """Return SUMS over the rows of a batch; fillers do not count."""
    ones, zero = torch.ones_like(losses), torch.zeros_like(losses)
    values = [ones, losses, wanted, rewards.where(wanted, zero), rewards.where(~wanted, zero), right,
              own.where(wanted, zero), own.where(~wanted, zero)]  # fmt: skip
    return torch.stack([v.double() for v in values], 1).where(real[:, None], 0.0).sum(0)
