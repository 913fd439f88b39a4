"""Read and check the DeepSpeed JSON of --zero, --offload or --deepspeed, and match it with the flags."""

import difflib
import functools
import json
import math
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerofit.base import distributed, limits
from zerofit.base.errors import UserError
from zerofit.base.paths import PROJECT, read_text
from zerofit.config import arguments, deepspeed_names, offload, synonyms
from zerofit.job import parallel_dims
from zerofit.job.settings import decide, json_value, merge_json
from zerofit.job.settings_file import RepeatedKey, without_repeated_keys
from zerofit.job.technique import refuse_conflicts

CONFIGS = PROJECT / "deepspeed_configs"


# Top-level keys that DeepSpeed reads outside DeepSpeedConfig (see known_keys).
READ_ELSEWHERE = frozenset(
    "activation_checkpointing aio autotuning flops_profiler optimizer scheduler sequence_parallel_size".split()
)

# Top-level keys that would change batch, data or checkpoints unnoticed by the kit.
NOT_SUPPORTED = frozenset(
    "amp compression_training curriculum_learning datastates_ckpt eigenvalue elasticity graph_harvesting nebula "
    "progressive_layer_drop quantize_training sparse_attention sparse_gradients".split()
)

# Keys of DeepSpeed that are refused here, with the values that turn them off. Parallelism other than ZeRO would
# invalidate the batch arithmetic.
REFUSED = {
    "tensor_parallel.autotp_size": (0, 1),
    "tensor_parallel.tp_size": (0, 1),
    "tensor_parallel.tensor_parallel.tp_size": (0, 1),
    "tensor_parallel.tp.tp_size": (0, 1),
    "expert_parallel.enabled": (False,),
    "pipeline.stages": (0, 1),
    "sequence_parallel_size": (0, 1),
    "autotuning.enabled": (False,),
    "checkpoint.writer": (),
}

# Section -> the cause and the alternative.
INSTEAD = {
    "tensor_parallel": "the batch would be counted wrongly; delete it, and use --tp_size",
    "sequence_parallel_size": "the gradients would be scaled wrongly; delete it, and use --sp_size",
    "expert_parallel": "DeepSpeed's AutoEP fails with transformers 5 (deepspeed/module_inject/auto_ep_presets/base.py "
    "passes an extra argument to its registry of outputs), and ZeRO refuses the optimizer's groups; delete it, and use "
    "--zero 3, which shards the experts too",
    "autotuning": "DeepSpeed would end the run after a few measured steps; delete it, and use zerofit plan",
    "pipeline": "this section does not start a pipeline; delete it, and use recipes/pipeline.py with --pp_size",
    "checkpoint": "this writer may not have finished when the checkpoint is verified and renamed, which would lose "
    "optimizer states; delete it",
}

# JSON key -> the argument with the same meaning; "auto" in the JSON takes the argument's value.
SAME_AS_ARGUMENT = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "effective_batch_size",
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
}

BETAS = "optimizer.params.betas"  # --adam_beta1 and --adam_beta2

# Keys for which transformers replaces "auto"; elsewhere "auto" fails or is silently read as false.
AUTO_KEYS = frozenset(SAME_AS_ARGUMENT) | {
    BETAS,
    "scheduler.params.warmup_min_lr",
    "scheduler.params.total_num_steps",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
}

# Keys that take the argument's value if the file lacks them: DeepSpeed would stop without a batch, not clip gradients,
# and compute in fp32.
FILLED = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16.enabled",
    "fp16.enabled",
)

OTHER_PRECISION = {"bfloat16", "torch_autocast", "data_types"}  # sections that replace bf16 and fp16

# Keys whose types DeepSpeed does not check: (types, requirement in words, keys).
TYPES = (
    (
        (dict,),
        "an object {...}",
        """activation_checkpointing autotuning checkpoint comms_logger compile data_types flops_profiler optimizer
        optimizer.params scheduler scheduler.params tensorboard torch_autocast wandb""",
    ),
    (
        (int,),
        "an integer",
        """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
        scheduler.params.warmup_num_steps""",
    ),
    (
        (int, float),
        "a number",
        """gradient_clipping gradient_predivide_factor steps_per_print optimizer.params.lr optimizer.params.eps
        optimizer.params.weight_decay scheduler.params.warmup_max_lr scheduler.params.warmup_min_lr""",
    ),
    (
        (bool,),
        "true or false",
        """dataloader_drop_last disable_allgather dump_state memory_breakdown prescale_gradients wall_clock_breakdown
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer""",
    ),
)

# Key -> its side effect. Keys that end in PLACES write there, too.
ACTING = {
    "csv_monitor": "writes files",
    "tensorboard": "writes files",
    "wandb": "sends the run's records under your name",
    "comet": "sends the run's records under your name",
    "flops_profiler": "writes files",
    "data_efficiency": "writes files",
    "compile.debug_log": "writes files",
    "torch_autocast.lower_precision_safe_modules": "imports Python modules",
}

PLACES = ("_path", "_file", "_dir", "_folder")


def acting_key(config: dict) -> tuple[str, str] | None:
    """Return (key, its effect) of the first key that writes files, sends or executes something, or None."""
    for dotted, effect in ACTING.items():
        value = json_value(config, dotted)
        is_off = value in (None, False) or (isinstance(value, dict) and value.get("enabled") is False)
        if not is_off:
            return dotted, effect
    place = next((dotted for dotted, _ in _leaves(config) if dotted.endswith(PLACES)), None)
    return (place, "writes there") if place else None


def read_json(path: str | Path) -> dict:
    """Parse one DeepSpeed JSON file.

    Raises: UserError with file, line and column for malformed JSON, and for a duplicate key (JSON parsers silently keep
        the last one).
    """
    path = Path(path).expanduser()

    def finite(word):  # refuse NaN, Infinity and 1e999, which Python accepts
        if not math.isfinite(number := float(word)):
            raise UserError(f"{path}: {word} is not finite; write a finite number.")
        return number

    try:
        config = json.loads(
            read_text(path), object_pairs_hook=without_repeated_keys, parse_float=finite, parse_constant=finite
        )
    except RepeatedKey as error:
        raise UserError(f"{path}: the key {error.key!r} appears twice in one object; keep one of them.") from None
    except OSError as error:
        if stage := synonyms.stage(path.name):
            raise UserError(f"--deepspeed {path}: file not found; did you mean --zero {stage}?") from None
        raise UserError(f"--deepspeed {path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"--deepspeed {path}: is not a UTF-8 text file.") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}.") from None
    except RecursionError:
        raise UserError(f"{path}: is nested too deeply for a DeepSpeed JSON.") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: must contain a JSON object {{...}}, found a {type(config).__name__}.")
    return config


def lint(config: dict, path: str | Path) -> None:
    """Refuse a configuration that DeepSpeed would reject later, or whose keys it would silently ignore.

    Raises: UserError with file and key: unknown or removed keys at the top level or in a section, wrong types,
        unsupported "auto", a missing zero_optimization section.
    """
    from deepspeed.runtime import config as installed
    from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
    from deepspeed.runtime.zero.config import get_zero_config
    from pydantic import ValidationError

    removed = getattr(installed, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {})  # each with DeepSpeed's explanation
    for dotted, off in REFUSED.items():
        value = json_value(config, dotted)
        if value is not None and value not in off:
            raise UserError(f"{path}: {dotted} = {json.dumps(value)}: {INSTEAD[dotted.partition('.')[0]]}.")
    for key in config:
        if key in removed:
            raise UserError(f"{path}: {key}: {removed[key]} Delete the key.")
        if key in NOT_SUPPORTED:
            raise UserError(f"{path}: {key}: not supported here; delete the key.")
        if key not in known_keys():
            close = difflib.get_close_matches(key, known_keys(), 1)
            hint = f"did you mean {close[0]!r}?" if close else "delete it (DeepSpeed would silently ignore it)."
            raise UserError(f"{path}: unknown key {key!r}; {hint}")
    if not isinstance(config.get("zero_optimization"), dict):
        raise UserError(f'{path}: the "zero_optimization" section is missing; without ZeRO write {{"stage": 0}}.')
    if mics := [key for key in config["zero_optimization"] if key.startswith("mics_")]:
        raise UserError(f"{path}: zero_optimization.{mics[0]}: DeepSpeed removes MiCS in 0.19.8; delete the key.")
    for dotted, value in _leaves(config):
        if value == "auto" and dotted not in AUTO_KEYS:
            raise UserError(f'{path}: {dotted} does not support "auto"; write a value.')
    _refuse_unchecked_types(config, path)
    for section, load in (
        ("zero_optimization", get_zero_config),
        ("bf16", get_bfloat16_config),
        ("fp16", get_float16_config),
    ):
        body = config.get(section, {})
        if not isinstance(body, dict):
            raise UserError(f"{path}: {section} must be an object {{...}}.")
        try:
            loaded = load({section: {k: v for k, v in body.items() if v != "auto"}})
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join([section, *(str(p) for p in first["loc"])])
            if first["type"] == "extra_forbidden":
                *sections, name = first["loc"]
                close = difflib.get_close_matches(str(name), _names_in(type(load({})), sections), 1)
                hint = f"did you mean {close[0]!r}?" if close else "DeepSpeed does not have this setting."
                raise UserError(f"{path}: unknown key {key!r}; {hint}") from None
            if not first["loc"]:  # a conflict between keys; the input is the section
                raise UserError(f"{path}: {section}: {first['msg'].rstrip('.')}.") from None
            must = first["msg"].lower()
            if first["type"] == "enum":  # pydantic lists DeepSpeed's alias of stage 3 as well
                must = f"must be one of {', '.join(dict.fromkeys(re.split(', | or ', first['ctx']['expected'])))}"
            raise UserError(f"{path}: {key} = {json.dumps(first['input'])}: {must}.") from None
        except (AssertionError, installed.DeepSpeedConfigError, ValueError) as error:
            raise UserError(f"{path}: {section}: {error}") from None
        _refuse_other_types(body, loaded, f"{path}: {section}")


def _names_in(model, keys: list[str]) -> list[str]:
    """Return the names of the settings in a section of DeepSpeed's configuration, or in its subsection at `keys`."""
    for key in keys:
        kind = model.model_fields[key].annotation
        model = next(iter(typing.get_args(kind)), kind)  # the class of an Optional
    return [field.alias or name for name, field in model.model_fields.items()]


def _refuse_other_types(body: dict, loaded, where: str) -> None:
    """Refuse quoted booleans and numbers, and true for a number, which DeepSpeed would convert.

    Args: loaded: DeepSpeed's configuration object of this section.
    """
    aliases = {model_field.alias: name for name, model_field in type(loaded).model_fields.items() if model_field.alias}
    for key, value in body.items():
        converted = getattr(loaded, aliases.get(key, key), None)
        if isinstance(value, dict) and hasattr(type(converted), "model_fields"):
            _refuse_other_types(value, converted, f"{where}.{key}")
        wrong = isinstance(value, str) or (isinstance(value, bool) and not isinstance(converted, bool))
        if wrong and value != "auto" and isinstance(converted, int | float):
            kind = "true or false" if isinstance(converted, bool) else "a number"
            raise UserError(f"{where}.{key} = {json.dumps(value)}: write {kind}, without quotes.")


def _refuse_unchecked_types(config: dict, path: str | Path) -> None:
    """Refuse values with a wrong type that DeepSpeed does not check, and a scheduler with a fixed number of steps."""
    for types, required, keys in TYPES:
        for dotted in keys.split():
            value = json_value(config, dotted)
            if value not in (None, "auto") and type(value) not in types:
                raise UserError(f"{path}: {dotted} = {json.dumps(value)}: must be {required}.")
    betas, steps = json_value(config, BETAS), json_value(config, "scheduler.params.total_num_steps")
    two_numbers = isinstance(betas, list) and len(betas) == 2 and {type(beta) for beta in betas} <= {int, float}
    if betas not in (None, "auto") and not two_numbers:
        raise UserError(f"{path}: {BETAS} = {json.dumps(betas)}: must be two numbers, such as [0.9, 0.999].")
    if steps not in (None, "auto"):
        raise UserError(
            f'{path}: scheduler.params.total_num_steps = {json.dumps(steps)}: write "auto", the number of optimizer '
            "steps of the run."
        )


def resolve(settings) -> None:
    """Set settings.deepspeed, the DeepSpeed configuration of this run, or None for stage 0 (plain DDP).

    Copy literals of the JSON into `settings` (source "deepspeed JSON").
    Raises: UserError for an unsupported pair of stage and offload, or a contradiction, with both places.
    """
    if settings.values.get("deepspeed"):
        path = Path(settings.values["deepspeed"])
        config = read_json(path)
    else:
        for technique in offload.TECHNIQUES:
            refuse_conflicts(technique, settings)
        if settings.zero == 0:
            return
        path = CONFIGS / f"zero{settings.zero}.json"
        config = read_json(path)
    distributed.import_deepspeed(settings.use_cpu)  # `lint` uses DeepSpeed's configuration classes
    config, older = deepspeed_names.modern(config, path)
    if older:
        settings.decisions.append(f"{path}: read older or shorter names: {', '.join(older)}")
    lint(config, path)
    deepspeed_names.check_installed(config, path)
    config = _filled(config, path, settings)
    _match(config, path, settings, settings.explicit)
    _match_offload(config, path, settings, settings.explicit)
    if settings.offload != "none" and not _offload_of(config):
        overlay = CONFIGS / offload.overlay(settings)
        config = merge_json(config, read_json(overlay))
        lint(config, overlay)
    if json_value(config, "zero_optimization.offload_param.device", "none") != "none" and settings.zero != 3:
        raise UserError(
            f"{path}: zero_optimization.offload_param needs stage 3; DeepSpeed silently ignores it at stage "
            f"{settings.zero}. Use stage 3 or delete the section."
        )
    config = offload.with_path(config, path, settings)
    offload.check(config, path, settings)
    config = _with_reduction(_with_gathered_save(config, path, settings), settings)
    for dim, size in parallel_dims.active(settings.values):
        overlay = read_json(CONFIGS / dim.overlay) if dim.overlay else {}
        config = merge_json(merge_json(config, overlay), dim.sections(size))
        if dim.splits_model:  # transformers would count the rows of a group once per rank
            config = {key: value for key, value in config.items() if key != "train_batch_size"}
    settings.deepspeed = config


def _filled(config: dict, path: Path, settings) -> dict:
    """Return the configuration with "auto" for missing keys of FILLED."""
    other_precision = OTHER_PRECISION & config.keys()
    missing = [
        dotted for dotted in FILLED
        if json_value(config, dotted) is None and not (dotted.endswith(".enabled") and other_precision)
    ]  # fmt: skip
    for dotted in missing:
        section, _, key = dotted.partition(".")
        config = merge_json(config, {section: {key: "auto"} if key else "auto"})
    if missing:
        settings.decisions.append(f"{', '.join(missing)}: set from the arguments, as {path} lacks them")
    return config


def _with_reduction(config: dict, settings) -> dict:
    """Return the configuration with the faster reduction of gradients at stages 1 and 2.

    On few ranks send each gradient only to its owner; DeepSpeed's default all-reduces twice the bytes. On many ranks
    keep the all-reduce and turn on overlap_comm, which would wait for the GPU at each bucket without it.
    """
    zero = config["zero_optimization"]
    is_set = "use_multi_rank_bucket_allreduce" in zero or zero.get("overlap_comm")
    replicas = settings.world_size // settings.parallel_size("matrices", "layers")
    if settings.zero not in (1, 2) or is_set:
        return config
    if replicas <= limits.MAX_REDUCE_RANKS:
        return merge_json(config, {"zero_optimization": {"use_multi_rank_bucket_allreduce": False}})
    if "overlap_comm" in zero or settings.ranks_per_row > 1 or settings.offload != "none":
        return config
    settings.decisions.append(
        f"zero_optimization.overlap_comm true: overlap the all-reduce of gradients over {replicas} ranks with the "
        "backward; set it to false in a --deepspeed JSON to turn it off"
    )
    return merge_json(config, {"zero_optimization": {"overlap_comm": True}})


def _with_gathered_save(config: dict, path: Path, settings) -> dict:
    """Return the configuration with stage 3's gathering of weights for a save turned on (default: off).

    Raises: UserError if the file sets it to false, as the trained model would not be saved.
    """
    key = "stage3_gather_16bit_weights_on_model_save"
    dotted = f"zero_optimization.{key}"
    if settings.zero != 3 or json_value(config, dotted):
        return config
    if json_value(config, dotted) is False:
        raise UserError(f"{path}: {dotted} is false, so final/ would lack the weights; write true, or delete the line.")
    settings.decisions.append(f"{dotted} true: required to save the weights, and not set in {path}")
    return merge_json(config, {"zero_optimization": {key: True}})


def _match(config: dict, path: Path, settings, explicit: dict[str, Any]) -> None:
    """Copy the file's literals into the arguments with the same meaning.

    Raises: UserError if the user set such an argument, or the scheduler, to another value.
    """
    names = {"zero_optimization.stage": "zero", **SAME_AS_ARGUMENT, **offload.SAME_AS_FLAG}
    literals = [(dotted, name, json_value(config, dotted)) for dotted, name in names.items()]
    if isinstance(betas := json_value(config, BETAS), list):
        literals += [(BETAS, f"adam_beta{i}", beta) for i, beta in enumerate(betas, 1)]
    for dotted, name, literal in literals:
        if literal is None or literal == "auto":
            continue
        as_json = json.dumps(json_value(config, dotted))
        where = f"{path}: {dotted} = {as_json}"
        arguments.check_number(name, literal, where, arguments.kit_groups(settings.recipe))
        if name in explicit and explicit[name] not in (literal, "auto"):
            fix = 'change one of them, or write "auto" in the file.' if dotted in AUTO_KEYS else "change one of them."
            raise UserError(f"{path} sets {dotted} = {as_json}, but --{name} is {explicit[name]}: {fix}")
        if explicit.get(name) == literal:
            continue
        if name == "zero" and literal == settings.zero and not settings.values.get("deepspeed"):
            continue  # do not print the stage of our zero2.json
        decide(settings, name, literal, f"set in {path} ({dotted})", "deepspeed JSON")
    _match_scheduler(config, path, settings, explicit)


def _match_scheduler(config: dict, path: Path, settings, explicit: dict[str, Any]) -> None:
    """Let a "scheduler" section in the file replace --lr_scheduler_type. Raises: UserError if both are set."""
    if (scheduler := json_value(config, "scheduler.type")) is None:
        return
    if "lr_scheduler_type" in explicit:
        raise UserError(
            f'{path} has a "scheduler" section ({scheduler}), but --lr_scheduler_type is '
            f"{explicit['lr_scheduler_type']}: change one of them."
        )
    settings.decisions.append(f"scheduler {scheduler}: set in {path}; --lr_scheduler_type is not used")


def _offload_of(config: dict) -> dict[str, str]:
    """Return {"optimizer": device, "param": device} for the sections that offload."""
    devices = {k: json_value(config, f"zero_optimization.offload_{k}.device", "none") for k in ("optimizer", "param")}
    return {k: v for k, v in devices.items() if v not in (None, "none")}


def _match_offload(config: dict, path: Path, settings, explicit: dict[str, Any]) -> None:
    """Set --offload from the file's offload sections. Raises: UserError if the user set another value."""
    devices = _offload_of(config)
    if not devices:
        return
    word = "all" if "param" in devices else "optimizer"
    if "offload" in explicit and explicit["offload"] != word:
        where = " and ".join(f"zero_optimization.offload_{k} (device {v})" for k, v in devices.items())
        raise UserError(f"{path} has {where}, but --offload is {explicit['offload']}: change one of them.")
    if "offload" not in explicit:
        decide(settings, "offload", word, f"set in {path}", "deepspeed JSON")


def _leaves(config: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for all values except objects."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@functools.cache
def known_keys() -> frozenset[str]:
    """Return the top-level keys that the installed DeepSpeed reads; it silently ignores all others.

    Pass DeepSpeedConfig a dictionary that records its look-ups.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    read = set()

    class Recorder(dict):
        def get(self, key, default=None):
            read.add(key)
            return super().get(key, default)

        def __getitem__(self, key):
            read.add(key)
            return super().__getitem__(key)

        def __contains__(self, key):
            read.add(key)
            return super().__contains__(key)

    DeepSpeedConfig(Recorder(train_batch_size=1, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1))
    return (READ_ELSEWHERE | {key for key in read if isinstance(key, str)}) - NOT_SUPPORTED
