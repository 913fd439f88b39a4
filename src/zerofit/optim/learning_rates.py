"""Train embeddings and the head at learning rates of their own (--embedding_learning_rate, --head_learning_rate)."""

from zerofit.base.errors import UserError
from zerofit.job.settings import json_value
from zerofit.job.technique import Conflict, Technique

FLAGS = ("embedding_learning_rate", "head_learning_rate")


# Flag: transformers' method that returns the module, what it is called in sentences, and its usual name.
MODULES = {
    FLAGS[0]: ("get_input_embeddings", "the embeddings do", "embed_tokens"),
    FLAGS[1]: ("get_output_embeddings", "the head does", "lm_head"),
}


def of_model(settings, model) -> dict[int, float]:
    """Return {id of a trained weight: its learning rate} of the embeddings and the head; {} without the flags.

    Raises: UserError where such a weight does not train, and for two rates of one tied weight.
    """
    found: dict[int, float] = {}
    for flag, (method, what, name) in MODULES.items():
        if (rate := settings.values.get(flag)) is None:
            continue
        module = getattr(model, method)()
        trained = [p for p in module.parameters() if p.requires_grad] if module is not None else []
        if not trained:
            raise UserError(
                f"--{flag}: {what} not train in this job; leave it out, or add --modules_to_save {name} "
                "(or --new_tokens)."
            )
        if any(found.get(id(p), rate) != rate for p in trained):
            raise UserError(f"--{flag}: embeddings and head of this model are one tied weight; give one of the rates.")
        found |= {id(p): rate for p in trained}
    return found


def apply(optimizer, settings, model) -> None:
    """Move embeddings and head out of an optimizer's groups into groups with their own rates, before its first step."""
    if not (rates := of_model(settings, model)):
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
    """Refuse the flags beside an optimizer of a DeepSpeed JSON, which DeepSpeed builds. Raises: UserError."""
    own = json_value(settings.deepspeed or {}, "optimizer.type")
    for flag in FLAGS if own else ():
        if settings.values.get(flag) is not None:
            raise UserError(f"--{flag} with the optimizer {own} of the DeepSpeed JSON: leave one of the two out.")


def _technique(flag: str, name: str) -> Technique:
    stages = Conflict("pp_size", None, "the stages of a pipeline have groups of their own", "leave it out")
    return Technique(name=name, flag=flag, example=f"--{flag} 1e-5", conflicts=(stages,))


TECHNIQUES = (
    _technique(FLAGS[0], "a rate of the embeddings"),
    _technique(FLAGS[1], "a rate of the head"),
    # of_model refuses weights that do not train, before the optimizer is made
    Technique(name="own learning rates", resolve=_resolve, install=of_model),
)
