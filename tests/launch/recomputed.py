"""A technique in one file, with a flag, a self-test and bytes that the plan counts: recomputed MLPs."""

from dataclasses import dataclass, field

from zerofit import Recipe, Technique, entrypoint


@dataclass
class RecomputedArguments:
    """Recomputed MLPs."""

    recomputed: bool = field(default=False, metadata={"help": "Compute MLPs again in the backward."})
    wrong: float = field(default=0.0, metadata={"help": "Error of the MLPs, for tests."})


def _recomputed(settings, function):
    """Return the function, which keeps its input alone for its backward."""
    from torch.utils.checkpoint import checkpoint

    return lambda x: checkpoint(function, x, use_reentrant=False) + settings.wrong


def compare(settings, config) -> None:
    """Compare a recomputed MLP with the same one as it is, on each rank's device."""
    import torch

    from zerofit.base.errors import UserError
    from zerofit.model import self_test

    def problem():
        x = torch.linspace(-4, 4, 64, device="cpu" if settings.use_cpu else "cuda", requires_grad=True)
        theirs = torch.nn.functional.silu
        outputs = [function(x) for function in (_recomputed(settings, theirs), theirs)]
        gradients = [torch.autograd.grad(y.sum(), x)[0] for y in outputs]
        error = max((ours - as_is).abs().max().item() for ours, as_is in (outputs, gradients))
        return f"it is {error:.1e} off torch's" if error > 1e-6 else None

    if settings.recomputed:
        if why := self_test.run(problem, "--recomputed", "leave it out"):
            raise UserError(f"--recomputed: {why}; leave it out.")
        settings.decisions.append("recomputed: MLPs compute here what they do without it")


def install(settings, model) -> None:
    for layer in model.model.layers if settings.recomputed else ():
        layer.mlp.forward = _recomputed(settings, layer.mlp.forward)


RECIPE = Recipe(
    "recomputed",
    defaults={"learning_rate": 2e-5, "gradient_checkpointing": False},
    techniques=(
        Technique(
            name="recomputed MLPs",
            flag="recomputed",
            example="--recomputed true",
            arguments=RecomputedArguments,
            self_test=compare,
            install=install,
        ),
    ),
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
