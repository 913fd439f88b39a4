"""Decide whether the towers of an image-text checkpoint are kept in memory (--towers), and freeze them."""

import re
from pathlib import Path

from zerofit.base.errors import UserError, first_line, without_line_breaks
from zerofit.job.settings import decide
from zerofit.job.technique import Technique
from zerofit.model import attention
from zerofit.model.image_text import classes, saved


def resolve_for_model(settings, config) -> None:
    """Decide --towers. Raises: UserError for towers that cannot be dropped, and for a class that does not take text."""
    if not classes.has_towers(config):
        if settings.towers != "auto":
            raise UserError(f"--towers {settings.towers}: {config.model_type} does not have towers; leave it out.")
        return
    if settings.parallel_size("matrices") > 1:
        raise UserError("--tp_size with an image-text model: DeepSpeed would split its towers too; use --zero 3.")
    place, requested = f"--model {settings.model}", settings.towers
    try:
        cls, towers, cannot, needed = classes.examined(config)
    except ImportError as error:  # a package for the towers is missing; the message has the install command
        raise UserError(f"{place}: {without_line_breaks(error)}.") from None
    except Exception as error:  # the model's code raises various errors for inconsistent values
        raise UserError(
            f"{place}: transformers cannot build the image-text model from its config.json ({config.model_type}): "
            f"{type(error).__name__}: {first_line(error)}"
        ) from None
    if getattr(config.get_text_config(), "cross_attention_layers", None):
        cannot = "its cross-attention layers read images only, so text would give their weights no gradient"
    if cannot:
        raise UserError(
            f"{place}: {cls.__name__} is an image-text model that cannot be trained on text: {cannot}; use a "
            "text-only checkpoint."
        )
    if requested == "drop" and (needed or settings.random_init):
        why = f"the class needs them for text too ({needed})" if needed else "--random_init creates them"
        raise UserError(f"--towers drop: {why}; use --towers keep.")
    if requested == "auto":
        why = f"text does not need {' and '.join(towers)}; they are copied from the base into saved models"
        if needed or settings.random_init:
            decide(settings, "towers", "keep", "text needs them too" if needed else "random_init creates them")
        else:
            decide(settings, "towers", "drop", why)
    if requested == "keep":
        settings.decisions.append(f"towers: {', '.join(towers)} are frozen and kept in memory (--towers keep)")


def model_class(settings, config) -> type:
    """Return the class to load: transformers' automatic class, or an image-text class for text."""
    if not classes.has_towers(config):
        return classes.auto_class(config)
    return classes.for_text(config, settings.towers == "drop")


def class_of_saved(config) -> type:
    """Return the class to compute a saved model's text with, without the towers if text does not need them."""
    if not classes.has_towers(config):
        return classes.auto_class(config)
    return classes.for_text(config, not classes.examined(config)[3])


def attention_for(settings, config) -> str | dict[str, str]:
    """Return --attn_implementation for a class: packed attention is for its language model, not for its towers."""
    chosen = settings.attn_implementation
    if chosen != attention.NAME or not classes.has_towers(config):
        return chosen
    text = config.get_text_config()
    named = {name: chosen for name in config.sub_configs if getattr(config, name, None) is text}
    return {"": chosen, **named} if named else chosen


def build(settings, config, **kwargs):
    """Return a model of the class with random weights, on torch's current device."""
    cls = model_class(settings, config)
    if classes.has_towers(config):
        return cls._from_config(config, **kwargs)
    return cls.from_config(config, trust_remote_code=settings.trust_remote_code, **kwargs)


def class_towers(cls: type) -> tuple[str, ...]:
    """Return the towers of an image-text class or of its model; () for other classes."""
    return getattr(cls, "towers", ())


def record_folder(model, config, folder: Path) -> None:
    """Record the folder that the model was loaded from, whose towers are copied into saved models.

    Under ZeRO-3 transformers would save with all of its name conversions, not only those used for loading.
    Args: config: the model's config.json.
    """
    if towers := class_towers(model):
        used, in_model = saved.conversions_of(classes.skeleton(config), saved.names_in(folder))
        model._weight_conversions, model.base_folder = used, folder
        model.tower_names = [name for name, (renamed, _) in in_model.items() if classes.holds(towers, renamed)]


def install(settings, model) -> None:
    """Freeze the towers that are in memory."""
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("base_model.model.")
        if classes.holds(class_towers(model), plain):
            parameter.requires_grad_(False)


def excluded(model, exclude_modules):
    """Return peft's exclude_modules with the towers: an expression that also fits the original class.

    Args: exclude_modules: the user's list of names, expression or None.
    """
    if not (towers := class_towers(model)):
        return exclude_modules
    patterns = [rf"({'|'.join(map(re.escape, towers))})(\..*)?"]
    if isinstance(exclude_modules, str):
        patterns.append(f"({exclude_modules})")
    elif exclude_modules:
        patterns.append(rf"(.*\.)?({'|'.join(map(re.escape, sorted(exclude_modules)))})")
    return "|".join(patterns)


TECHNIQUE = Technique(name="towers", resolve_for_model=resolve_for_model, install=install)
