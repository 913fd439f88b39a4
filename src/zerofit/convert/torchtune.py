"""The key table for torchtune, whose sections name Python objects (`_component_`)."""

import re
from pathlib import Path
from typing import Any

from zerofit.convert import sharding, shared
from zerofit.convert.conversion import Conversion, Key, Kit, Rule, Shared, number

# Data set builder -> (default source, whether it also trains on the prompt, columns).
SETS: dict[str, tuple[str | None, bool, dict[str, str]]] = {
    "alpaca_dataset": ("tatsu-lab/alpaca", True, {}),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", True, {}),
    "grammar_dataset": ("liweili/c4_200m", False, {"prompt": "input", "completion": "output"}),
    "samsum_dataset": ("Samsung/samsum", False, {"prompt": "dialogue", "completion": "summary"}),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", False, {}),
    "chat_dataset": (None, False, {}),
    "instruct_dataset": (None, False, {"prompt": "input", "completion": "output"}),
    "text_completion_dataset": (None, True, {}),
    "cnn_dailymail_articles_dataset": ("ccdv/cnn_dailymail", True, {"text": "article"}),
    "wikitext_dataset": ("EleutherAI/wikitext_document_level", True, {"text": "page"}),
    "stack_exchange_paired_dataset": ("lvwerra/stack-exchange-paired", False,
                                      {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}),
    "hh_rlhf_helpful_dataset": ("RLHFlow/HH-RLHF-Helpful-standard", False, {}),
    "preference_dataset": (None, False, {}),
}  # fmt: skip

FLAT = ("model_checkpoint", "tokenizer_checkpoint", "num_warmup_steps", "lora_checkpoint")  # keys of 0.0, not nested

CLASSES = {
    "AlpacaDataset": "alpaca_dataset",
    "SamsumDataset": "samsum_dataset",
    "SlimOrcaDataset": "slimorca_dataset",
    "GrammarDataset": "grammar_dataset",
}  # names before version 0.1

OPTIMIZERS = {"AdamW": "adamw_torch", "Adam": "adamw_torch", "AdamW8bit": "adamw_8bit", "PagedAdamW8bit":
              "paged_adamw_8bit", "PagedAdamW": "paged_adamw_32bit", "SGD": "sgd",
              "AdamW4bit": "adamw_torch_4bit"}  # fmt: skip


def _recipe(done: Conversion) -> None:
    """Choose the recipe from the loss (DPO) and the model's builder (lora_..., qlora_...)."""
    if key := next((key for key in FLAT if key in done.values), None):
        done.refuse(key, "files of torchtune before 0.1 (without sections) are not supported")
    model, loss = str(done.take("model._component_", "")), str(done.take("loss._component_", ""))
    for key, task in (("teacher_model._component_", "distillation"), ("quantizer._component_", "quantized training"),
                      ("policy_model._component_", "PPO"), ("tasks", "evaluation")):  # fmt: skip
        if key in done.values and (task != "quantized training" or "dataset" not in done.values):
            done.refuse(key.partition(".")[0], f"{task} is not supported; zerofit trains SFT, LoRA and preferences")
    if loss and not re.search(r"(^|\.)(CE|\w*CrossEntropy|DPO)\w*$", loss):
        done.refuse(f"loss: {loss}", shared.OTHER_LOSS)
    if not any(key.startswith(("dataset", "optimizer")) for key in done.values):
        done.refuse("optimizer", "is missing; the file trains nothing (it generates, evaluates or quantizes)")
    if not model or "vision" in model or "clip" in model:
        done.refuse(f"model: {model or 'none'}", "not supported; zerofit trains language models on text")
    builder = model.rpartition(".")[2]
    adapter = builder.startswith(("lora_", "qlora_", "dora_"))
    kind, keys = "lora" if adapter else "", ("model._component_", "loss._component_")
    done.choose("dpo" if "DPOLoss" in loss else kind or "sft", *keys, adapter=kind, origin="model")
    if done.recipe == "dpo":
        shared.preference(done, "sigmoid", "loss")
    if adapter:
        _adapter(done, builder)
    if any(key.startswith("quantizer.") for key in done.values):
        done.lose("quantizer", "unsupported quantized training; the unquantized weights are trained")
    _model(done)


def _adapter(done: Conversion, builder: str) -> None:
    """Write the adapter's modules and the options implied by its builder."""
    modules = ["o_proj" if name == "output_proj" else name for name in done.take("model.lora_attn_modules", [])]
    if done.take("model.apply_lora_to_mlp"):
        modules += ["gate_proj", "up_proj", "down_proj"]
    if done.take("model.apply_lora_to_output"):
        modules.append("lm_head")
    keys = ("model.lora_attn_modules", "model.apply_lora_to_mlp", "model.apply_lora_to_output")
    done.put("lora_target_modules", modules, ", ".join(key for key in keys if key in done.values))
    if "phi3" in builder:
        done.differ("lora_attn_modules: Phi-3 has fused qkv_proj and gate_up_proj: set these in lora_target_modules.")
    for kind, key, ours in (("qlora_", "model.quantize_base", "load_in_4bit"), ("dora_", "model.use_dora", "use_dora")):
        if done.take(key) or builder.startswith(kind):
            done.put(ours, True, key if done.values.get(key) else "model._component_")


def _model(done: Conversion) -> None:
    folder = done.take("checkpointer.checkpoint_dir", "").rstrip("/")
    kind = str(done.take("checkpointer._component_", ""))
    if "Meta" in kind and Path(folder).name == "original":
        folder = str(Path(folder).parent)
        done.differ(
            "checkpoint_dir: Meta's consolidated weights are not supported; the Hugging Face weights in the parent "
            "folder are used."
        )
    if folder:
        done.put("model", folder, "checkpointer.checkpoint_dir, checkpointer._component_")


def _data(done: Conversion) -> None:
    """Convert one data set or a list of them by their builders."""
    entries = done.take("dataset", [])
    entries = entries if isinstance(entries, list) else [entries]
    sources, masks = [], set()
    for entry in entries:
        entry_sources, on_prompt = _sources(done, entry)
        sources += entry_sources
        masks.add(on_prompt)
    shared.data(done, sources, "dataset")
    packed = any(entry.get("packed") for entry in entries) or done.take("packed", False)
    in_set = any("packed" in entry for entry in entries)
    done.put("packing", bool(packed), "dataset: packed" if in_set else "packed" if "packed" in done.values else None)
    if done.recipe != "dpo":
        key = "dataset: train_on_input" if any("train_on_input" in entry for entry in entries) else None
        done.put("train_on", "all" if True in masks else "assistant", key)
    share = done.take("dataset_val.split") or done.take("dataset_validation.split")
    if share:
        done.lose("dataset_val", "set eval_data or eval_fraction")


def _sources(done: Conversion, entry: dict[str, Any]) -> tuple[list[shared.DataSource], bool]:
    builder = str(entry.get("_component_", "")).rpartition(".")[2]
    builder = CLASSES.get(builder, builder)
    source, on_prompt, columns = SETS.get(builder, (None, False, {}))
    if builder not in SETS:
        done.lose(f"dataset: {builder}", "custom data set: set data to its files (docs/data.md)")
    paths = shared.files(entry.get("data_files")) or [entry.get("source") or source or builder]
    if entry.get("conversation_style") not in ("sharegpt", "openai", None):
        done.lose("dataset: conversation_style", "turns are read as role/content or from/value")
    if entry.get("source") in ("json", "csv", "parquet", "text") and not entry.get("data_files"):
        done.lose("dataset.data_files", "set data to the file")
    mapped = dict(columns)
    for ours, theirs in (entry.get("column_map") or {}).items():
        mapped[{"input": "prompt", "output": "completion"}.get(ours, ours)] = theirs
    if builder == "alpaca_dataset" and entry.get("column_map"):
        mapped = dict(entry["column_map"])
    for key, ours in (("conversation_column", "messages"), ("column", "text")):
        if entry.get(key) and entry[key] not in ("conversations", "messages", "text"):
            mapped[ours] = entry[key]
    split = entry.get("split") or "train"
    for key in ("new_system_prompt", "prompt_template", "filter_fn", "image_tag", "image_dir"):
        if entry.get(key):
            done.lose(f"dataset.{key}", "rows are formatted by the chat template only")
    columns = {ours: theirs for ours, theirs in mapped.items() if ours != theirs}
    options = split, entry.get("name"), entry.get("revision"), columns
    return [shared.DataSource(path, *options) for path in paths], bool(entry.get("train_on_input", on_prompt))


def _kind(done: Conversion) -> str:
    """Return the optimizer's class name."""
    return str(done.take("optimizer._component_", "torch.optim.AdamW")).rpartition(".")[2]


def _decay(done: Conversion) -> float:
    return 0.01 if _kind(done) in ("AdamW", "AdamW8bit", "PagedAdamW8bit", "PagedAdamW", "AdamW4bit") else 0.0


def _training(done: Conversion) -> None:
    """Convert steps, optimizer and schedule; without a schedule the learning rate is constant."""
    if limit := done.take("max_steps_per_epoch"):
        done.put("max_steps", number(limit) * number(done.take("epochs", 1)), "max_steps_per_epoch x epochs")
        done.differ("max_steps_per_epoch: max_steps is reached even if an epoch has fewer steps.")
    kind = _kind(done)
    shared.optimizer(done, "optimizer._component_", OPTIMIZERS.get(kind, kind))
    for index, value in enumerate(done.take("optimizer.betas") or [], 1):
        done.put(f"adam_beta{index}", value, "optimizer.betas")
    kind, warm = str(done.take("lr_scheduler._component_", "")), done.take("lr_scheduler.num_warmup_steps", 0)
    if kind and "cosine" not in kind:
        done.lose("lr_scheduler._component_", f"unsupported schedule {kind.rpartition('.')[2]}; replaced by cosine")
    done.put("lr_scheduler_type", "cosine" if kind else "constant", "lr_scheduler._component_" if kind else None)
    done.put("warmup_steps", warm if kind else 0, "lr_scheduler.num_warmup_steps" if kind else None)
    clip = done.take("clip_grad_norm")
    done.put("max_grad_norm", 0 if clip in (None, "None") else clip, "clip_grad_norm" if clip else None)
    done.put("save_strategy", "epoch")
    done.put("save_total_limit", 0)


def _machine(done: Conversion) -> None:
    """Convert max_length, dtype, checkpointing, FSDP and trackers."""
    length = done.take("tokenizer.max_seq_len")
    if length:
        done.put("max_length", length, "tokenizer.max_seq_len")
    else:
        shared.error_on_long_rows(done, "torchtune never truncates rows")
    dtype = done.take("dtype", "bf16")
    if dtype == "fp32":
        shared.write_fp32(done, "dtype")
    elif dtype == "bf16":
        if done.recipe == "sft":
            done.put("pure_bf16", True, "dtype")
        else:
            done.put("bf16", True, "dtype")
            done.differ("dtype: adapters and their optimizer states are kept in fp32; torchtune keeps them in bf16.")
    if done.take("enable_activation_offloading"):
        done.put("activation_offload", True, "enable_activation_offloading")
    checkpointing = done.take("enable_activation_checkpointing")
    if checkpointing is not None:
        done.put("gradient_checkpointing", checkpointing or "activation_offload" in done.lines,
                 "enable_activation_checkpointing")  # fmt: skip
    if done.take("enable_fsdp"):
        done.put("zero", 3, "enable_fsdp")
    key, offloads = done.first("fsdp_cpu_offload", "cpu_offload")
    if offloads:
        done.put("zero", 3, key)
        done.put("offload", "all", key)
    logger = str(done.take("metric_logger._component_", ""))
    loggers = {"wandb": "WandB", "tensorboard": "TensorBoard", "comet_ml": "Comet"}
    names = [name for name, word in loggers.items() if word in logger]
    if names or logger.endswith(("StdoutLogger", "DiskLogger")):
        shared.write_trackers(done, "metric_logger._component_", names)
    done.differ("sharding: torchtune's distributed recipes use FSDP; the equivalent is zero: 3 (default: 2).")


KIT = Kit(
    name="torchtune",
    version="0.6.1",
    marks=(
        "model._component_", "tokenizer._component_", "checkpointer._component_", "dataset._component_",
        "optimizer._component_", "metric_logger._component_", "loss._component_", *FLAT,
    ),
    keys={
        "model.lora_rank": Key("lora_r", default=8, only="adapter"),
        "model.lora_alpha": Key("lora_alpha", default=16, only="adapter"),
        "model.lora_dropout": Key("lora_dropout", default=0.0, only="adapter"),
        "loss.beta": Key("beta", default=0.1, only="preference"),
        "loss.label_smoothing": Key("label_smoothing", only="preference"),
        "epochs": Key("num_train_epochs", default=1),
        "optimizer.lr": Key("learning_rate", default=1e-3),
        "optimizer.eps": Key("adam_epsilon"),
        "optimizer.weight_decay": Key("weight_decay", default=_decay, page="0.01 for AdamW, otherwise 0"),
        "seed": Key("seed", default_note="torchtune uses a random seed; the default here is 42"),
        "output_dir": Key("output_dir"),
        "log_every_n_steps": Key("logging_steps"),
        "shuffle": Key("train_sampling_strategy", values={True: None, False: "sequential"}),
    },
    rules=(
        Rule("model checkpointer loss", "recipe sft, lora or dpo; model", _recipe,
             "the model is the checkpoint folder"),
        Rule("model.lora_attn_modules model.apply_lora_to_mlp model.apply_lora_to_output model.quantize_base "
             "model.use_dora", "lora_target_modules, load_in_4bit, use_dora",
             note="qlora_ and dora_ builders set load_in_4bit, use_dora"),
        Rule("dataset", "data, columns, data_split, train_on, packing", _data, "alpaca also trains on the prompt"),
        Shared("tensor_parallel_dim", "tp_size", sharding.split_layers),
        Shared("batch_size gradient_accumulation_steps", "per_device_train_batch_size, gradient_accumulation_steps",
               shared.batch, "default: batch 2"),
        Rule("max_steps_per_epoch optimizer lr_scheduler clip_grad_norm",
             "max_steps, optim, adam_beta1, lr_scheduler_type, warmup_steps, max_grad_norm", _training,
             "default: constant learning rate, no clipping"),
        Rule("tokenizer.max_seq_len", "max_length"),
        Rule("dtype enable_activation_checkpointing enable_activation_offloading fsdp_cpu_offload metric_logger",
             "pure_bf16, gradient_checkpointing, activation_offload, zero, offload, report_to", _machine),
    ),
    lost={
        "the tokenizer is read from the model folder": "tokenizer",
        "all files of the model folder are read": "checkpointer ref_checkpointer",
        "formats are detected from the columns; rows are formatted by the chat template": "dataset.*",
        "continue a run with zerofit resume": (
            "resume_from_checkpoint save_adapter_weights_only enable_async_checkpointing "
            "keep_last_n_checkpoints save_last_epoch_only"
        ),
        "compile_layers: true compiles the decoder layers": "compile*",
        "the loss is computed in chunks automatically (fused_loss)": "loss num_output_chunks",
        "not needed here": (
            "device log_peak_memory_stats log_level custom_sharded_layers fsdp_reshard_after_forward "
            "optimizer_in_bwd optimizer.fused cudnn_deterministic_mode metric_logger ac_mode ac_option "
            "memory_efficient_fsdp_wrap "
            "run_generation tensor_parallel_plan quantizer run_val_every_n_steps batch_size_val base_dir model_dir"
        ),
        "memory_report: true records the memory of a step": "profiler",
    },
    meaning=(
        "template: torchtune's tokenizers use the model family's prompt format and wrap Alpaca rows in `### "
        "Instruction:`; zerofit uses the model's chat template.",
    ),
    nested=True, list_section="dataset",
    defaults={"log_peak_memory_stats": True, "fsdp_reshard_after_forward": True, "dtype": "bf16", "batch_size": 2},
)  # fmt: skip
