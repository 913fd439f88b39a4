"""Translate older and alternative names of a DeepSpeed JSON; refuse classes that the installed DeepSpeed lacks."""

import importlib.util
import inspect
from pathlib import Path

import torch

from zerofit.base.errors import UserError
from zerofit.job.settings import json_value, merge_json

ZERO = "zero_optimization"

_TO_CPU = {"device": "cpu"}

# Older key of zero_optimization -> the current section for a value of true.
OLDER = {
    "cpu_offload": {"offload_optimizer": _TO_CPU},
    "cpu_offload_param": {"offload_param": _TO_CPU},
    "cpu_offload_params": {"offload_param": _TO_CPU},  # from transformers' first documentation
    "stage3_gather_fp16_weights_on_model_save": {"stage3_gather_16bit_weights_on_model_save": True},
}

PINNED = "cpu_offload_use_pin_memory"  # applies to both offload sections

# Section of DeepSpeed's monitors -> the package that it requires.
MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}

MUP_OPTIMIZERS = ("muadam", "muadamw", "musgd")  # require the package mup


def modern(config: dict, path: str | Path) -> tuple[dict, list[str]]:
    """Return a configuration with current names and without comments, and a list of the translations.

    DeepSpeed accepts older names of zero_optimization, and names without stage3_, so one setting may have three names.
    Raises: UserError if two names of a setting are present.
    """
    config, translations = _without_comments(config), []
    if "bfloat16" in config:
        config = _moved(config, "bfloat16", {"bf16": config["bfloat16"]}, path, translations)
    zero = config.get(ZERO)
    if not isinstance(zero, dict):
        return config, translations
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    # Name without stage3_ -> the name in DeepSpeed's documentation.
    known = DeepSpeedZeroConfig.model_fields.items()
    aliases = {name: field.alias for name, field in known if field.alias and field.alias != name}
    zero = dict(zero)
    where = f"{path}: {ZERO}"
    for key, value in list(zero.items()):
        if key in OLDER and isinstance(value, bool):
            zero = _moved(zero, key, OLDER[key] if value else {}, where, translations)
        elif name := aliases.get(key):
            zero = _moved(zero, key, {name: value}, where, translations)
    if isinstance(pinned := zero.get(PINNED), bool):
        sections = [name for name in ("offload_optimizer", "offload_param") if name in zero]
        zero.pop(PINNED)
        for name in sections:
            zero = merge_json(zero, {name: {"pin_memory": pinned, **(zero[name] or {})}})
        translations.append(f"{PINNED} as pin_memory of {' and '.join(sections)}" if sections else f"{PINNED} as off")
    return {**config, ZERO: zero}, translations


def _moved(section: dict, key: str, current: dict, where, translations: list[str]) -> dict:
    """Return a section with a key replaced by its current names. Raises: UserError if these are present, too."""
    rest = {name: value for name, value in section.items() if name != key}
    if twice := next((name for name in current if name in rest), None):
        raise UserError(f"{where}: {key} and {twice} are the same setting; keep {twice}.")
    translations.append(f"{key} as {' and '.join(current) or 'off'}")
    return {**rest, **{name: dict(value) if isinstance(value, dict) else value for name, value in current.items()}}


def _without_comments(config: dict) -> dict:
    """Return a configuration without comments: keys that begin with _ or //."""
    return {
        key: _without_comments(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not key.startswith(("_", "//"))
    }


def check_installed(config: dict, path: str | Path) -> None:
    """Refuse an optimizer, scheduler or monitor, or its params, that the installed DeepSpeed does not support.

    It would end in a traceback after the model is loaded. Raises: UserError with the supported names.
    """
    from deepspeed.runtime import config as runtime
    from deepspeed.runtime import lr_schedules

    for section, builtin, torch_module, base in (
        ("optimizer", runtime.DEEPSPEED_OPTIMIZERS, torch.optim, torch.optim.Optimizer),
        ("scheduler", lr_schedules.VALID_LR_SCHEDULES, torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler),
    ):
        name = json_value(config, f"{section}.type")
        if name is None:
            continue
        where = f"{path}: {section}.type = {name!r}"
        known = name in builtin or (section == "optimizer" and str(name).lower() in builtin)
        module = lr_schedules if name in lr_schedules.VALID_LR_SCHEDULES else torch_module
        cls = getattr(module, name, None) if isinstance(name, str) and (not known or section == "scheduler") else None
        if not known and not (inspect.isclass(cls) and issubclass(cls, base)):
            names = ", ".join(sorted(builtin))
            raise UserError(f"{where}: unknown to the installed DeepSpeed; use one of {names}, or PyTorch's.")
        if str(name).lower() in MUP_OPTIMIZERS and importlib.util.find_spec("mup") is None:
            raise UserError(f"{where}: the package mup is not installed: pip install mup.")
        accepted = dict(list(inspect.signature(cls).parameters.items())[1:]) if cls else {}  # skip the first
        params = json_value(config, f"{section}.params") or {}
        required = [key for key, parameter in accepted.items() if parameter.default is parameter.empty]
        for key in [key for key in params if cls and key not in accepted] + [k for k in required if k not in params]:
            problem = f"{name} does not support it" if key in params else f"{name} requires it"
            raise UserError(f"{path}: {section}.params.{key}: {problem}; supported are {', '.join(accepted)}.")
    for section, package in MONITORS.items():
        if json_value(config, f"{section}.enabled") is True and importlib.util.find_spec(package) is None:
            package = package.replace("_", "-")
            raise UserError(f"{path}: {section}: its package is not installed: pip install {package}, or delete it.")
