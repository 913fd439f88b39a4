"""Format `--help` (the flags that most runs need) and `--help all` (every flag)."""

import textwrap
from dataclasses import MISSING, Field, fields
from typing import Literal, get_args, get_origin

from zerofit.config import arguments, transformers_flags
from zerofit.job import program
from zerofit.job.recipe import Recipe
from zerofit.job.settings import written

# Heading -> flags of the short help, before those of the recipe.
COMMON = {
    "model and data": "model data eval_data eval_fraction columns chat_template train_on max_length packing",
    "training": "num_train_epochs max_steps learning_rate effective_batch_size per_device_train_batch_size seed",
    "memory": "zero offload gradient_checkpointing preset plan",
    "run": "config output_dir resume_from_checkpoint save_steps report_to show",
}

# Help of transformers' flags in COMMON, with zerofit's defaults.
OF_TRANSFORMERS = {
    "num_train_epochs": "Passes over the training rows (default 3).",
    "max_steps": "Optimizer steps, instead of epochs.",
    "learning_rate": "The highest of the schedule (default {}; cosine with 3 % warm-up).",
    "gradient_accumulation_steps": "Micro batches of a step; a pipeline fills up with them (default: derived).",
    "per_device_train_batch_size": "Samples of a rank at once (micro batch); auto: the most that fit (default: up to "
    "8; a start on GPUs: the fastest that fits).",
    "seed": "Of the row order and of new weights (default 42).",
    "gradient_checkpointing": "Recompute activations in the backward: less memory, about a third more time (default "
    "true; a start on GPUs: as far as needed).",
    "output_dir": "The run folder (default runs/<recipe>-<time>).",
    "resume_from_checkpoint": "A checkpoint folder, or auto: the newest good one of --output_dir.",
    "save_steps": "Steps between checkpoints (default: each epoch).",
    "report_to": "wandb, tensorboard, trackio, mlflow ... (default none).",
}

TRANSFORMERS_DEFAULT = {"learning_rate": 5e-5}  # of a recipe that names none

INDENT, WIDTH = 34, 120


def text(recipe: Recipe | str, whole: bool = False) -> str:
    """Return the help text of a recipe; whole: every flag instead of those in COMMON."""
    recipe = program.recipe_of(recipe)
    file = program.shown(recipe)
    groups = {arguments.title_of(group): fields(group) for group in arguments.kit_groups(recipe)}
    if whole:
        from transformers import TrainingArguments

        groups["transformers' TrainingArguments"] = [
            f for f in fields(TrainingArguments) if f.init and f.name not in transformers_flags.REFUSED
        ]
        end = "The command line wins over --config, that over the defaults."
    else:
        kit = {field.name: field for group in groups.values() for field in group}
        named = {title: names.split() for title, names in COMMON.items()}
        if own := recipe.common or recipe.own_arguments:
            named[recipe.name] = own
        groups = {title: [kit.get(name, name) for name in names] for title, names in named.items()}
        end = f"All flags, transformers' TrainingArguments among them: python {file} --help all"
    lines = [f'usage: {file} [--flag value ...]      ({program.make(recipe)} ARGS="--flag value ...")']
    for title, members in groups.items():
        lines += ["", f"{title}:", *(_entry(member, recipe) for member in members)]
    return "\n".join([*lines, "", end])


def _entry(field: Field | str, recipe: Recipe) -> str:
    """Return the help lines of one flag: a field of the arguments, or a name in OF_TRANSFORMERS."""
    if isinstance(field, str):
        default = recipe.defaults.get(field, TRANSFORMERS_DEFAULT.get(field))
        flag, description = f"  --{field}", OF_TRANSFORMERS[field].format(default)
    else:
        choices = get_args(field.type) if get_origin(field.type) is Literal else ()
        flag = f"  --{field.name} {'|'.join(written(field.name, choice) for choice in choices)}".rstrip()
        description = " ".join(str(field.metadata.get("help", "")).split()) + _default(field, recipe)
    body = textwrap.wrap(description, WIDTH - INDENT, break_on_hyphens=False)
    if len(flag) > INDENT - 2:
        body.insert(0, "")
    return "\n".join(
        [f"{flag:<{INDENT}}{body[0] if body else ''}".rstrip(), *(" " * INDENT + line for line in body[1:])]
    )


def _default(field: Field, recipe: Recipe) -> str:
    """Return " (default X)"; "" without a default, or where the help text names it."""
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    default = {**arguments.SHARED_DEFAULTS, **recipe.defaults}.get(field.name, default)
    if default in (None, "", MISSING) or "efault" in field.metadata.get("help", ""):
        return ""
    default = " ".join(map(str, default)) if isinstance(default, list) else getattr(default, "value", default)
    return f" (default {str(default).lower() if isinstance(default, bool) else default})"
