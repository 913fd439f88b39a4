"""A custom objective: unlikelihood (arXiv 1908.04319), which lowers the probability of unwanted answers.

A row is a prompt, an answer and a label, like for `--loss_type kto`; a pair is split into two rows.
"""

from zerofit import Recipe, entrypoint

RECIPE = Recipe(
    "unlikelihood",
    objectives=("Unlikelihood",),
    defaults={"learning_rate": 2e-5},
    bundled="examples/tiny/preference/dpo.yaml",
)

if __name__ == "__main__":
    entrypoint.check_early(RECIPE)

import torch

from zerofit import Trainer, recipe
from zerofit.certificate.data import check_data
from zerofit.data.batches import document_of_each_token
from zerofit.data.load import load_datasets
from zerofit.model.load import load_model, load_tokenizer
from zerofit.objective.causal_lm import CausalLM
from zerofit.objective.interface import Objective
from zerofit.objective.labeled import WANTED, Labeled, LabeledCollator
from zerofit.train.run import evaluate, failures_reported, save_final, write_result


class Unlikelihood(CausalLM):
    """The mean of -log(p) over tokens of wanted answers and -log(1 - p) over tokens of unwanted answers."""

    name, metrics, not_recomputed = "unlikelihood", ("loss",), "the loss is an unlikelihood loss"

    format, own_columns, unit, columns, counts = (
        *(Labeled.format, Labeled.own_columns, Labeled.unit, Labeled.columns, Labeled.counts),
    )

    parse, count = staticmethod(Labeled.parse), staticmethod(Labeled.count)

    score_name, score_metric = "probability of wanted answers", "wanted_probability"

    score = Objective.score  # scores the metric instead of generated answers

    def __init__(self, trainer):
        super().__init__(trainer)
        for name in ("train_collator", "data_collator"):  # mark the wanted answers in each batch
            setattr(trainer, name, LabeledCollator(getattr(trainer, name), has_mismatched=False))

    def loss(self, model, inputs, items):
        losses, _, _, outputs = self.token_losses(model, inputs)
        # Gradients are averaged over the ranks that `items` covers.
        return losses.sum() / (len(losses) if items is None else items / self.trainer.loss_world_size), outputs

    def token_losses(self, model, inputs):
        """Return (losses, probabilities, labels of the trained tokens, (tokens,); the model's outputs)."""
        answers, _ = document_of_each_token(inputs)
        tokens = torch.nn.functional.pad(inputs["labels"][..., 1:], (0, 1), value=-100).flatten()
        trained = tokens != -100
        wanted = inputs[WANTED][answers[trained]]
        outputs = model(**{name: value for name, value in inputs.items() if name not in ("labels", WANTED)})
        log_probs = outputs.logits.flatten(0, 1)[trained].float().log_softmax(-1)
        log_probs = log_probs.gather(-1, tokens[trained][:, None])[:, 0]
        unwanted = -torch.log1p(-log_probs.exp().clamp(max=1 - 1e-6))
        return torch.where(wanted, -log_probs, unwanted), log_probs.exp(), wanted, outputs

    def evaluation_sums(self, model, inputs):
        losses, probabilities, wanted, _ = self.token_losses(model, inputs)
        sums = [losses, torch.ones_like(losses), probabilities * wanted, wanted, probabilities * ~wanted, ~wanted]
        return torch.stack([values.double().sum() for values in sums])

    def evaluation_metrics(self, total):
        loss, tokens, wanted_sum, wanted, unwanted_sum, unwanted = total.tolist()
        metrics = {"loss": loss / tokens}
        metrics |= {"wanted_probability": wanted_sum / wanted} if wanted else {}
        return metrics | ({"unwanted_probability": unwanted_sum / unwanted} if unwanted else {})


def main() -> None:
    settings = recipe.parse(RECIPE)
    tokenizer = load_tokenizer(settings)
    train_set, eval_set = load_datasets(settings, tokenizer)
    check_data(settings, train_set, eval_set, tokenizer)
    training_args = recipe.start_processes(settings, train_set, eval_set)
    model = load_model(settings, tokenizer)
    recipe.open_run_folder(settings, train_set, eval_set)
    trainer = Trainer(settings, model, tokenizer, training_args, train_set, eval_set)
    with failures_reported(trainer):
        trainer.train(resume_from_checkpoint=settings.resume_from_checkpoint)
        save_final(trainer)
        write_result(trainer, evaluate(trainer))


if __name__ == "__main__":
    entrypoint.guard(main)
