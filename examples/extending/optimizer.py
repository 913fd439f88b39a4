"""A custom optimizer: Signum (arXiv 1802.04434), the sign of the momentum, with 4 bytes of state per parameter."""

from zerofit import OptimizerSpec, Recipe, entrypoint


def signum(groups: list[dict], learning_rate: float):
    """Return the optimizer; its update is element-wise, so ZeRO can pass flat slices."""
    import torch  # not at the top: the launcher reads RECIPE without torch

    class Signum(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in (p for p in group["params"] if p.grad is not None):
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 0.1)
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(momentum.sign(), alpha=group["lr"])

    return Signum(groups, {"lr": learning_rate, "weight_decay": 0.0})


RECIPE = Recipe(
    "signum",
    defaults={"learning_rate": 1e-4, "optim": "signum"},
    optimizers={"signum": OptimizerSpec("4", offload=False, why_not="it does not have a CPU step", build=signum)},
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
