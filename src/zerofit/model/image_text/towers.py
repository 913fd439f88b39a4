"""Decide whether the towers of an image-text checkpoint are in memory (--towers); freeze them there."""

import re
from pathlib import Path

from zerofit.base.errors import UserError, first_line, in_one_line
from zerofit.job.settings import decide
from zerofit.job.technique import Technique
from zerofit.model import attention
from zerofit.model.image_text import classes, saved


def resolve_for_model(settings, config) -> None:
    """Decide --towers. Raises: UserError for towers that cannot be left out, and for a class that takes no text."""
    if not classes.has_towers(config):
        if settings.towers != "auto":
            raise UserError(f"--towers {settings.towers}: {config.model_type} has no towers; leave it out.")
        return
    if settings.ranks_that_split("matrices") > 1:
        raise UserError("--tp_size with an image-text model: DeepSpeed would split its towers too; use --zero 3.")
    place, asked = f"--model {settings.model}", settings.towers
    try:
        cls, towers, cannot, needed = classes.examined(config)
    except ImportError as error:  # of a package for its towers, whose install line it has
        raise UserError(f"{place}: {in_one_line(error)}.") from None
    except Exception as error:  # of any class: what a model's own code does with values that do not fit each other
        raise UserError(
            f"{place}: transformers cannot build the image-text model of its config.json ({config.model_type}): "
            f"{type(error).__name__}: {first_line(error)}"
        ) from None
    if getattr(config.get_text_config(), "cross_attention_layers", None):
        cannot = "its cross-attention layers read images only, so text would give their weights no gradient"
    if cannot:
        raise UserError(
            f"{place}: {cls.__name__} is an image-text model that cannot be trained on text: {cannot}; name a "
            "text-only checkpoint."
        )
    if asked == "drop" and (needed or settings.random_init):
        why = f"its class needs them for text too ({needed})" if needed else "no file has those of --random_init"
        raise UserError(f"--towers drop: {why}; use --towers keep.")
    if asked == "auto":
        why = f"text needs {' and '.join(towers)} for nothing; saved models have them as the base has"
        if needed or settings.random_init:
            decide(settings, "towers", "keep", "text goes through them too" if needed else "random_init makes them")
        else:
            decide(settings, "towers", "drop", why)
    if asked == "keep":
        settings.decisions.append(f"towers: {', '.join(towers)} are frozen, and in memory by --towers keep")


def model_class(settings, config) -> type:
    """Return the class to load: transformers' automatic one, or an image-text class for text."""
    if not classes.has_towers(config):
        return classes.auto_class(config)
    return classes.for_text(config, settings.towers == "drop")


def class_of_saved(config) -> type:
    """Return the class to compute a saved model's text with: without the towers, if text needs none."""
    if not classes.has_towers(config):
        return classes.auto_class(config)
    return classes.for_text(config, not classes.examined(config)[3])


def attention_of(settings, config) -> str | dict[str, str]:
    """Return --attn_implementation for a class: that of packed rows is for its language model, not for its towers."""
    chosen = settings.attn_implementation
    if chosen != attention.NAME or not classes.has_towers(config):
        return chosen
    text = config.get_text_config()
    named = {name: chosen for name in config.sub_configs if getattr(config, name, None) is text}
    return {"": chosen, **named} if named else chosen


def build(settings, config, **kwargs):
    """Return a model of the class with random weights, on torch's device of the moment."""
    cls = model_class(settings, config)
    if classes.has_towers(config):
        return cls._from_config(config, **kwargs)
    return cls.from_config(config, trust_remote_code=settings.trust_remote_code, **kwargs)


def of_class(cls: type) -> tuple[str, ...]:
    """Return the towers of an image-text class, or of a model of it; () of any other."""
    return getattr(cls, "towers", ())


def loaded(model, config, folder: Path) -> None:
    """Remember the folder that the model was loaded from: saved models get the towers in its files.

    Under ZeRO-3 transformers saves by all conversions of names that it knows: here by those that were used.
    Args: config: of config.json.
    """
    if towers := of_class(model):
        used, found = saved.conversions_of(classes.skeleton(config), saved.names_in(folder))
        model._weight_conversions, model.base_folder = used, folder
        model.of_towers = [name for name, (renamed, _) in found.items() if classes.holds(towers, renamed)]


def install(settings, model) -> None:
    """Freeze the towers that are in memory."""
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("base_model.model.")
        if classes.holds(of_class(model), plain):
            parameter.requires_grad_(False)


def excluded(model, given):
    """Return peft's exclude_modules with the towers: an expression for the adapter's place in the original class.

    Args: given: the user's, a list of names, an expression or None.
    """
    if not (towers := of_class(model)):
        return given
    patterns = [rf"({'|'.join(map(re.escape, towers))})(\..*)?"]
    if isinstance(given, str):
        patterns.append(f"({given})")
    elif given:
        patterns.append(rf"(.*\.)?({'|'.join(map(re.escape, sorted(given)))})")
    return "|".join(patterns)


TECHNIQUE = Technique(name="towers", resolve_for_model=resolve_for_model, install=install)
