"""Train only some weights by name (--freeze, --train_only), with patterns like PEFT's target_modules."""

import difflib
import re

from zerofit.base.errors import UserError
from zerofit.job.technique import AllBut, Conflict, Technique

FLAGS = ("freeze", "train_only")


def install(settings, model) -> None:
    """Freeze the weights that do not train. A tied weight trains if any of its names does.

    Raises: UserError for a pattern that matches no weight, or if no weight is left to train.
    """
    for flag in FLAGS:
        if patterns := settings.values.get(flag):
            matched = _matched(flag, patterns, model)
            for weight in {id(w): w for _, w in model.named_parameters()}.values():
                if (id(weight) in matched) == (flag == "freeze"):
                    weight.requires_grad = False
    if any(settings.values.get(flag) for flag in FLAGS) and not any(p.requires_grad for p in model.parameters()):
        raise UserError("--freeze: no weight is left to train; freeze fewer weights.")


def _matched(flag: str, patterns: list[str], model) -> set[int]:
    """Return the ids of the weights that the patterns match by name or by module."""
    names = {name: id(weight) for name, weight in model.named_parameters(remove_duplicate=False)}
    matched: set[int] = set()
    for pattern in patterns:
        matches = {key for name, key in names.items() if _matches(pattern, name)}
        if not matches:
            modules = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
            close = difflib.get_close_matches(pattern, modules, 3) or modules[:8]
            raise UserError(f"--{flag} {pattern}: it matches no weight; the model has {', '.join(close)}.")
        matched |= matches
    return matched


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a weight or a module around it, by the end of its path or as an expression."""
    parts = name.split(".")
    paths = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    try:
        by_expression = any(re.fullmatch(pattern, path) for path in paths)
    except re.error:
        by_expression = False
    return by_expression or any(path == pattern or path.endswith(f".{pattern}") for path in paths)


# Flags of adapters, with the values that conflict.
_ADAPTER_FLAGS = {
    "adapter": AllBut(), "use_dora": (True,), "use_rslora": (True,), "loraplus_lr_ratio": AllBut(),
    "init_lora_weights": AllBut("true"), "load_in_4bit": (True,), "load_in_8bit": (True,),
}  # fmt: skip

_NO_ADAPTERS = tuple(
    Conflict(
        name,
        values,
        "an adapter's base is already frozen, and --lora_target_modules selects the adapted modules",
        "leave it out, or use recipes/sft.py",
    )
    for name, values in _ADAPTER_FLAGS.items()
)


def _technique(flag: str, *others: Conflict) -> Technique:
    stages = Conflict(
        "pp_size", AllBut(1), "pipeline stages are split by the number of trained weights", "leave it out"
    )  # fmt: skip
    conflicts = (*_NO_ADAPTERS, stages, *others)
    return Technique(name=f"--{flag}", flag=flag, example=f"--{flag} embed_tokens", conflicts=conflicts)


TECHNIQUES = (
    _technique("freeze", Conflict("train_only", AllBut(), "each implies the other", "use one of the two")),
    _technique("train_only"),
    Technique(name="frozen weights", install=install),
)
