"""Train only some weights by name (--freeze, --train_only), with patterns as PEFT's target_modules has them."""

import difflib
import re

from zerofit.base.errors import UserError
from zerofit.job.technique import AllBut, Conflict, Technique

FLAGS = ("freeze", "train_only")


def install(settings, model) -> None:
    """Freeze the weights that do not train. Raises: UserError for a pattern without a weight, and for no weight left.

    A tied weight has several names and is one weight: it trains if one of its names does.
    """
    for flag in FLAGS:
        if patterns := settings.values.get(flag):
            matched = _matched(flag, patterns, model)
            for weight in {id(w): w for _, w in model.named_parameters()}.values():
                if (id(weight) in matched) == (flag == "freeze"):
                    weight.requires_grad = False
    if any(settings.values.get(flag) for flag in FLAGS) and not any(p.requires_grad for p in model.parameters()):
        raise UserError("--freeze: no weight is left to train; freeze fewer.")


def _matched(flag: str, patterns: list[str], model) -> set[int]:
    """Return the ids of the weights of the modules, or of the names, that the patterns match."""
    names = {name: id(weight) for name, weight in model.named_parameters(remove_duplicate=False)}
    found: set[int] = set()
    for pattern in patterns:
        own = {key for name, key in names.items() if _matches(pattern, name)}
        if not own:
            modules = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
            close = difflib.get_close_matches(pattern, modules, 3) or modules[:8]
            raise UserError(f"--{flag} {pattern}: the model has no weight of that name; it has {', '.join(close)}.")
        found |= own
    return found


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern names a weight or a module around it: its last names, or a regular expression of all."""
    parts = name.split(".")
    around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    try:
        by_expression = any(re.fullmatch(pattern, one) for one in around)
    except re.error:
        by_expression = False
    return by_expression or any(one == pattern or one.endswith(f".{pattern}") for one in around)


# Flags of adapters, with their values that ask for something.
_OF_ADAPTERS = {
    "adapter": AllBut(), "use_dora": (True,), "use_rslora": (True,), "loraplus_lr_ratio": AllBut(),
    "init_lora_weights": AllBut("true"), "load_in_4bit": (True,), "load_in_8bit": (True,),
}  # fmt: skip

_NO_ADAPTERS = tuple(
    Conflict(
        name,
        values,
        "an adapter's base is frozen, and --lora_target_modules names what is adapted",
        "leave it out, or use recipes/sft.py",
    )
    for name, values in _OF_ADAPTERS.items()
)


def _technique(flag: str, *others: Conflict) -> Technique:
    stages = Conflict(
        "pp_size", AllBut(1), "the stages of a pipeline are cut by the weights that train", "leave it out"
    )  # fmt: skip
    conflicts = (*_NO_ADAPTERS, stages, *others)
    return Technique(name=f"--{flag}", flag=flag, example=f"--{flag} embed_tokens", conflicts=conflicts)


TECHNIQUES = (
    _technique("freeze", Conflict("train_only", AllBut(), "one says what the other leaves", "use one of the two")),
    _technique("train_only"),
    Technique(name="frozen weights", install=install),
)
