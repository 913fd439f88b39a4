"""Converters shared between kits: batches, schedules, evaluation, adapters, data."""

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from zerofit.convert import sharding
from zerofit.convert.conversion import Conversion, Key, Line, Rule, Shared, number, words

GPU = {"tf32": Key("tf32", skip_off=True, values={"auto": None}, on_gpu=True),
       "use_liger_kernel": Key("use_liger_kernel", skip_off=True, on_gpu=True)}  # fmt: skip

# Arguments of transformers that TRL, LLaMA-Factory and ms-swift share, with its defaults (version 5.23) if they differ
# from ours or belong in a converted file.
TRAINING = GPU | {
    "num_train_epochs": Key("num_train_epochs", default=3.0),
    "max_steps": Key("max_steps", values={-1: None, 0: None}),
    "learning_rate": Key("learning_rate", default=5e-5),
    "lr_scheduler_type": Key("lr_scheduler_type", default="linear"),
    "lr_scheduler_kwargs": Key("lr_scheduler_kwargs", skip_off=True),
    "weight_decay": Key("weight_decay", default=0.0),
    "max_grad_norm": Key("max_grad_norm", default=1.0, values={None: 0}),
    "optim": Key("optim", default="adamw_torch_fused"),
    "seed": Key("seed", default=42),
}

# Defaults of transformers that are not off; an argument with another value is listed.
DEFAULTS = {"remove_unused_columns": True, "average_tokens_across_devices": True, "skip_memory_metrics": True,
            "eval_do_concat_batches": True, "save_safetensors": True, "report_to": "none"}  # fmt: skip

# Arguments that keep their names, for the docs.
SAME = "learning_rate lr_scheduler_type weight_decay max_grad_norm optim seed, and transformers' other arguments"

# Reasons of Kit.refused.
OTHER_LOSS = "trains with a loss that zerofit does not support"
SOME_WEIGHTS = "trains a part of the weights; zerofit trains all weights (sft, dpo) or an adapter (lora)"

NO_COUNTERPART = {
    "only stage and offload are read from a DeepSpeed file; use --deepspeed FILE to run all of it": "deepspeed.*",
    sharding.FSDP_NOTE: "fsdp_config.*",
    "not needed: the tokenizer and the model class come from the model's files": "tokenizer_type model_type "
    "tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_name_or_path use_fast_tokenizer processor_type "
    "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model model_code_revision",
    "set the project with an environment variable (WANDB_PROJECT) and the run's name with run_name": "wandb_* "
    "mlflow_* comet_* swanlab_* trackio_* use_mlflow use_comet use_swanlab use_trackio logging_dir",
    "use a new output_dir, or continue with zerofit resume": "overwrite_output_dir auto_resume_from_checkpoints",
    "tokenized rows are cached automatically ($ZEROFIT_CACHE)": "overwrite_cache dataset_prepared_path "
    "load_from_cache_file preprocessing_batch_size tokenized_path cache_dir data_shared_file_system",
    "report.html shows the curves of each run": "plot_loss",
    "log in with `hf auth login`": "hub_token hf_hub_token ms_hub_token use_hf hf_use_auth_token",
    "set train_sampling_strategy: group_by_length for batches of similar length": "group_by_length",
    "start it on Ray with launchers/ray_train.py (docs/multinode.md)": "use_ray ray_* resources_per_worker "
    "placement_strategy device_groups",
    "special tokens are the tokenizer's; new_tokens adds words as single tokens": "special_tokens "
    "new_special_tokens_config init_special_tokens add_special_tokens split_special_tokens added_tokens_overrides "
    "eot_tokens resize_vocab resize_token_embeddings_to_32x default_system_message default_system tool_format",
    "add the system turn to the rows": "system system_prompt",
    "checkpointing is non-reentrant, with the same result": "gradient_checkpointing_kwargs use_reentrant_gc",
    "use zerofit export after the training": "export_dir export_size export_device export_legacy_format",
}


def batch(done: Conversion, micro: str, accumulation: str) -> None:
    """Write micro batch and accumulation, or the effective batch if the number of GPUs is known."""
    sizes = []
    for name, key in (("per_device_train_batch_size", micro), ("gradient_accumulation_steps", accumulation)):
        value = number(done.take(key))
        sizes.append(done.defaults.get(key, 1) if value in (None, "auto") else value)
        done.put(name, sizes[-1], None if value is None else key)
    per_rank = sizes[0] * sizes[1]
    if not done.gpus:
        done.differ(
            f"effective batch: {per_rank} x the number of data-parallel GPUs, as in {done.kit.name}; to keep it on a "
            "different number of GPUs, set effective_batch_size and remove gradient_accumulation_steps."
        )
        return
    ranks = done.gpus
    for name in ("sp_size", "tp_size"):
        ranks //= done.lines[name].value if name in done.lines else 1
    done.put("effective_batch_size", per_rank * ranks, f"the batch of {done.gpus} GPUs")
    done.lines.pop("gradient_accumulation_steps")  # follows from the number of GPUs


def warmup(done: Conversion, steps: str, ratio: str, default: float = 0) -> None:
    """Write the warm-up: a number of steps, a share of all steps, or the kit's default."""
    count, share = number(done.take(steps, 0)), number(done.take(ratio, 0))
    origin = next((key for key in (steps, ratio) if done.values.get(key) is not None), None)
    if count:
        done.put("warmup_steps", count, steps)
    elif share or origin:
        done.put("warmup_steps", share or 0, ratio if share else origin)
    else:
        done.put("warmup_steps", default)


# Their name of an optimizer -> ours.
OPTIMIZERS = dict.fromkeys(
    "adamw_torch adamw_torch_fused adamw_8bit adafactor sgd lion_32bit lion_8bit muon adamw_torch_8bit "
    "adamw_torch_4bit rmsprop adagrad galore_adamw apollo_adamw".split()
)
OPTIMIZERS = {name: name for name in OPTIMIZERS} | {
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_hf": "adamw_torch",
    "adamw": "adamw_torch_fused",
    "adamw_apex_fused": "adamw_torch_fused",
    "ao_adamw_8bit": "adamw_torch_8bit",
    "ao_adamw_4bit": "adamw_torch_4bit",
    "lion": "lion_32bit",
    "lion_pytorch": "lion_32bit",
}


def error_on_long_rows(done: Conversion, theirs: str, key: str | None = None) -> None:
    """Raise an error for rows longer than max_length, for a file without a length limit.

    Args: theirs: the kit's behavior; key: the key that disables its limit.
    """
    done.put("truncation", "error", key)
    done.differ(
        f"max_length: {theirs}; here a row of more than 2048 tokens stops the run (truncation: error) instead of being "
        "changed; set max_length to the length of the longest row."
    )


def optimizer(done: Conversion, key: str, value: str | None = None, default: str = "adamw_torch_fused") -> None:
    """Write the optimizer of a key if no other key has set it.

    A paged optimizer needs a GPU; its non-paged variant computes the same update. Args: value: our name of it.
    """
    value = value or done.take(key)
    if "optim" in done.lines:
        return
    name, origin = str(value or default), key if value else None
    if name.startswith("paged_adamw"):
        done.put("optim", "adamw_8bit" if "8bit" in name else "adamw_torch_fused", f"{key}: {name}, without pages")
        done.on_gpus["optim"] = Line("paged_adamw_32bit" if name == "paged_adamw" else name, key)
    elif name in OPTIMIZERS:
        done.put("optim", OPTIMIZERS[name], origin and (key if OPTIMIZERS[name] == name else f"{key}: {name}"))
    else:
        done.lose(key, f"unsupported optimizer {name}; replaced by adamw_torch_fused (docs/optimizers.md)")
        done.put("optim", "adamw_torch_fused", f"instead of {name}")


def precision(done: Conversion, bf16: str, fp16: str) -> None:
    """Write bf16, fp16 or fp32 (bf16: false); `auto` is the default here."""
    values = {key: str(done.take(key)).lower() for key in (bf16, fp16)}
    for ours, key in (("bf16", bf16), ("fp16", fp16)):
        if values[key] in ("true", "full"):
            write_half(done, ours, key)
        elif values[key] == "auto":
            done.keep(key)
    if values[bf16] in ("false", "no", "0") and values[fp16] not in ("true", "full"):
        write_fp32(done, bf16)
    if done.lines.get("bf16") != Line(False, bf16):
        done.differ(
            "precision: trainable weights are kept in fp32 and computed in bf16, which needs more memory than bf16 "
            "weights; pure_bf16: true keeps them in bf16."
        )


def write_fp32(done: Conversion, key: str) -> None:
    """Write fp32, since GPUs default to half precision; pure_bf16 overrides it."""
    if done.values.get("pure_bf16") is True:
        done.keep(key)
    else:
        done.put("bf16", False, key)


def write_half(done: Conversion, name: str, key: str) -> None:
    """Write bf16 or fp16; fp16 needs a GPU and is the default on GPUs without bf16."""
    if name == "bf16":
        done.put("bf16", True, key)
    else:
        done.on_gpus["fp16"] = Line(True, key)
        done.differ(f"{key}: GPUs without bf16 use fp16 automatically; uncomment fp16 to use it on others.")


def attention(done: Conversion, *keys: str) -> None:
    """Write the attention implementation; FlashAttention needs a GPU and sdpa is the default."""
    key, value = done.first(*keys)
    names = {"flash_attn": "flash_attention_2", "fa2": "flash_attention_2", "fa3": "flash_attention_3",
             "disabled": "eager"}  # fmt: skip
    name = names.get(value, value)
    if name == "eager":
        done.put("attn_implementation", name, key)
    elif name and "flash" in str(name):
        done.on_gpus["attn_implementation"] = Line(name, key)
    elif name in ("sdpa", "auto"):
        done.keep(key)


MODULES = {"azure_ml": "azureml", "comet_ml": "comet_ml"}  # tracker -> Python module, if the names differ


def write_trackers(done: Conversion, key: str, names: Iterable[str]) -> None:
    """Write the trackers that are installed; list the others."""
    names = [name for name in names if name not in ("none", "all", "")]
    installed = [name for name in names if name.isidentifier() and importlib.util.find_spec(MODULES.get(name, name))]
    if installed:
        done.put("report_to", installed, key)
    for name in names:
        if name not in installed:
            done.lose(key, f"{name} is not installed: pip install {name}, then set report_to: {name}")
    if not names:
        done.keep(key)


def trackers(done: Conversion, key: str) -> None:
    """Write the trackers that a key names, or the kit's default trackers that are installed."""
    write_trackers(done, key, words(done.take(key, done.defaults[key])))
    if key not in done.values:
        done.lost.pop(key, None)


def preference(done: Conversion, loss: str, origin: str | None) -> None:
    """Write the preference loss; for KTO also report how its KL term differs."""
    done.put("loss_type", loss, origin)
    done.trained |= {"preference", loss}
    if loss in ("kto", "apo_zero_unpaired"):
        done.trained.add("kto")
        done.differ(
            "loss_type kto: the KL term is averaged over the rows of an optimizer step, in TRL over a micro batch on "
            "all GPUs; rows are shuffled, in TRL they are not (train_sampling_strategy: sequential)."
        )


def weights(wanted: str = "desirable_weight", unwanted: str = "undesirable_weight") -> dict[str, Key]:
    """Return the keys of KTO's weights under the names of a kit."""
    names = {wanted: "desirable_weight", unwanted: "undesirable_weight"}
    return {theirs: Key(ours, default=1.0, only="kto") for theirs, ours in names.items()}


def modules(value: Any) -> list[str]:
    """Return the modules that get an adapter: a list, all-linear, or peft's regular expression."""
    listed = words(value) if not isinstance(value, str) or re.fullmatch(r"[\w.,\s-]*", value) else [value]
    return ["all-linear"] if {"all-linear", "all", "all_linear"} & set(listed) else listed


def quantized(done: Conversion, method: str, *keys: str) -> None:
    """Write the bits of an adapter's base. Args: method: the key of the quantization method."""
    key, bits = done.first(*keys)
    if bits in (4, 8) and done.take(method, "bnb") in ("bnb", "bitsandbytes"):
        done.put(f"load_in_{bits}bit", True, key)
    elif bits:
        done.lose(str(key), "bitsandbytes quantizes with load_in_4bit (NF4) or load_in_8bit")


@dataclass(frozen=True)
class DataSource:
    """A data set of the original file."""

    path: str  # file, folder or Hub id
    split: str | None = None  # None: train
    config: str | None = None  # Hub data sets only
    revision: str | None = None  # branch, tag or commit of a Hub data set
    columns: dict[str, str] = field(default_factory=dict)  # ours -> theirs
    weight: float = 1.0  # uses of each row in an epoch


def data(
    done: Conversion, sources: list[DataSource], key: str, name: str = "data", split_key: str = "", config_key: str = ""
) -> None:
    """Write the data sets: shared properties as arguments, the others in a mapping per data set.

    Args: split_key, config_key: the keys that set split and configuration for all data sets.
    """
    if not sources:
        return
    sources = [_full_split(done, source, key, alone=name == "data" and len(sources) == 1) for source in sources]
    default = done.lines["data_split"].value if name != "data" and "data_split" in done.lines else "train"
    sources = [replace(source, split=None) if source.split == default else source for source in sources]
    differing = [item for item in SOURCE_FIELDS if len({str(getattr(source, item)) for source in sources}) > 1]
    if name != "data" or any(source.revision for source in sources):  # no argument sets these
        differing = [item for item in SOURCE_FIELDS if any(getattr(source, item) for source in sources)]
    done.put(name, [_entry(source, differing) for source in sources], key)
    if name != "data":
        return
    shared = {item: getattr(sources[0], item) for item in SOURCE_FIELDS if item not in differing}
    if shared.get("split"):
        done.put("data_split", shared["split"], split_key or key)
    if shared.get("config"):
        done.put("data_config", shared["config"], config_key or key)
    if columns := _renamed(shared.get("columns", {})):
        done.put("columns", [f"{column}={theirs}" for column, theirs in columns.items()], key)


def files(value: Any) -> list[str]:
    """Return the training files in data_files: a text, a list, or a mapping of splits."""
    if isinstance(value, dict):
        value = value.get("train") or []
    return words(value or [])


SOURCE_FIELDS = ("split", "config", "revision", "columns")


def _full_split(done: Conversion, source: DataSource, key: str, alone: bool) -> DataSource:
    """Replace a part of a split such as train[:10%] by the full split, weighted to the same number of rows."""
    split, bracket, rest = (source.split or "").partition("[")
    if not bracket:
        return source
    part = re.fullmatch(r"(\d*)(%?):(\d*)(%?)\]", rest)
    start, end = (int(part[1] or 0), int(part[3] or 100)) if part else (0, 0)
    if part and "%" in rest and 0 <= start < end <= 100:
        done.differ(f"{key}: {source.split}: each epoch samples this share of the split (weight), not fixed rows.")
        return replace(source, split=split, weight=source.weight * (end - start) / 100)
    if part and alone and not start and part[3]:
        done.put("max_samples", end, f"{key}: {source.split}")
    else:
        done.differ(f"{key}: {source.split}: the full split is used; shorten its file, or set a weight.")
    return replace(source, split=split)


def _renamed(columns: dict[str, str]) -> dict[str, str]:
    return {column: theirs for column, theirs in columns.items() if column != theirs}


def _entry(source: DataSource, fields: list[str]) -> str | dict[str, Any]:
    """Return a data set as an entry of `data` (job/data_entry.py). fields: the properties to include."""
    if not fields:
        return source.path if source.weight == 1 else f"{source.path}:{source.weight:g}"
    entry = {"path": source.path} | {name: getattr(source, name) for name in fields}
    entry |= {"columns": _renamed(entry["columns"])} if "columns" in entry else {}
    entry |= {"weight": source.weight} if source.weight != 1 else {}
    return {name: value for name, value in entry.items() if value not in (None, {})}


def held_out(done: Conversion, key: str) -> bool:
    """Write eval_fraction, and return whether the run has rows to evaluate on."""
    share = number(done.take(key, 0) or 0)
    if share >= 1:
        done.lose(key, "this is a number of rows; eval_fraction takes a share of them")
    elif share:
        done.put("eval_fraction", share, key)
    return 0 < share < 1 or "eval_data" in done.lines


def evaluation(done: Conversion, has_rows: bool) -> None:
    """Write when to evaluate; without rows to evaluate on write only `no`."""
    keys = ("eval_strategy", "evaluation_strategy", "eval_steps", "eval_on_start")
    values = {key: number(done.take(key)) for key in keys}
    chosen = values["eval_strategy"] if values["eval_strategy"] is not None else values["evaluation_strategy"]
    chosen = "no" if chosen is False else chosen
    if done.take("do_eval") is has_rows or chosen not in (None, "no"):
        done.keep("do_eval")
    origin = next((key for key in keys[:2] if values[key] is not None), None)
    if has_rows and chosen is not None:
        done.put("eval_strategy", chosen, origin or "eval_steps")
        if chosen == "steps" and values["eval_steps"]:
            done.put("eval_steps", values["eval_steps"], "eval_steps")
        if values["eval_on_start"]:
            done.put("eval_on_start", True, "eval_on_start")
    elif chosen not in (None, "no"):
        done.lose(str(origin), "the eval split of a Hub data set is used automatically; otherwise set eval_data or "
                               "eval_fraction")  # fmt: skip
    else:
        done.put("eval_strategy", "no", origin)


def saving(done: Conversion, strategy: str = "steps", limit: int = 0) -> None:
    """Write when to save: the file's setting, or the kit's default."""
    chosen, count = done.take("save_strategy"), number(done.take("save_steps"))
    chosen = "no" if chosen is False else chosen
    done.put("save_strategy", chosen or ("steps" if count else strategy), "save_strategy" if chosen else None)
    if done.lines["save_strategy"].value == "steps":
        done.put("save_steps", count or 500, "save_steps" if count else None)
    value = done.take("save_total_limit")
    done.put("save_total_limit", limit if value is None else value, None if value is None else "save_total_limit")


# Rules of the kits built on transformers' Trainer.
RULES = (
    Shared("warmup_steps warmup_ratio", "warmup_steps", warmup),
    Rule("save_strategy save_steps save_total_limit", "the same", saving),
    Shared("optim", "the same", optimizer),
    Shared("bf16 fp16", "the same", precision),
    Shared("deepspeed", "zero, offload", sharding.deepspeed),
    Shared("fsdp fsdp_config", "zero, offload", sharding.fsdp, sharding.FSDP_NOTE),
    Shared("report_to", "the same", trackers),
)
