"""A custom data format: rows {"dialog": [text, text, ...]} with alternating user and assistant turns."""

from zerofit import Format, Recipe, entrypoint
from zerofit.data.conversations import string, turns_of


def dialog(place: str, row: dict):
    """Return the conversation of a row; errors begin with `place`, its file and line."""
    texts = [string(place, "dialog", text) for text in row["dialog"]]
    roles = ("user", "assistant")
    return turns_of(place, [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], row)


RECIPE = Recipe(
    "dialogs",
    defaults={"learning_rate": 2e-5},
    formats=(Format("dialog", columns=("dialog",), read=dialog, optional=("system",)),),
)

if __name__ == "__main__":
    entrypoint.check_early(RECIPE)

from zerofit import Trainer, recipe
from zerofit.certificate.data import check_data
from zerofit.data.load import load_datasets
from zerofit.model.load import load_model, load_tokenizer
from zerofit.train.run import evaluate, failures_reported, save_final, write_result


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
