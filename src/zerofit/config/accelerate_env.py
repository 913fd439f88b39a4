"""Drop the variables that `accelerate launch` sets, and check its options against the run."""

import os
from pathlib import Path

import psutil

from zerofit.base import command_line, distributed
from zerofit.base.errors import UserError
from zerofit.convert import conversion, sharding
from zerofit.job import settings_file
from zerofit.job.settings import Settings, as_typed, json_value, merge_json

# `accelerate launch` and its cached default_config.yaml set these variables, but the recipe decides about stage,
# precision, accumulation, FSDP and compile. If they stay set, they change or crash the run.
_ACCELERATE_PREFIXES = ("ACCELERATE_DEEPSPEED_", "FSDP_", "ACCELERATE_DYNAMO_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")

_ACCELERATE_NAMES = (
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_CONFIG_DS_FIELDS",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_GRADIENT_CLIPPING",
    "ACCELERATE_USE_CPU",
    "ACCELERATE_TORCH_DEVICE",  # set by Ray Train; the device follows LOCAL_RANK
)

# Variables that a user may have set on purpose for this run.
_REPORTED = (
    "ACCELERATE_USE_CPU",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_GRADIENT_CLIPPING",
    "ACCELERATE_DYNAMO_BACKEND",
    "PARALLELISM_CONFIG_CP_SIZE",
    "PARALLELISM_CONFIG_SP_SIZE",
    "PARALLELISM_CONFIG_TP_SIZE",
)

_HARMLESS = {"no", "none", "auto", "false", "1", ""}

# Section of accelerate's file -> the command line options that it contains.
_SECTIONS = {
    "deepspeed_config": "zero_stage offload_optimizer_device offload_param_device gradient_accumulation_steps "
    "gradient_clipping deepspeed_config_file".split(),
    "dynamo_config": ["dynamo_backend"],
    "parallelism_config": [f"parallelism_config_{kind}_size" for kind in ("tp", "cp", "sp")],
}

# Our arguments that a file of accelerate may set. `check_size` checks its processes.
_COMPARED = "zero offload deepspeed bf16 fp16 use_cpu max_grad_norm gradient_accumulation_steps sp_size tp_size".split()


def drop_accelerate_env() -> list[str]:
    """Drop accelerate's variables that conflict with the recipe; return the ones that had an effect."""
    dropped = []
    for name in list(os.environ):
        if name in _ACCELERATE_NAMES or name.startswith(_ACCELERATE_PREFIXES):
            value = os.environ.pop(name)
            if name in _REPORTED and value.lower() not in _HARMLESS:
                dropped.append(f"{name}={value}")
    return dropped


def _accelerate_command() -> list[str] | None:
    """Return the command line of the `accelerate launch` that started this process, or None."""
    try:
        argv = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):
        return None
    return argv if any("accelerate" in w for w in argv[:4]) else None


def cached_accelerate_config() -> Path:
    """Return the file in which `accelerate config` keeps the defaults of `accelerate launch`."""
    hf_home = os.environ.get("HF_HOME")
    folder = Path(hf_home).expanduser() if hf_home else distributed.home() / ".cache" / "huggingface"
    return folder / "accelerate" / "default_config.yaml"


def _read(file: Path) -> dict:
    """Return the values of a file of accelerate, {} if it does not exist. Raises: UserError for malformed YAML."""
    values = settings_file.load(str(file))[0] if file.is_file() else {}
    return values if isinstance(values, dict) else {}


def compare(settings: Settings) -> list[str]:
    """Return lines about settings of `accelerate launch` that differ from this run.

    Raises: UserError with our flags if its command line sets them, by --config_file or by options.
    """
    argv = _accelerate_command()
    if argv is None:
        return []
    named = command_line.value_of(argv, ("--config_file",))
    file = Path(named).expanduser() if named else cached_accelerate_config()
    in_file = _read(file)
    typed = merge_json(in_file if named else {}, _options(argv))
    if differing := _differing(settings, _requested(typed, file)):
        raise UserError(
            f"{f'--config_file {named}' if named else 'accelerate launch'} sets {_words(differing)}, but the recipe "
            f"decides this and uses another value. Give the recipe {_flags(differing)}, or remove the setting there."
        )
    lost = _unsupported(merge_json(in_file, typed), file)
    lines = [f"{file.name} of accelerate: {key} is not used; {why}" for key, why in lost]
    if differing := [] if named else _differing(settings, _requested(in_file, file)):
        lines.append(f"{file} of accelerate is not used: it sets {_words(differing)}; use {_flags(differing)}")
    return lines


def _options(argv: list[str]) -> dict:
    """Return the options of an `accelerate launch` in the form of its file."""
    options: dict = {}
    for section, names in _SECTIONS.items():
        values = {name: command_line.value_of(argv, (f"--{name}",)) for name in names}
        if values := {
            name: settings_file.value_of(value, f"--{name}") for name, value in values.items() if value is not None
        }:
            options[section] = values
    if "deepspeed_config" in options:
        options["distributed_type"] = "DEEPSPEED"
    for name, kind in (("use_fsdp", "FSDP"), ("use_megatron_lm", "MEGATRON_LM")):
        if f"--{name}" in argv:
            options["distributed_type"] = kind
            options["fsdp_config"] = {"fsdp_version": 1}
    if {"--cpu", "--use_cpu"} & {*argv}:
        options["use_cpu"] = True
    precision = command_line.value_of(argv, ("--mixed_precision",))
    return options | ({"mixed_precision": precision} if precision else {})


def _requested(config: dict, file: Path) -> dict:
    """Return our arguments that a configuration of accelerate sets."""
    if not config:
        return {}
    done = conversion.convert(sharding.ACCELERATE, config, file)
    requested = {name: line.value for name, line in (done.lines | done.on_gpus).items() if name in _COMPARED}
    section = config.get("deepspeed_config") or {}
    if json_file := section.get("deepspeed_config_file"):
        requested = {"deepspeed": json_file} | {k: v for k, v in requested.items() if k in ("bf16", "fp16")}
    elif "deepspeed_config" in config and "zero_stage" not in section:  # accelerate's default
        requested.pop("zero", None)
    if "mixed_precision" in done.lost:
        requested["fp8"] = True
    if "distributed_type" in done.lost:
        requested["distributed_type"] = config["distributed_type"]
    defaults = {"zero": 0, "gradient_accumulation_steps": 1}
    return {name: value for name, value in requested.items() if defaults.get(name) != value}


def _unsupported(config: dict, file: Path) -> list[tuple[str, str]]:
    """Return (section, alternative) of sections without a counterpart that only change the speed of a run."""
    backend = str(json_value(config, "dynamo_config.dynamo_backend", "no")).lower()
    lost = conversion.convert(sharding.ACCELERATE, config, file).lost if config else {}
    return [(name, why) for name, why in lost.items() if name == "dynamo_config" and backend not in _HARMLESS]


def _differing(settings: Settings, requested: dict) -> dict[str, str]:
    """Return {argument: requested value as it is typed} of the arguments whose value in the run differs."""

    def same(name: str, value) -> bool:
        current = settings.values.get(name)
        if name == "deepspeed" and current:
            return Path(current).expanduser().resolve() == Path(value).expanduser().resolve()
        return current == value

    return {name: as_typed(name, value) for name, value in requested.items() if not same(name, value)}


def _words(differing: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in differing.items())


def _flags(differing: dict[str, str]) -> str:
    known = {name: value for name, value in differing.items() if name != "distributed_type"}
    return " ".join(f"--{name} {value}" for name, value in known.items()) or "--zero 3"


def check_size() -> str | None:
    """Compare the requested and started numbers of processes: accelerate silently starts fewer on a CPU.

    Returns: a sentence if only the configuration file requested another number; else None.
    Raises: UserError if the command line requested another number.
    """
    argv = _accelerate_command()
    if argv is None:
        return None
    count = command_line.value_of(argv, ("--num_processes",))
    if count and count.isdigit() and int(count) != distributed.size():
        raise UserError(
            f"accelerate launch --num_processes {count} started {distributed.size()} (on a CPU it needs "
            f"--use_deepspeed for more than one): use `torchrun --nproc_per_node {count}` or `make GPUS={count}`."
        )
    file = command_line.value_of(argv, ("--config_file",))
    file = Path(file) if file else cached_accelerate_config()
    if not count and file.is_file():
        in_file = _read(file).get("num_processes")
        if in_file and in_file != distributed.size():
            return f"world size {distributed.size()}: accelerate did not start the {in_file} processes of {file}"
    return None
