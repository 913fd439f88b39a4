"""Train embeddings and the head at learning rates of their own (--embedding_learning_rate, --head_learning_rate)."""

from zerofit.base.errors import UserError
from zerofit.job.settings import json_value
from zerofit.job.technique import Conflict, Technique

FLAGS = ("embedding_learning_rate", "head_learning_rate")


def of_model(settings, model) -> dict[int, float]:
    """Return {id of a trained weight: its learning rate} of the embeddings and the head; {} without the flags.

    Raises: UserError where such a weight does not train, and for two rates of one tied weight.
    """
    modules = dict(zip(FLAGS, (model.get_input_embeddings(), model.get_output_embeddings()), strict=True))
    found: dict[int, float] = {}
    for flag, module in modules.items():
        if (rate := settings.values.get(flag)) is None:
            continue
        trained = [p for p in module.parameters() if p.requires_grad] if module is not None else []
        what = "embeddings" if flag == FLAGS[0] else "head"
        if not trained:
            raise UserError(
                f"--{flag}: the {what} do{'es' * (what == 'head')} not train in this job; leave it out, or add "
                f"--modules_to_save {'embed_tokens' if flag == FLAGS[0] else 'lm_head'} (or --new_tokens)."
            )
        if any(found.get(id(p), rate) != rate for p in trained):
            raise UserError(f"--{flag}: embeddings and head of this model are one tied weight; give one of the rates.")
        found |= {id(p): rate for p in trained}
    return found


def apply(optimizer, settings, model) -> None:
    """Move embeddings and head out of an optimizer's groups into groups with their own rates, before its first step."""
    if not (rates := of_model(settings, model) if any(settings.values.get(f) is not None for f in FLAGS) else {}):
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


def _install(settings, model) -> None:
    """Refuse flags for weights that do not train, before any are loaded onto a GPU."""
    if any(settings.values.get(flag) is not None for flag in FLAGS):
        of_model(settings, model)


_OF_STAGES = Conflict("pp_size", None, "the stages of a pipeline have groups of their own", "leave it out")

TECHNIQUES = (
    Technique(
        name="a rate of the embeddings",
        flag=FLAGS[0],
        example="--embedding_learning_rate 1e-5",
        conflicts=(_OF_STAGES,),
        resolve=_resolve,
    ),
    Technique(
        name="a rate of the head",
        flag=FLAGS[1],
        example="--head_learning_rate 1e-5",
        conflicts=(_OF_STAGES,),
        install=_install,
    ),
)
