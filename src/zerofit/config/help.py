"""Format `--help` (the flags that most runs need) and `--help all` (every flag)."""

import textwrap
from dataclasses import MISSING, Field, fields
from typing import Literal, get_args, get_origin

from zerofit.config import arguments, transformers_flags
from zerofit.job import program
from zerofit.job.recipe import Recipe
from zerofit.job.settings import written

# Heading -> flags of the short help, listed before the recipe's.
COMMON = {
    "model and data": "model data eval_data eval_fraction columns chat_template train_on max_length packing",
    "training": "num_train_epochs max_steps learning_rate effective_batch_size per_device_train_batch_size seed",
    "memory": "zero offload gradient_checkpointing preset plan",
    "run": "config output_dir resume_from_checkpoint save_steps report_to show",
}

# Help texts of transformers' flags in COMMON, with zerofit's defaults.
TRANSFORMERS_HELP = {
    "num_train_epochs": "Passes over the training rows (default 3).",
    "max_steps": "Optimizer steps, instead of epochs.",
    "learning_rate": "Peak learning rate (default {}; cosine schedule with 3 % warm-up).",
    "gradient_accumulation_steps": "Micro batches per step; a pipeline needs several (default: derived).",
    "per_device_train_batch_size": "Micro batch: samples per rank and forward; auto: the most that fit (default: up "
    "to 8; planned starts on GPUs: the fastest that fits).",
    "seed": "Seed of the row order and of new weights (default 42).",
    "gradient_checkpointing": "Recompute activations in the backward: less memory, about a third more time "
    "(default true; planned starts on GPUs: only if needed).",
    "output_dir": "Run folder (default runs/<recipe>-<time>).",
    "resume_from_checkpoint": "Checkpoint folder, or auto: the newest valid checkpoint of --output_dir.",
    "save_steps": "Steps between checkpoints (default: each epoch).",
    "report_to": "wandb, tensorboard, trackio, mlflow ... (default none).",
}

TRANSFORMERS_DEFAULT = {"learning_rate": 5e-5}  # for recipes without a default

INDENT, WIDTH = 34, 120


def text(recipe: Recipe | str, every_flag: bool = False) -> str:
    """Return the help text of a recipe. Args: every_flag: list all flags instead of COMMON."""
    recipe = program.recipe_of(recipe)
    file = program.display_path(recipe)
    groups = {arguments.title_of(group): fields(group) for group in arguments.kit_groups(recipe)}
    if every_flag:
        from transformers import TrainingArguments

        groups["transformers' TrainingArguments"] = [
            f for f in fields(TrainingArguments) if f.init and f.name not in transformers_flags.REFUSED
        ]
        end = "The command line overrides --config, which overrides the defaults."
    else:
        kit = {field.name: field for group in groups.values() for field in group}
        named = {title: names.split() for title, names in COMMON.items()}
        if recipe_flags := recipe.common or recipe.own_arguments:
            named[recipe.name] = recipe_flags
        groups = {title: [kit.get(name, name) for name in names] for title, names in named.items()}
        end = f"All flags, including transformers' TrainingArguments: python {file} --help all"
    lines = [f'usage: {file} [--flag value ...]      ({program.make_command(recipe)} ARGS="--flag value ...")']
    for title, members in groups.items():
        lines += ["", f"{title}:", *(_entry(member, recipe) for member in members)]
    return "\n".join([*lines, "", end])


def _entry(field: Field | str, recipe: Recipe) -> str:
    """Return the help lines of one flag: a dataclass field, or a name in TRANSFORMERS_HELP."""
    if isinstance(field, str):
        default = recipe.defaults.get(field, TRANSFORMERS_DEFAULT.get(field))
        flag, description = f"  --{field}", TRANSFORMERS_HELP[field].format(default)
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
    """Return " (default X)", or "" without a default or if the help text names it."""
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    default = {**arguments.SHARED_DEFAULTS, **recipe.defaults}.get(field.name, default)
    if default in (None, "", MISSING) or "efault" in field.metadata.get("help", ""):
        return ""
    default = " ".join(map(str, default)) if isinstance(default, list) else getattr(default, "value", default)
    return f" (default {str(default).lower() if isinstance(default, bool) else default})"
