"""Combine techniques on one command line, and say whether the kit accepts them."""

from dataclasses import fields

from zerofit.base.errors import UserError
from zerofit.commands import compatible
from zerofit.config import arguments, resolve
from zerofit.job.technique import Technique

STAGES = ("0", "2", "3")  # stage 1 combines with the same techniques as stage 2

TECHNIQUES = {technique.name: technique for technique in compatible.shown()}

OF_LORA = {field.name for field in fields(arguments.LoraArguments)}


def contained(technique: Technique) -> list[Technique]:
    """Return the techniques that the technique's example turns on."""
    parts = {" ".join(part.split()) for part in technique.example.split("--")[1:]}
    return [one for one in TECHNIQUES.values() if {" ".join(p.split()) for p in one.example.split("--")[1:]} <= parts]


def flags(techniques: tuple[Technique, ...], zero: str) -> tuple[str, list[str]] | None:
    """(recipe, command line) of these techniques together; None where they say different things in one flag."""
    words: dict[str, list[str]] = {"--zero": [zero]}
    for technique in techniques:
        for part in technique.example.split("--")[1:]:
            name, *values = part.split()
            if words.setdefault(f"--{name}", values) != values:
                return None
    given = {word[2:] for word in words}
    # New tokens go with LoRA too, but not beside the two that choose among all weights.
    takes_adapter = given & OF_LORA or ("new_tokens" in given and not given & {"freeze", "train_only"})
    recipe = "dpo" if "loss_type" in given else "lora" if takes_adapter else "sft"
    if recipe == "dpo" and takes_adapter:
        words.setdefault("--adapter", ["lora"])
    return recipe, [word for name, values in words.items() for word in (name, *values)]


def verdict(techniques: tuple[Technique, ...], zero: str, base: list[str], ranks: int = 1) -> str:
    """ "" where the kit accepts them together, "-" where they exclude each other by name, else its sentence.

    Args: base: what every command line has (data, steps).
    """
    found = flags(techniques, zero)
    if found is None:
        return "-"
    recipe, words = found
    try:
        resolve.resolve_settings(recipe, [*base, *words], ranks)
    except UserError as error:
        return str(error)
    return ""
