"""A custom loss: the focal loss (arXiv 1708.02002), which reduces the weight of tokens that the model predicts well."""

from dataclasses import dataclass, field

from zerofit import Recipe, entrypoint


@dataclass
class FocalArguments:
    """Focal loss."""

    focal_gamma: float = field(default=2.0, metadata={"help": "Weight tokens by (1 - probability)^gamma; 0: equally."})


RECIPE = Recipe("focal", arguments=(FocalArguments,), defaults={"learning_rate": 2e-5}, score=("loss",))

if __name__ == "__main__":
    entrypoint.check_early(RECIPE)

import torch

from zerofit import Trainer, recipe
from zerofit.certificate.data import check_data
from zerofit.data.load import load_datasets
from zerofit.model.load import load_model, load_tokenizer
from zerofit.train.run import evaluate, failures_reported, save_final, write_result


class FocalTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the loss; num_items_in_batch: trained tokens of the step on all ranks, None in an evaluation."""
        labels = inputs["labels"][:, 1:]
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        trained = labels != -100
        log_probs = torch.log_softmax(outputs.logits[:, :-1][trained].float(), -1)
        log_probs = log_probs.gather(-1, labels[trained].unsqueeze(-1)).squeeze(-1)
        total = -((1 - log_probs.exp()) ** self.settings.focal_gamma * log_probs).sum()
        # Gradients are averaged over the ranks that num_items_in_batch covers.
        tokens = trained.sum() if num_items_in_batch is None else num_items_in_batch / self.loss_world_size
        loss = total / tokens
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    settings = recipe.parse(RECIPE)
    tokenizer = load_tokenizer(settings)
    train_set, eval_set = load_datasets(settings, tokenizer)
    check_data(settings, train_set, eval_set, tokenizer)
    training_args = recipe.start_processes(settings, train_set, eval_set)
    model = load_model(settings, tokenizer)
    recipe.open_run_folder(settings, train_set, eval_set)
    trainer = FocalTrainer(settings, model, tokenizer, training_args, train_set, eval_set)
    with failures_reported(trainer):
        trainer.train(resume_from_checkpoint=settings.resume_from_checkpoint)
        save_final(trainer)
        write_result(trainer, evaluate(trainer))


if __name__ == "__main__":
    entrypoint.guard(main)
