"""Settings that an accelerate launch leaves in the environment, and the number of processes that it promises."""

import os
from pathlib import Path

import yaml

from zerofit import command_line, distributed
from zerofit.errors import UserError

# What `accelerate launch` and its cached default_config.yaml put into the environment about things that the recipe
# owns (stage, precision, accumulation, FSDP, compile). Left in place they change or crash the run.
_ACCELERATE_PREFIXES = ("ACCELERATE_DEEPSPEED_", "FSDP_", "ACCELERATE_DYNAMO_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")

_ACCELERATE_NAMES = (
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_CONFIG_DS_FIELDS",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_USE_CPU",
)

# Those of them that a user may have meant for this run.
_WORTH_SAYING = (
    "ACCELERATE_USE_CPU",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
)

_HARMLESS = {"no", "false", "1", "NO", ""}


def drop_accelerate_env() -> list[str]:
    """Remove what accelerate says about things that the recipe owns; return the settings that would have mattered."""
    taken = []
    for name in list(os.environ):
        if name in _ACCELERATE_NAMES or name.startswith(_ACCELERATE_PREFIXES):
            value = os.environ.pop(name)
            if name in _WORTH_SAYING and value not in _HARMLESS:
                taken.append(f"{name}={value}")
    return taken


def _accelerate_command() -> list[str] | None:
    """The words of the `accelerate launch` that started this process, where they can be read; else None."""
    import psutil

    try:
        words = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):
        return None
    return words if any("accelerate" in w for w in words[:4]) else None


def cached_accelerate_config() -> Path:
    """Where `accelerate config` keeps the settings of every bare `accelerate launch`."""
    named = os.environ.get("HF_HOME")
    folder = Path(named).expanduser() if named else distributed.home() / ".cache" / "huggingface"
    return folder / "accelerate" / "default_config.yaml"


def check_size() -> str | None:
    """Compare the processes that accelerate was asked for with those that it started (fewer, on a CPU, in silence).

    Returns: a sentence when only its cached configuration file asked for another number.
    Raises: UserError when its command line did.
    """
    words = _accelerate_command()
    if words is None:
        return None
    asked = command_line.value_of(words, ("--num_processes", "--num-processes"))
    if asked and asked.isdigit() and int(asked) != distributed.size():
        raise UserError(
            f"accelerate launch was asked for {asked} processes but started {distributed.size()} (on a CPU it needs "
            f"--use_deepspeed for more than one): use `torchrun --nproc_per_node {asked}` or `make GPUS={asked}`."
        )
    file = command_line.value_of(words, ("--config_file", "--config-file"))
    file = Path(file) if file else cached_accelerate_config()
    if not asked and file.is_file():
        try:
            wanted = (yaml.safe_load(file.read_text()) or {}).get("num_processes")
        except (OSError, yaml.YAMLError, AttributeError):
            return None  # accelerate has started without complaint; it is not ours to judge the file
        if wanted and wanted != distributed.size():
            return f"{distributed.size()} process: {file} asks accelerate for {wanted}, but it started {distributed.size()}"
    return None
