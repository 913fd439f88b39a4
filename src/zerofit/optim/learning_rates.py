"""Train embeddings and head at separate learning rates (--embedding_learning_rate, --head_learning_rate)."""

from zerofit.base.errors import UserError
from zerofit.job.settings import json_value
from zerofit.job.technique import Conflict, Technique

FLAGS = ("embedding_learning_rate", "head_learning_rate")


# Flag: transformers' method that returns the module, its name in messages, and its usual module name.
MODULES = {
    FLAGS[0]: ("get_input_embeddings", "the embeddings do", "embed_tokens"),
    FLAGS[1]: ("get_output_embeddings", "the head does", "lm_head"),
}


def rates_for(settings, model) -> dict[int, float]:
    """Return {id of a trained weight: its learning rate} for embeddings and head; {} without the flags.

    Raises: UserError if such a weight does not train, or for two rates of one tied weight.
    """
    rates: dict[int, float] = {}
    for flag, (method, subject, name) in MODULES.items():
        if (rate := settings.values.get(flag)) is None:
            continue
        module = getattr(model, method)()
        trained = [p for p in module.parameters() if p.requires_grad] if module is not None else []
        if not trained:
            raise UserError(
                f"--{flag}: {subject} not train in this job; leave it out, or add --modules_to_save {name} "
                "(or --new_tokens)."
            )
        if any(rates.get(id(p), rate) != rate for p in trained):
            raise UserError(f"--{flag}: embeddings and head of this model are tied; set only one of the rates.")
        rates |= {id(p): rate for p in trained}
    return rates


def apply(optimizer, settings, model) -> None:
    """Move embeddings and head into separate optimizer groups with their rates, before the first step."""
    if not (rates := rates_for(settings, model)):
        return
    groups = []
    for group in optimizer.param_groups:
        by_rate: dict[float | None, list] = {}
        for p in group["params"]:
            by_rate.setdefault(rates.get(id(p)), []).append(p)
        for rate, params in by_rate.items():
            groups.append({**group, "params": params, **({} if rate is None else {"lr": rate})})
    optimizer.param_groups[:] = groups


def _resolve(settings) -> None:
    """Refuse the flags with an optimizer of a DeepSpeed JSON, which DeepSpeed builds. Raises: UserError."""
    name = json_value(settings.deepspeed or {}, "optimizer.type")
    for flag in FLAGS if name else ():
        if settings.values.get(flag) is not None:
            raise UserError(f"--{flag} with the optimizer {name} of the DeepSpeed JSON: leave one of the two out.")


def _technique(flag: str, name: str) -> Technique:
    stages = Conflict("pp_size", None, "the stages of a pipeline build separate parameter groups", "leave it out")
    return Technique(name=name, flag=flag, example=f"--{flag} 1e-5", conflicts=(stages,))


TECHNIQUES = (
    _technique(FLAGS[0], "embedding learning rate"),
    _technique(FLAGS[1], "head learning rate"),
    # rates_for refuses weights that do not train, before the optimizer is built
    Technique(name="separate learning rates", resolve=_resolve, install=rates_for),
)
