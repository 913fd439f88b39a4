"""CausalLM: next-token prediction on conversations and texts, the objective of supervised fine-tuning."""

import math

import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from zerofit.data import formats
from zerofit.data.dataset_conventions import columns as column_names
from zerofit.data.reading import Example, Examples
from zerofit.model import adapters, generation
from zerofit.objective.interface import Objective
from zerofit.parallel import sequence_parallel


class CausalLM(Objective):
    """The mean cross entropy over the supervised tokens of a step."""

    name = "causal_lm"

    metrics, score_name = ("loss", "perplexity"), "exact match"

    @staticmethod
    def parse(place, row, form, settings):
        known, kind, guessed = formats.formats_of(settings.recipe), form.kind, form.guessed
        if not kind:
            kind, guessed = formats.recognize(place, row, known)
        notes = [column_names.describe_guess(guessed)] if guessed else []
        row = formats.rename_columns(row, guessed) if guessed else row
        example = Example(place, (formats.parse(place, row, kind, known),))
        return Examples(kind, [example], formats.unused_columns(row, kind, known), notes)

    def items(self, batches, device):
        """Return the number of predicted labels of a step, for classes whose loss shifts labels.

        transformers also counts the first token of a row for classes without a loss_type, e.g. GPT-2, and before 5.23
        rounded the number down if ranks share rows.
        """
        trainer = self.trainer
        model = trainer.model.get_base_model() if self.settings.trains_adapter else trainer.model
        causal = getattr(model, "loss_function", ForCausalLMLoss) is ForCausalLMLoss  # pipeline stages lack it
        divides = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        labeled = [batch["labels"] for batch in batches if "labels" in batch]
        if not (causal and divides and labeled) or getattr(model.config, "is_encoder_decoder", False):
            return None
        first = adapters.first_target(self.settings)
        return trainer.over_ranks(sum((labels[..., first:] != -100).sum() for labels in labeled).to(device))

    def loss(self, model, inputs, items):
        trainer = self.trainer
        # Count first: label smoothing removes the labels from the inputs.
        supervised = self._supervised(inputs) if trainer.router_loss else None
        if trainer.compute_loss_func is not None:  # reads the logits
            loss, outputs = trainer.model_loss(model, inputs, items)
        else:
            with trainer.without_logits():
                loss, outputs = trainer.model_loss(model, inputs, items)
        if trainer.router_loss:
            # Scale like the loss: gradients are averaged over the ranks, but the token count includes all ranks.
            loss = loss + trainer.loss_world_size * trainer.router_loss.share(outputs, supervised, items)
        return loss, outputs

    def _supervised(self, inputs) -> torch.Tensor:
        return sequence_parallel.supervised(inputs, adapters.first_target(self.settings))

    def evaluation_sums(self, model, inputs):
        """Return a batch's summed loss and its number of supervised tokens, float64."""
        trainer, count = self.trainer, self._supervised(inputs)
        if trainer.has_custom_loss:
            mean = trainer.custom_loss_mean(model, inputs, count)
        else:
            with trainer.without_logits():
                mean = model(**inputs, num_items_in_batch=count.clamp(min=1)).loss
        return torch.stack([mean.double() * count, count.double()])

    def evaluation_metrics(self, total):
        """Return mean loss and perplexity over all supervised tokens from the sums of all batches and ranks."""
        mean = (total[0] / total[1]).item()
        if self.trainer.has_custom_loss:  # may not be a cross entropy
            return {"loss": mean}
        return {"loss": mean, "perplexity": math.exp(min(mean, 700.0))}

    def score(self):
        return generation.exact_match(self.trainer)
