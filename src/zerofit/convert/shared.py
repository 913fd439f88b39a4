"""Convert what several kits have in common: batches, schedules, evaluation, adapters, data."""

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from zerofit.convert import sharding
from zerofit.convert.conversion import Conversion, Key, Line, Rule, Shared, number, words

GPU = {"tf32": Key("tf32", asked=True, values={"auto": None}, on_gpu=True),
       "use_liger_kernel": Key("use_liger_kernel", asked=True, on_gpu=True)}  # fmt: skip

# transformers' TrainingArguments, which TRL, LLaMA-Factory and ms-swift have under the same names, with its defaults
# (version 5.23) where ours are others, or where a converted file should say what it trains.
TRAINING = GPU | {
    "num_train_epochs": Key("num_train_epochs", default=3.0),
    "max_steps": Key("max_steps", values={-1: None, 0: None}),
    "learning_rate": Key("learning_rate", default=5e-5),
    "lr_scheduler_type": Key("lr_scheduler_type", default="linear"),
    "lr_scheduler_kwargs": Key("lr_scheduler_kwargs", asked=True),
    "weight_decay": Key("weight_decay", default=0.0),
    "max_grad_norm": Key("max_grad_norm", default=1.0, values={None: 0}),
    "optim": Key("optim", default="adamw_torch_fused"),
    "seed": Key("seed", default=42),
}

# transformers' defaults that are not off, of arguments that are listed where a file has another.
DEFAULTS = {"remove_unused_columns": True, "average_tokens_across_devices": True, "skip_memory_metrics": True,
            "eval_do_concat_batches": True, "save_safetensors": True, "report_to": "none"}  # fmt: skip

# The same for a recipe's page: names that are passed on as they are.
SAME = "learning_rate lr_scheduler_type weight_decay max_grad_norm optim seed, and transformers' other arguments"

# Reasons of Kit.refused.
OTHER_LOSS = "trains with a loss that zerofit does not have"
SOME_WEIGHTS = "trains a part of the weights; here all weights train (sft, dpo), or an adapter (lora)"

NO_COUNTERPART = {
    "of a DeepSpeed file only stage and offload are taken; all of it runs with --deepspeed FILE": "deepspeed.*",
    sharding.FSDP_NOTE: "fsdp_config.*",
    "not needed: the tokenizer and the model class come from the model's own files": "tokenizer_type model_type "
    "tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_name_or_path use_fast_tokenizer processor_type "
    "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model model_code_revision",
    "the project's name is an environment variable (WANDB_PROJECT), and run_name names the run": "wandb_* "
    "mlflow_* comet_* swanlab_* trackio_* use_mlflow use_comet use_swanlab use_trackio logging_dir",
    "name a new output_dir, or resume with zerofit resume": "overwrite_output_dir auto_resume_from_checkpoints",
    "tokenized rows are cached by themselves ($ZEROFIT_CACHE)": "overwrite_cache dataset_prepared_path "
    "load_from_cache_file preprocessing_batch_size tokenized_path cache_dir data_shared_file_system",
    "report.html has the curves of each run": "plot_loss",
    "nothing to set: log in with `hf auth login`": "hub_token hf_hub_token ms_hub_token use_hf hf_use_auth_token",
    "rows of similar length: train_sampling_strategy: group_by_length": "group_by_length",
    "ray starts zerofit with launchers/ray (docs/ray.md)": "use_ray ray_* resources_per_worker placement_strategy "
    "device_groups",
    "special tokens are the tokenizer's own; words as one token each: new_tokens": "special_tokens "
    "new_special_tokens_config init_special_tokens add_special_tokens split_special_tokens added_tokens_overrides "
    "eot_tokens resize_vocab resize_token_embeddings_to_32x default_system_message default_system tool_format",
    "the system turn is a turn of the rows": "system system_prompt",
    "checkpointing is non-reentrant here, with the same result": "gradient_checkpointing_kwargs use_reentrant_gc",
    "zerofit chat and export follow the training": "export_dir export_size export_device export_legacy_format",
}


def batch(done: Conversion, micro: str, accumulation: str) -> None:
    """Write micro batch and accumulation, or for a known number of GPUs the effective batch.

    Args: micro, accumulation: their keys.
    """
    sizes = []
    for name, key in (("per_device_train_batch_size", micro), ("gradient_accumulation_steps", accumulation)):
        value = number(done.take(key))
        sizes.append(done.defaults.get(key, 1) if value in (None, "auto") else value)
        done.put(name, sizes[-1], None if value is None else key)
    of_one = sizes[0] * sizes[1]
    if not done.gpus:
        done.differ(
            f"effective batch: {of_one} x the number of GPUs (less those that share a row), as in {done.kit.name}; on "
            "another number of GPUs than there, write effective_batch_size and leave gradient_accumulation_steps out."
        )
        return
    ranks = done.gpus
    for name in ("sp_size", "tp_size"):
        ranks //= done.lines[name].value if name in done.lines else 1
    done.put("effective_batch_size", of_one * ranks, f"the batch of {done.gpus} GPUs")
    done.lines.pop("gradient_accumulation_steps")  # follows from the number of GPUs


def warmup(done: Conversion, steps: str, ratio: str, default: float = 0) -> None:
    """Write the warm-up: steps, else a share of all steps, else the kit's default. Args: steps, ratio: their keys."""
    count, share = number(done.take(steps, 0)), number(done.take(ratio, 0))
    given = next((key for key in (steps, ratio) if done.given.get(key) is not None), None)
    if count:
        done.put("warmup_steps", count, steps)
    elif share or given:
        done.put("warmup_steps", share or 0, ratio if share else given)
    else:
        done.put("warmup_steps", default)


# Theirs -> ours, of the optimizers that both have.
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


def uncut(done: Conversion, theirs: str, key: str | None = None) -> None:
    """Let a row longer than max_length end the run, for a file that names no length, or with `key` that there is none.

    Args: theirs: what the kit does then.
    """
    done.put("truncation", "error", key)
    done.differ(
        f"max_length: {theirs}; here a row of more than 2048 tokens ends the run (truncation: error), so that none is "
        "changed: write the longest row's length as max_length."
    )


def optimizer(done: Conversion, key: str, value: str | None = None, default: str = "adamw_torch_fused") -> None:
    """Write the optimizer of a key, unless another key has said it.

    A paged one is for GPUs, and its update that of the one without pages. Args: value: ours, of a kit with other names.
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
        done.lose(key, f"no optimizer {name} here, adamw_torch_fused is written instead (docs/optimizers.md)")
        done.put("optim", "adamw_torch_fused", f"instead of {name}")


def precision(done: Conversion, bf16: str, fp16: str) -> None:
    """Write bf16 or fp16 where they are asked for, and bf16 false for fp32; `auto` is what happens here without."""
    asked = {key: str(done.take(key)).lower() for key in (bf16, fp16)}
    for ours, key in (("bf16", bf16), ("fp16", fp16)):
        if asked[key] in ("true", "full"):
            half(done, ours, key)
        elif asked[key] == "auto":
            done.keep(key)
    if asked[bf16] in ("false", "no", "0") and asked[fp16] not in ("true", "full"):
        single(done, bf16)
    if done.lines.get("bf16") != Line(False, bf16):
        done.differ(
            "precision: weights that train are kept in fp32 and computed in bf16, which needs more memory than bf16 "
            "weights; pure_bf16: true keeps them in bf16."
        )


def single(done: Conversion, key: str) -> None:
    """Write fp32: without a line a GPU computes in half precision; bf16 weights do so in any case."""
    if done.given.get("pure_bf16") is True:
        done.keep(key)
    else:
        done.put("bf16", False, key)


def half(done: Conversion, name: str, key: str) -> None:
    """Write bf16; fp16 is for GPUs, as it needs a loss scaler, and chosen there by itself where bf16 is missing."""
    if name == "bf16":
        done.put("bf16", True, key)
    else:
        done.on_gpus["fp16"] = Line(True, key)
        done.differ(f"{key}: fp16 is chosen by itself on GPUs without bf16 arithmetic; on others take the # away.")


def attention(done: Conversion, *keys: str) -> None:
    """Write FlashAttention for GPUs; sdpa is the default."""
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


MODULES = {"azure_ml": "azureml", "comet_ml": "comet_ml"}  # of trackers whose module has another name


def report(done: Conversion, key: str, names: Iterable[str]) -> None:
    """Write the trackers that are installed; list the others."""
    names = [name for name in names if name not in ("none", "all", "")]
    here = [name for name in names if name.isidentifier() and importlib.util.find_spec(MODULES.get(name, name))]
    if here:
        done.put("report_to", here, key)
    for name in names:
        if name not in here:
            done.lose(key, f"{name} is not installed here: pip install {name}, then report_to: {name}")
    if not names:
        done.keep(key)


def trackers(done: Conversion, key: str) -> None:
    """Write the trackers that a key names, else those of the kit that are installed."""
    report(done, key, words(done.take(key, done.defaults[key])))
    if key not in done.given:
        done.lost.pop(key, None)


def preference(done: Conversion, loss: str, origin: str | None) -> None:
    """Write the loss of a preference; of KTO also say where its KL term differs."""
    done.put("loss_type", loss, origin)
    done.trained |= {"preference", loss}
    if loss in ("kto", "apo_zero_unpaired"):
        done.trained.add("kto")
        done.differ(
            "loss_type kto: the KL term is a mean over the rows of an optimizer step, in TRL of a micro batch on all "
            "GPUs; rows are shuffled, in TRL they are not (train_sampling_strategy: sequential)."
        )


def weights(wanted: str = "desirable_weight", unwanted: str = "undesirable_weight") -> dict[str, Key]:
    """Return the keys of KTO's weights by their names."""
    names = {wanted: "desirable_weight", unwanted: "undesirable_weight"}
    return {theirs: Key(ours, default=1.0, only="kto") for theirs, ours in names.items()}


def modules(value: Any) -> list[str]:
    """Return the modules that get an adapter, of a list, all-linear, or a regular expression as a text, as in peft."""
    listed = words(value) if not isinstance(value, str) or re.fullmatch(r"[\w.,\s-]*", value) else [value]
    return ["all-linear"] if {"all-linear", "all", "all_linear"} & set(listed) else listed


def quantized(done: Conversion, method: str, *keys: str) -> None:
    """Write in how many bits the base of an adapter is. Args: method: the key of what makes them so."""
    key, bits = done.first(*keys)
    if bits in (4, 8) and done.take(method, "bnb") in ("bnb", "bitsandbytes"):
        done.put(f"load_in_{bits}bit", True, key)
    elif bits:
        done.lose(str(key), "load_in_4bit (NF4) or load_in_8bit, by bitsandbytes")


@dataclass(frozen=True)
class Source:
    """A data set of the original."""

    path: str  # file, folder or hub id
    split: str | None = None  # None: train
    config: str | None = None  # of a hub set
    revision: str | None = None  # branch, tag or commit of a hub set
    columns: dict[str, str] = field(default_factory=dict)  # ours -> theirs
    weight: float = 1.0  # how often each row is used in an epoch


def data(
    done: Conversion, sources: list[Source], key: str, name: str = "data", split_key: str = "", config_key: str = ""
) -> None:
    """Write the data sets: what all of them have in common as arguments, the rest as a mapping of each.

    Args: split_key, config_key: the keys of all sets' split and configuration, where they are not keys of a set.
    """
    if not sources:
        return
    sources = [_whole_split(done, source, key, alone=name == "data" and len(sources) == 1) for source in sources]
    usual = done.lines["data_split"].value if name != "data" and "data_split" in done.lines else "train"
    sources = [replace(source, split=None) if source.split == usual else source for source in sources]
    several = [of for of in OF_A_SET if len({str(getattr(source, of)) for source in sources}) > 1]
    if name != "data" or any(source.revision for source in sources):  # the arguments are of the rows to train on
        several = [of for of in OF_A_SET if any(getattr(source, of) for source in sources)]
    done.put(name, [_entry(source, several) for source in sources], key)
    if name != "data":
        return
    of_all = {of: getattr(sources[0], of) for of in OF_A_SET if of not in several}
    if of_all.get("split"):
        done.put("data_split", of_all["split"], split_key or key)
    if of_all.get("config"):
        done.put("data_config", of_all["config"], config_key or key)
    if columns := _renamed(of_all.get("columns", {})):
        done.put("columns", [f"{column}={theirs}" for column, theirs in columns.items()], key)


def files(value: Any) -> list[str]:
    """Return the files to train on of a set's data_files: a text, a list, or a mapping of splits to them."""
    if isinstance(value, dict):
        value = value.get("train") or []
    return words(value or [])


OF_A_SET = ("split", "config", "revision", "columns")


def _whole_split(done: Conversion, source: Source, key: str, alone: bool) -> Source:
    """Return a source of a part such as train[:10%] as one of the whole split that gives an epoch as many rows."""
    split, bracket, rest = (source.split or "").partition("[")
    if not bracket:
        return source
    part = re.fullmatch(r"(\d*)(%?):(\d*)(%?)\]", rest)
    start, end = (int(part[1] or 0), int(part[3] or 100)) if part else (0, 0)
    if part and "%" in rest and 0 <= start < end <= 100:
        done.differ(f"{key}: {source.split}: an epoch takes as many rows of the split (weight), not always the same.")
        return replace(source, split=split, weight=source.weight * (end - start) / 100)
    if part and alone and not start and part[3]:
        done.put("max_samples", end, f"{key}: {source.split}")
    else:
        done.differ(f"{key}: {source.split}: rows of the whole split are used; cut its file, or weigh the set.")
    return replace(source, split=split)


def _renamed(columns: dict[str, str]) -> dict[str, str]:
    return {column: theirs for column, theirs in columns.items() if column != theirs}


def _entry(source: Source, apart: list[str]) -> str | dict[str, Any]:
    """Return a data set as an entry of `data` (job/data_entry.py). apart: what it has for itself."""
    if not apart:
        return source.path if source.weight == 1 else f"{source.path}:{source.weight:g}"
    own = {"path": source.path} | {of: getattr(source, of) for of in apart}
    own |= {"columns": _renamed(own["columns"])} if "columns" in own else {}
    own |= {"weight": source.weight} if source.weight != 1 else {}
    return {of: value for of, value in own.items() if value not in (None, {})}


def held_out(done: Conversion, key: str) -> bool:
    """Write the share of the rows to evaluate on, and return whether the run has such rows."""
    share = number(done.take(key, 0) or 0)
    if share >= 1:
        done.lose(key, "a number of rows: eval_fraction takes a share of them")
    elif share:
        done.put("eval_fraction", share, key)
    return 0 < share < 1 or "eval_data" in done.lines


def evaluation(done: Conversion, has_rows: bool) -> None:
    """Write when to evaluate, where there are rows to evaluate on; `no` is written in any case."""
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
        done.lose(str(origin), "a hub set's own eval split is used by itself; else name rows with eval_data, or "
                               "eval_fraction")  # fmt: skip
    else:
        done.put("eval_strategy", "no", origin)


def saving(done: Conversion, strategy: str = "steps", limit: int = 0) -> None:
    """Write when to save: as the file says, else as the kit does."""
    chosen, count = done.take("save_strategy"), number(done.take("save_steps"))
    chosen = "no" if chosen is False else chosen
    done.put("save_strategy", chosen or ("steps" if count else strategy), "save_strategy" if chosen else None)
    if done.lines["save_strategy"].value == "steps":
        done.put("save_steps", count or 500, "save_steps" if count else None)
    kept = done.take("save_total_limit")
    done.put("save_total_limit", limit if kept is None else kept, "save_total_limit" if kept is not None else None)


# Rules of the kits on transformers' trainer.
RULES = (
    Shared("warmup_steps warmup_ratio", "warmup_steps", warmup),
    Rule("save_strategy save_steps save_total_limit", "the same", saving),
    Shared("optim", "the same", optimizer),
    Shared("bf16 fp16", "the same", precision),
    Shared("deepspeed", "zero, offload", sharding.deepspeed),
    Shared("fsdp fsdp_config", "zero, offload", sharding.fsdp, sharding.FSDP_NOTE),
    Shared("report_to", "the same", trackers),
)
