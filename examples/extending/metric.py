"""A custom metric: eval_token_accuracy, the share of trained tokens that are the model's top prediction."""

from zerofit import Recipe, entrypoint

RECIPE = Recipe("measured", defaults={"learning_rate": 2e-5}, score=("loss", "perplexity", "token_accuracy"))

if __name__ == "__main__":
    entrypoint.check_early(RECIPE)

import torch

from zerofit import Trainer, recipe
from zerofit.certificate.data import check_data
from zerofit.data.load import load_datasets
from zerofit.model.load import load_model, load_tokenizer
from zerofit.train.run import evaluate, failures_reported, save_final, write_result


class MeasuredTrainer(Trainer):
    def evaluation_sums(self, model, inputs):
        """Return the sums of a batch; they are added over all batches and ranks."""
        sums = super().evaluation_sums(model, inputs)
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
        labels = inputs["labels"][:, 1:]
        correct = ((logits.argmax(-1) == labels) & (labels != -100)).sum()
        return torch.cat([sums, correct[None].double()])

    def evaluation_metrics(self, total):
        """Return the metrics by name, without eval_. total: loss, trained tokens and correct tokens."""
        return super().evaluation_metrics(total) | {"token_accuracy": (total[2] / total[1]).item()}


def main() -> None:
    settings = recipe.parse(RECIPE)
    tokenizer = load_tokenizer(settings)
    train_set, eval_set = load_datasets(settings, tokenizer)
    check_data(settings, train_set, eval_set, tokenizer)
    training_args = recipe.start_processes(settings, train_set, eval_set)
    model = load_model(settings, tokenizer)
    recipe.open_run_folder(settings, train_set, eval_set)
    trainer = MeasuredTrainer(settings, model, tokenizer, training_args, train_set, eval_set)
    with failures_reported(trainer):
        trainer.train(resume_from_checkpoint=settings.resume_from_checkpoint)
        save_final(trainer)
        write_result(trainer, evaluate(trainer))


if __name__ == "__main__":
    entrypoint.guard(main)
