"""Read ZeRO stage, offload and process count from DeepSpeed's, FSDP's and accelerate's configurations."""

import json
import re
from pathlib import Path
from typing import Any

from zerofit.convert.conversion import Conversion, Key, Kit, Line, Rule, Section, number, plain, sectioned
from zerofit.job import settings_file

DEEPSPEED_FILE = "use `--deepspeed FILE` instead of zero and offload to run the complete file"


def deepspeed(done: Conversion, key: str) -> None:
    """Convert a key with a DeepSpeed file or its JSON."""
    value = done.take(key)
    if value is None or value == "":
        return
    if isinstance(value, dict):
        convert_json(done, value, key)
    elif file := _json_file(done.file, value):
        config = done.linked_files[f"{Path(value).name} in deepspeed"] = sectioned(settings_file.load(str(file))[0])
        convert_json(done, config, f"{key}: {value}")
    else:
        _by_name(done, key, str(value))


def _json_file(converted: Path, value: Any) -> Path | None:
    """Return the DeepSpeed file that a value names, in this folder or next to the converted file."""
    for file in (Path(str(value)).expanduser(), converted.parent / str(value)):
        if file.is_file() and file.suffix == ".json":
            return file
    return None


def _by_name(done: Conversion, key: str, name: str) -> None:
    """Derive stage and offload from a name such as zero3_bf16_cpuoffload_all.json or ds_z2_offload_config.json."""
    stage = re.search(r"z(?:ero)?[-_]?(?:stage)?[-_]?([0-3])", Path(name).name, re.IGNORECASE)
    if not stage:
        done.lose(key, f"the file does not exist here and its name does not contain a stage; {DEEPSPEED_FILE}")
        return
    done.put("zero", int(stage[1]), f"{key}: {name}")
    if "offload" in name.lower() and stage[1] != "0":
        done.put("offload", "all" if stage[1] == "3" else "optimizer", f"{key}: {name}")
    done.differ(f"{key}: the file does not exist here; its name determined stage and offload; {DEEPSPEED_FILE}.")


def convert_json(done: Conversion, config: dict, key: str) -> None:
    """Convert the stage and the offload of a DeepSpeed configuration."""
    _read_autos(config)
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    done.put("zero", stage, key)

    def device(name: str) -> str:
        return str((zero.get(name) or {}).get("device", "none"))

    offload = device("offload_optimizer"), device("offload_param")
    older = any(zero.get(name) for name in ("cpu_offload_param", "cpu_offload_params"))
    if stage == 3 and (offload[1] not in ("none", "None") or older):
        done.put("offload", "all", f"{key}: offload_param")
    elif stage and (zero.get("cpu_offload") or offload[0] not in ("none", "None")):
        done.put("offload", "optimizer", f"{key}: offload_optimizer")
    if "nvme" in offload:
        done.differ(f"{key}: offload to NVMe; set offload_path to a folder on that disk.")
    tuned = {"overlap_comm", "reduce_bucket_size", "stage3_prefetch_bucket_size", "allgather_bucket_size"}
    if (len(tuned & zero.keys())) or config.get("optimizer") or config.get("scheduler"):
        done.differ(f"{key}: its bucket sizes, optimizer and scheduler are not converted; {DEEPSPEED_FILE}.")


def _read_autos(config: dict) -> None:
    """Mark the keys set to auto as read: the job's arguments fill them."""
    for key, value in list(dict.items(config)):
        if value == "auto":
            config.get(key)
        elif isinstance(value, dict):
            _read_autos(value)
            if isinstance(value, Section) and value.keys() <= value.read:
                config.get(key)


FSDP_NOTE = "FSDP is replaced by the equivalent ZeRO stage"


def fsdp(done: Conversion, *keys: str) -> None:
    """Convert keys that enable FSDP: `fsdp: full_shard auto_wrap`, a list of such words, `fsdp_config`."""
    values = {key: done.take(key) for key in keys}
    enabled = [key for key, value in values.items() if value not in (None, "", False, [], {})]
    if not enabled:
        return
    text = json.dumps(plain(list(values.values()))).lower()
    zero = 2 if "shard_grad_op" in text else 3
    keys = ", ".join([*enabled, *["distributed_type"] * ("distributed_type" in done.values)])
    done.put("zero", zero, keys)
    for value in values.values():
        for name in value if isinstance(value, Section) else ():
            value.read |= {name} if "offload" in name or "sharding_strategy" in name else set()
    offload = '"fsdp_offload_params": true' in text or '"offload_params": true' in text or '"cpu_offload": true' in text
    if offload or re.search(r'"offload"|\boffload\b(?!_)', json.dumps(plain(values.get("fsdp") or ""))):
        done.put("offload", "all" if zero == 3 else "optimizer", keys)
    done.differ(f"{enabled[0]}: {FSDP_NOTE} (zero: {zero}).")


def split_rows(done: Conversion, key: str | None, size: int | None) -> None:
    """Write the number of GPUs that share a row."""
    if size and size > 1:
        done.put("sp_size", size, key)
        done.differ(f"{key}: rows are split by Ulysses, not a ring; sp_size must divide the number of attention heads.")


def split_layers(done: Conversion, key: str) -> None:
    """Write the number of GPUs that share a layer if it is more than 1."""
    if (size := done.take(key, 1)) > 1:
        done.put("tp_size", size, key)


# --- accelerate's configuration (`accelerate launch --config_file`) ---


def _accelerate(done: Conversion) -> None:
    kind = str(done.take("distributed_type", "NO")).upper()
    count = done.take("num_processes", 1)
    machines = done.take("num_machines", 1)
    done.put("gpus", count, "num_processes")
    if machines > 1:
        done.differ(
            f"num_machines: {machines}: run `make sft NODES={machines} GPUS={count // machines} ...` on each node."
        )
    if kind == "DEEPSPEED":
        _accelerate_deepspeed(done)
    elif "FSDP" in kind:
        fsdp(done, "fsdp_config")
    elif kind in ("MULTI_GPU", "MULTI_CPU", "NO"):
        done.put("zero", 0, "distributed_type")
    else:
        done.lose("distributed_type", f"{kind} is not supported; zero: 3 shards the model")
    for theirs in ("cp_size", "sp_size"):
        key = f"parallelism_config: parallelism_config_{theirs}"
        split_rows(done, key, number(done.take(key)))
    split_layers(done, "parallelism_config: parallelism_config_tp_size")
    precision = str(done.take("mixed_precision", "no"))
    if precision == "bf16":
        done.put("bf16", True, "mixed_precision")
    elif precision == "fp16":
        done.on_gpus["fp16"] = Line(True, "mixed_precision")
    elif precision.lower() in ("no", "false"):
        done.differ(
            "mixed_precision: no: bf16 or fp16 in the job's file takes precedence; zerofit defaults to bf16 on GPUs, "
            "and bf16: false computes in fp32."
        )
    elif precision == "fp8":
        done.lose("mixed_precision", "fp8: true computes the decoder layers' matrices in FP8 on GPUs that support it")


def _accelerate_deepspeed(done: Conversion) -> None:
    section = done.take("deepspeed_config", {})
    if "deepspeed_config_file" in section:
        done.values["deepspeed_config.deepspeed_config_file"] = section["deepspeed_config_file"]
        deepspeed(done, "deepspeed_config.deepspeed_config_file")
        done.keep("deepspeed_config", "distributed_type")
        return
    stage = section.get("zero_stage", 2)
    done.put("zero", stage, "distributed_type, deepspeed_config: zero_stage")
    offload = [section.get(f"offload_{name}_device", "none") for name in ("param", "optimizer")]
    if stage == 3 and offload[0] not in ("none", None):
        done.put("offload", "all", "deepspeed_config: offload_param_device")
    elif stage and offload[1] not in ("none", None):
        done.put("offload", "optimizer", "deepspeed_config: offload_optimizer_device")
    for theirs, ours in (("gradient_accumulation_steps",) * 2, ("gradient_clipping", "max_grad_norm")):
        if section.get(theirs) not in (None, "auto"):
            done.put(ours, section[theirs], f"deepspeed_config: {theirs}")


ACCELERATE = Kit(
    name="accelerate",
    version="1.15",
    marks=("compute_environment", "distributed_type", "main_training_function", "machine_rank", "rdzv_backend",
           "num_machines", "num_processes", "mixed_precision", "deepspeed_config", "same_network"),
    keys={"use_cpu": Key("use_cpu", values={False: None})},
    rules=(
        Rule("num_processes num_machines", "gpus", _accelerate, "use NODES= for several machines"),
        Rule("distributed_type deepspeed_config fsdp_config", "zero, offload", note=FSDP_NOTE),
        Rule("mixed_precision", "bf16 or fp16"),
    ),
    lost={
        "zerofit launch starts and connects the processes (docs/multinode.md)": "compute_environment machine_rank "
        "main_training_function main_process_ip main_process_port rdzv_backend same_network gpu_ids "
        "enable_cpu_affinity debug tpu_* downcast_bf16 command_file commands",
        "compile_layers: true compiles the decoder layers": "dynamo_config dynamo_backend",
        DEEPSPEED_FILE: "deepspeed_config.* deepspeed_config_file",
        FSDP_NOTE: "fsdp_config.*",
        "use sp_size, tp_size or pp_size for model parallelism": "parallelism_config* "
        "megatron_lm_config",
    },
    meaning=("A launcher configuration does not describe a training: convert it together with the job's file "
             "(`zerofit convert job.yaml accelerate.yaml`), or add model and data to the converted file.",),
)  # fmt: skip


# --- DeepSpeed's JSON ---


def _deepspeed_json(done: Conversion) -> None:
    convert_json(done, done.values, "zero_optimization")
    micro, accumulation = done.take("train_micro_batch_size_per_gpu"), done.take("gradient_accumulation_steps")
    effective = done.take("train_batch_size")
    for theirs, ours, value in (
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size", micro),
        ("gradient_accumulation_steps", "gradient_accumulation_steps", accumulation),
        ("train_batch_size", "effective_batch_size", None if isinstance(micro, int) and accumulation else effective),
        ("gradient_clipping", "max_grad_norm", done.take("gradient_clipping")),
    ):
        if value not in (None, "auto"):
            done.put(ours, value, theirs)
    enabled = {name: done.take(name, {}).get("enabled") for name in ("bf16", "fp16")}
    if enabled["bf16"] is True:
        done.put("bf16", True, "bf16: enabled")
    elif enabled["fp16"] is True:
        done.on_gpus["fp16"] = Line(True, "fp16: enabled")
    elif enabled["bf16"] is False:
        done.put("bf16", False, "bf16: enabled")
    done.keep(*(name for name in done.values if name in enabled or done.values[name] == "auto"))
    _optimizer(done)
    _scheduler(done)


def _optimizer(done: Conversion) -> None:
    section = done.take("optimizer") or {}
    names = {"adamw": "adamw_torch_fused", "adam": "adamw_torch_fused", "lion": "lion_32bit", "muon": "muon"}
    kind = str(section.get("type", "")).lower()
    if kind in names:
        done.put("optim", names[kind], "optimizer: type")
    elif kind:
        done.lose("optimizer", "unsupported optimizer (docs/optimizers.md lists the values of optim)")
    for theirs, ours in (("lr", "learning_rate"), ("weight_decay", "weight_decay"), ("eps", "adam_epsilon")):
        if (section.get("params") or {}).get(theirs) not in (None, "auto"):
            done.put(ours, section["params"][theirs], f"optimizer: {theirs}")
    betas = (section.get("params") or {}).get("betas")
    if isinstance(betas, list):
        for number, value in enumerate(betas, 1):
            done.put(f"adam_beta{number}", value, "optimizer: betas")


def _scheduler(done: Conversion) -> None:
    section = done.take("scheduler") or {}
    kinds = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if section.get("type") in kinds:
        done.put("lr_scheduler_type", kinds[section["type"]], "scheduler: type")
    elif section:
        done.lose("scheduler", "unsupported schedule; lr_scheduler_type uses transformers' names")
    steps = (section.get("params") or {}).get("warmup_num_steps")
    if steps not in (None, "auto"):
        done.put("warmup_steps", steps, "scheduler: warmup_num_steps")


DEEPSPEED = Kit(
    name="DeepSpeed",
    version="0.19",
    marks=("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping",
           "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer"),
    keys={},
    rules=(
        Rule("zero_optimization", "zero, offload", _deepspeed_json, DEEPSPEED_FILE),
        Rule("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
        Rule("train_batch_size", "effective_batch_size"),
        Rule("gradient_clipping", "max_grad_norm"),
        Rule("optimizer scheduler", "optim, learning_rate, lr_scheduler_type"),
        Rule("bf16 fp16", "bf16, fp16"),
    ),
    lost={
        DEEPSPEED_FILE: "steps_per_print wall_clock_breakdown zero_allow_untested_optimizer prescale_gradients "
        "zero_force_ds_cpu_optimizer communication_data_type activation_checkpointing aio amp tensorboard wandb "
        "flops_profiler gradient_predivide_factor compile sparse_attention compression_training zero_optimization.* "
        "optimizer.* scheduler.* bf16.* fp16.*",
    },
    meaning=("The file can also be used directly with --deepspeed FILE.",),
)  # fmt: skip
