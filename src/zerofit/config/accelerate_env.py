"""Drop the variables that `accelerate launch` sets, and check what it was asked for against the run."""

import os
from pathlib import Path

import psutil

from zerofit.base import command_line, distributed
from zerofit.base.errors import UserError
from zerofit.convert import conversion, sharding
from zerofit.job import settings_file
from zerofit.job.settings import Settings, as_typed, json_value, merge_json

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
    "ACCELERATE_GRADIENT_CLIPPING",
    "ACCELERATE_USE_CPU",
    "ACCELERATE_TORCH_DEVICE",  # Ray Train sets it; the device is that of LOCAL_RANK
)

# Those that a user may have set on purpose for this run.
_WORTH_SAYING = (
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

# Section of accelerate's file -> its options of the command line that stand in it.
_SECTIONS = {
    "deepspeed_config": "zero_stage offload_optimizer_device offload_param_device gradient_accumulation_steps "
    "gradient_clipping deepspeed_config_file".split(),
    "dynamo_config": ["dynamo_backend"],
    "parallelism_config": [f"parallelism_config_{kind}_size" for kind in ("tp", "cp", "sp")],
}

# Arguments of ours that a file of accelerate may ask for. Its processes are checked by `check_size`; stage 0 and one
# accumulation step are what a file says that asks for nothing.
_COMPARED = "zero offload deepspeed bf16 fp16 use_cpu max_grad_norm gradient_accumulation_steps sp_size tp_size".split()


def drop_accelerate_env() -> list[str]:
    """Drop accelerate's variables that conflict with the recipe; return those that had an effect."""
    dropped = []
    for name in list(os.environ):
        if name in _ACCELERATE_NAMES or name.startswith(_ACCELERATE_PREFIXES):
            value = os.environ.pop(name)
            if name in _WORTH_SAYING and value.lower() not in _HARMLESS:
                dropped.append(f"{name}={value}")
    return dropped


def _accelerate_command() -> list[str] | None:
    """Return the command line of the `accelerate launch` that started this process; None without one."""
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


def _held(file: Path) -> dict:
    """Return the values of a file of accelerate; {} without one. Raises: UserError for a key twice, and the like."""
    values = settings_file.load(str(file))[0] if file.is_file() else {}
    return values if isinstance(values, dict) else {}


def compare(settings: Settings) -> list[str]:
    """Return lines about what `accelerate launch` was asked for and this run does otherwise.

    Raises: UserError if its command line asked for it, by a file or by options, with the flags that do the same.
    """
    argv = _accelerate_command()
    if argv is None:
        return []
    named = command_line.value_of(argv, ("--config_file",))
    file = Path(named).expanduser() if named else cached_accelerate_config()
    in_file = _held(file)
    typed = merge_json(in_file if named else {}, _options(argv))
    if differing := _differing(settings, _asked(typed, file)):
        raise UserError(
            f"{f'--config_file {named}' if named else 'accelerate launch'} asks for {_words(differing)}, which this "
            f"run does otherwise: the recipe decides. Give the recipe {_flags(differing)}, or leave it out there."
        )
    lost = _lost(merge_json(in_file, typed), file)
    lines = [f"{file.name} of accelerate: {key} is not used; {why}" for key, why in lost]
    if differing := [] if named else _differing(settings, _asked(in_file, file)):
        lines.append(f"{file} of accelerate is not used: it asks for {_words(differing)}; here: {_flags(differing)}")
    return lines


def _options(argv: list[str]) -> dict:
    """Return the options of an `accelerate launch` as its file would hold them."""
    found: dict = {}
    for section, names in _SECTIONS.items():
        values = {name: command_line.value_of(argv, (f"--{name}",)) for name in names}
        if values := {
            name: settings_file.value_of(value, f"--{name}") for name, value in values.items() if value is not None
        }:
            found[section] = values
    if "deepspeed_config" in found:
        found["distributed_type"] = "DEEPSPEED"
    for name, kind in (("use_fsdp", "FSDP"), ("use_megatron_lm", "MEGATRON_LM")):
        if f"--{name}" in argv:
            found["distributed_type"] = kind
            found["fsdp_config"] = {"fsdp_version": 1}
    if {"--cpu", "--use_cpu"} & {*argv}:
        found["use_cpu"] = True
    precision = command_line.value_of(argv, ("--mixed_precision",))
    return found | ({"mixed_precision": precision} if precision else {})


def _asked(given: dict, file: Path) -> dict:
    """Return our arguments that a configuration of accelerate asks for."""
    if not given:
        return {}
    done = conversion.convert(sharding.ACCELERATE, given, file)
    asked = {name: line.value for name, line in (done.lines | done.on_gpus).items() if name in _COMPARED}
    section = given.get("deepspeed_config") or {}
    if json_file := section.get("deepspeed_config_file"):
        asked = {"deepspeed": json_file, **{name: asked[name] for name in ("bf16", "fp16") if name in asked}}
    elif "deepspeed_config" in given and "zero_stage" not in section:  # accelerate's default
        asked.pop("zero", None)
    if "mixed_precision" in done.lost:
        asked["fp8"] = True
    if "distributed_type" in done.lost:
        asked["distributed_type"] = given["distributed_type"]
    nothing = {"zero": 0, "gradient_accumulation_steps": 1}
    return {name: value for name, value in asked.items() if nothing.get(name) != value}


def _lost(given: dict, file: Path) -> list[tuple[str, str]]:
    """Return (section, what to use instead) of what has no counterpart and changes how fast a run is, not what."""
    backend = str(json_value(given, "dynamo_config.dynamo_backend", "no")).lower()
    lost = conversion.convert(sharding.ACCELERATE, given, file).lost if given else {}
    return [(name, why) for name, why in lost.items() if name == "dynamo_config" and backend not in _HARMLESS]


def _differing(settings: Settings, asked: dict) -> dict[str, str]:
    """Return {argument: value as it is typed} of those that the run has otherwise."""

    def same(name: str, value) -> bool:
        own = settings.values.get(name)
        if name == "deepspeed" and own:
            return Path(own).expanduser().resolve() == Path(value).expanduser().resolve()
        return own == value

    return {name: as_typed(name, value) for name, value in asked.items() if not same(name, value)}


def _words(differing: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in differing.items())


def _flags(differing: dict[str, str]) -> str:
    known = {name: value for name, value in differing.items() if name != "distributed_type"}
    return " ".join(f"--{name} {value}" for name, value in known.items()) or "--zero 3"


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
        in_file = _held(file).get("num_processes")
        if in_file and in_file != distributed.size():
            started = distributed.size()
            return f"{started} process: {file} asks accelerate for {in_file}, but it started {started}"
    return None
