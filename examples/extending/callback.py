"""A custom callback: --stop_below X ends the training once the evaluation loss is below X."""

from dataclasses import dataclass, field

from zerofit import Recipe, entrypoint


@dataclass
class StopArguments:
    """Early stopping."""

    stop_below: float = field(default=0.0, metadata={"help": "Stop once eval_loss is below this value; 0: never."})


RECIPE = Recipe("until", arguments=(StopArguments,), defaults={"learning_rate": 2e-5})

if __name__ == "__main__":
    entrypoint.check_early(RECIPE)

from transformers import TrainerCallback

from zerofit import Trainer, recipe
from zerofit.certificate.data import check_data
from zerofit.data.load import load_datasets
from zerofit.model.load import load_model, load_tokenizer
from zerofit.train.run import evaluate, failures_reported, save_final, write_result


class StopBelow(TrainerCallback):
    def __init__(self, limit: float):
        self.limit = limit

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if metrics["eval_loss"] < self.limit:  # the same on every rank
            control.should_training_stop = True


def main() -> None:
    settings = recipe.parse(RECIPE)
    tokenizer = load_tokenizer(settings)
    train_set, eval_set = load_datasets(settings, tokenizer)
    check_data(settings, train_set, eval_set, tokenizer)
    training_args = recipe.start_processes(settings, train_set, eval_set)
    model = load_model(settings, tokenizer)
    recipe.open_run_folder(settings, train_set, eval_set)
    trainer = Trainer(settings, model, tokenizer, training_args, train_set, eval_set)
    trainer.add_callback(StopBelow(settings.stop_below))
    with failures_reported(trainer):
        trainer.train(resume_from_checkpoint=settings.resume_from_checkpoint)
        save_final(trainer)
        write_result(trainer, evaluate(trainer))


if __name__ == "__main__":
    entrypoint.guard(main)
