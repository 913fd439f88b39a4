"""A custom technique: --freeze_layers N freezes the first N layers and the embedding."""

from dataclasses import dataclass, field

from zerofit import Recipe, Technique, entrypoint
from zerofit.base.errors import UserError
from zerofit.job.technique import AllBut, Conflict


@dataclass
class FreezeArguments:
    """Freezing."""

    freeze_layers: int = field(default=0, metadata={"help": "Number of first layers to freeze."})


def check(settings, config) -> None:
    layers = config.get_text_config().num_hidden_layers
    if not 0 <= settings.freeze_layers < layers:
        raise UserError(f"--freeze_layers {settings.freeze_layers}: must be 0 to {layers - 1} with this model.")


def freeze(settings, model) -> None:
    if settings.freeze_layers:
        for part in (model.get_input_embeddings(), *model.model.layers[: settings.freeze_layers]):
            part.requires_grad_(False)


FREEZE = Technique(
    name="frozen layers",
    flag="freeze_layers",
    values=AllBut(0),  # active with any other value
    example="--freeze_layers 1",
    arguments=FreezeArguments,
    conflicts=(Conflict("new_tokens", None, "their embeddings would stay untrained", "use only one of them"),),
    resolve_for_model=check,
    install=freeze,  # on every rank, and in the plan's simulated ones
)

RECIPE = Recipe("frozen", defaults={"learning_rate": 2e-5}, techniques=(FREEZE,))

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
