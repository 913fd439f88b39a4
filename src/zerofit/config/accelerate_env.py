"""Drop the variables that `accelerate launch` sets, and check its number of processes."""

import os
from pathlib import Path

import yaml

from zerofit.base import command_line, distributed
from zerofit.base.errors import UserError

# `accelerate launch` and its cached default_config.yaml put these into the environment, but the recipe decides about
# stage, precision, accumulation, FSDP and compile. Left in place they change or crash the run.
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
    "ACCELERATE_TORCH_DEVICE",  # Ray Train sets it; the device is that of LOCAL_RANK
)

# Those that a user may have set on purpose for this run.
_WORTH_SAYING = (
    "ACCELERATE_USE_CPU",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
)

_HARMLESS = {"no", "false", "1", "NO", ""}


def drop_accelerate_env() -> list[str]:
    """Drop accelerate's variables that conflict with the recipe; return those that had an effect."""
    dropped = []
    for name in list(os.environ):
        if name in _ACCELERATE_NAMES or name.startswith(_ACCELERATE_PREFIXES):
            value = os.environ.pop(name)
            if name in _WORTH_SAYING and value not in _HARMLESS:
                dropped.append(f"{name}={value}")
    return dropped


def _accelerate_command() -> list[str] | None:
    """Return the command line of the `accelerate launch` that started this process; None without one."""
    import psutil

    try:
        argv = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):
        return None
    return argv if any("accelerate" in w for w in argv[:4]) else None


def cached_accelerate_config() -> Path:
    """Return the file in which `accelerate config` keeps the defaults of `accelerate launch`."""
    named = os.environ.get("HF_HOME")
    folder = Path(named).expanduser() if named else distributed.home() / ".cache" / "huggingface"
    return folder / "accelerate" / "default_config.yaml"


def check_size() -> str | None:
    """Compare requested and started processes: accelerate silently starts fewer on a CPU.

    Returns: a sentence if only the configuration file requested another number; else None.
    Raises: UserError if the command line requested another number.
    """
    argv = _accelerate_command()
    if argv is None:
        return None
    count = command_line.value_of(argv, ("--num_processes",))
    if count and count.isdigit() and int(count) != distributed.size():
        raise UserError(
            f"accelerate launch was asked for {count} processes but started {distributed.size()} (on a CPU it needs "
            f"--use_deepspeed for more than one): use `torchrun --nproc_per_node {count}` or `make GPUS={count}`."
        )
    file = command_line.value_of(argv, ("--config_file",))
    file = Path(file) if file else cached_accelerate_config()
    if not count and file.is_file():
        try:
            in_file = (yaml.safe_load(file.read_text()) or {}).get("num_processes")
        except (OSError, yaml.YAMLError, AttributeError):
            return None  # accelerate started without an error, so the file is not checked here
        if in_file and in_file != distributed.size():
            started = distributed.size()
            return f"{started} process: {file} asks accelerate for {in_file}, but it started {started}"
    return None
