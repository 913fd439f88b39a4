"""A recipe with a name, a loss and a flag of its own: for test_own_recipe.py, as docs/extending.md shows it."""

from dataclasses import dataclass, field

from zerofit import Recipe, entrypoint


@dataclass
class LossArguments:
    """Scaled loss."""

    loss_factor: float = field(default=2.0, metadata={"help": "The loss is multiplied by it."})


RECIPE = Recipe("scaled", arguments=(LossArguments,), defaults={"learning_rate": 1e-3}, score=("loss",))

if __name__ == "__main__":
    entrypoint.check_early(RECIPE)

from zerofit import recipe
from zerofit.certificate.data import check_data
from zerofit.data.load import load_datasets
from zerofit.model.load import load_model, load_tokenizer
from zerofit.train.run import evaluate, failures_reported, save_final, write_result
from zerofit.train.trainer import ZerofitTrainer


class ScaledTrainer(ZerofitTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = self.settings.loss_factor * loss
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    settings = recipe.parse(RECIPE)
    tokenizer = load_tokenizer(settings)
    train_set, eval_set = load_datasets(settings, tokenizer)
    check_data(settings, train_set, eval_set, tokenizer)
    training_args = recipe.start_processes(settings, train_set, eval_set)
    model = load_model(settings, tokenizer)
    recipe.open_run_folder(settings, train_set, eval_set)
    trainer = ScaledTrainer(settings, model, tokenizer, training_args, train_set, eval_set)
    with failures_reported(trainer):
        trainer.train(resume_from_checkpoint=settings.resume_from_checkpoint)
        save_final(trainer)
        write_result(trainer, evaluate(trainer))


if __name__ == "__main__":
    entrypoint.guard(main)
