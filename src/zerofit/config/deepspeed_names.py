"""Read the older and the second names of a DeepSpeed JSON as what they are; refuse what the installed one lacks."""

import importlib.util
import inspect
from pathlib import Path

import torch

from zerofit.base.errors import UserError
from zerofit.job.settings import json_value, merge_json

ZERO = "zero_optimization"

_TO_CPU = {"device": "cpu"}

# Older key of zero_optimization -> (the section that says it today, what is in it where the value is true).
OLDER = {
    "cpu_offload": {"offload_optimizer": _TO_CPU},
    "cpu_offload_param": {"offload_param": _TO_CPU},
    "cpu_offload_params": {"offload_param": _TO_CPU},  # of transformers' first documentation
    "stage3_gather_fp16_weights_on_model_save": {"stage3_gather_16bit_weights_on_model_save": True},
}

PINNED = "cpu_offload_use_pin_memory"  # of both sections above

# Section of DeepSpeed's monitors -> the package without which it cannot start.
MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}

OF_MUP = ("muadam", "muadamw", "musgd")  # optimizers of the package mup


def modern(config: dict, path: str | Path) -> tuple[dict, list[str]]:
    """Return a configuration with today's names, without comments, and what was read as what.

    DeepSpeed itself takes older names of zero_optimization, and names without stage3_, so that one setting may stand
    under three. Raises: UserError where two of them are there.
    """
    config, said = _without_comments(config), []
    if "bfloat16" in config:
        config = _moved(config, "bfloat16", {"bf16": config["bfloat16"]}, path, said)
    zero = config.get(ZERO)
    if not isinstance(zero, dict):
        return config, said
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    # Name without stage3_ -> the name that DeepSpeed's documentation has.
    known = DeepSpeedZeroConfig.model_fields.items()
    aliases = {name: field.alias for name, field in known if field.alias and field.alias != name}
    zero = dict(zero)
    where = f"{path}: {ZERO}"
    for key, value in list(zero.items()):
        if key in OLDER and isinstance(value, bool):
            zero = _moved(zero, key, OLDER[key] if value else {}, where, said)
        elif name := aliases.get(key):
            zero = _moved(zero, key, {name: value}, where, said)
    if isinstance(pinned := zero.get(PINNED), bool):
        sections = [name for name in ("offload_optimizer", "offload_param") if name in zero]
        zero.pop(PINNED)
        for name in sections:
            zero = merge_json(zero, {name: {"pin_memory": pinned, **(zero[name] or {})}})
        said.append(f"{PINNED} as pin_memory of {' and '.join(sections) or 'nothing, as nothing is offloaded'}")
    return {**config, ZERO: zero}, said


def _moved(section: dict, key: str, today: dict, where, said: list[str]) -> dict:
    """Return a section with a key under today's names. Raises: UserError where these are there too."""
    rest = {name: value for name, value in section.items() if name != key}
    if twice := next((name for name in today if name in rest), None):
        raise UserError(f"{where}: {key} and {twice} are one setting; keep {twice}.")
    said.append(f"{key} as {' and '.join(today) or 'off'}")
    return {**rest, **{name: dict(value) if isinstance(value, dict) else value for name, value in today.items()}}


def _without_comments(config: dict) -> dict:
    """Return a configuration without the keys that begin with _ or //, by which people write comments in JSON."""
    return {
        key: _without_comments(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not key.startswith(("_", "//"))
    }


def check_installed(config: dict, path: str | Path) -> None:
    """Refuse an optimizer, a scheduler or a monitor that the installed DeepSpeed cannot start, or not with its params.

    It would end in a traceback once the model is loaded. Raises: UserError with the names that there are.
    """
    from deepspeed.runtime import config as runtime
    from deepspeed.runtime import lr_schedules

    for section, own, of_torch, base in (
        ("optimizer", runtime.DEEPSPEED_OPTIMIZERS, torch.optim, torch.optim.Optimizer),
        ("scheduler", lr_schedules.VALID_LR_SCHEDULES, torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler),
    ):
        name = json_value(config, f"{section}.type")
        if name is None:
            continue
        where = f"{path}: {section}.type = {name!r}"
        known = name in own or (section == "optimizer" and str(name).lower() in own)
        found = lr_schedules if name in lr_schedules.VALID_LR_SCHEDULES else of_torch
        cls = getattr(found, name, None) if isinstance(name, str) and (not known or section == "scheduler") else None
        if not known and not (inspect.isclass(cls) and issubclass(cls, base)):
            there = ", ".join(sorted(own))
            raise UserError(f"{where}: the installed DeepSpeed has no such {section}; it has {there}, and PyTorch's.")
        if str(name).lower() in OF_MUP and importlib.util.find_spec("mup") is None:
            raise UserError(f"{where}: needs the package mup, which is not installed: pip install mup.")
        taken = dict(list(inspect.signature(cls).parameters.items())[1:]) if cls else {}  # behind what they are made of
        params = json_value(config, f"{section}.params") or {}
        needed = [key for key, parameter in taken.items() if parameter.default is parameter.empty]
        for key in [key for key in params if cls and key not in taken] + [key for key in needed if key not in params]:
            what = f"{name} has no such setting" if key in params else f"{name} does not start without it"
            raise UserError(f"{path}: {section}.params.{key}: {what}; it takes {', '.join(taken)}.")
    for section, module in MONITORS.items():
        if json_value(config, f"{section}.enabled") is True and importlib.util.find_spec(module) is None:
            package = module.replace("_", "-")
            raise UserError(f"{path}: {section}: its package is not installed: pip install {package}, or delete it.")
