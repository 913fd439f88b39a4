"""The table of ms-swift's keys."""

from typing import Any

from zerofit.convert import sharding, shared
from zerofit.convert.conversion import Conversion, Key, Kit, Rule, Shared, number, words
from zerofit.convert.templates import template

PREFERENCE = {"dpo": "sigmoid", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}

OTHER_JOBS = "not supported; zerofit trains SFT, LoRA and preferences (dpo, orpo, simpo, kto)"

TRUNCATIONS = {"delete": "drop", "left": "truncate_left", "right": "truncate_right", "split": "truncate_right"}

ADAPTERS = ("lora", "ia3", "oft", "vera")


def _recipe(done: Conversion) -> None:
    """Choose recipe, preference loss and adapter from `tuner_type` and `rlhf_type`."""
    key, kind = done.first("tuner_type", "train_type", "sft_type")
    kind = kind or "lora"
    rl = done.take("rlhf_type")
    if rl and rl not in PREFERENCE:
        done.refuse(f"rlhf_type: {rl}", OTHER_JOBS)
    if done.take("task_type", "causal_lm") != "causal_lm":
        done.refuse("task_type", OTHER_JOBS)
    if kind != "full" and kind not in ADAPTERS:
        done.refuse(f"tuner_type: {kind}", f"not supported; use one of {', '.join(ADAPTERS)} (docs/adapters.md)")
    if "dpo" in done.file.stem and not rl and not done.recipe:
        done.differ("rlhf_type: not set; `swift rlhf` defaults to dpo: convert it with --recipe dpo.")
    recipe, adapter = ("sft", "") if kind == "full" else ("lora", kind)
    done.choose("dpo" if rl else recipe, "rlhf_type", key or "tuner_type", adapter=adapter, origin="tuner_type")
    if done.recipe == "dpo":
        losses = words(done.take("loss_type", []))
        if len(losses) > 1:
            done.refuse("loss_type", "zerofit supports one loss at a time")
        loss = losses[0] if losses else PREFERENCE[rl or "dpo"]
        shared.preference(done, loss, "loss_type" if losses else "rlhf_type")
    if not adapter:
        return
    shared.quantized(done, "quant_method", "quant_bits", "quantization_bit")
    weights = str(done.take("init_weights", "true")).lower()
    if weights not in ("true", "false"):
        done.put("init_lora_weights", weights, "init_weights")
    elif weights == "true":
        done.keep("init_weights")


def _data(done: Conversion) -> None:
    """Convert data sets, written as id:subset#count, and the mask."""
    for key, ours in (("dataset", "data"), ("val_dataset", "eval_data")):
        value = done.take(key, [])
        texts = [str(text) for text in value] if isinstance(value, list) else str(value).split() if value else []
        sources = [_source(done, key, text, alone=len(texts) == 1) for text in texts]
        shared.data(done, sources, key, ours)
        if any("/" in source.path and "." not in source.path for source in sources):
            done.differ(f"{key}: zerofit resolves ids on the Hugging Face Hub, ms-swift on ModelScope (unless use_hf).")
    shuffled = [done.take(key, True) for key in ("dataset_shuffle", "train_dataloader_shuffle")]
    if shuffled == [False, False] or (done.values.get("streaming") is True and not shuffled[0]):
        done.put("train_sampling_strategy", "sequential", "dataset_shuffle, train_dataloader_shuffle")
    if isinstance(columns := done.take("columns"), dict):  # {name in the file: standard name}
        names = {"query": "prompt", "response": "completion", "rejected_response": "rejected"}
        done.put("columns", [f"{names.get(to, to)}={name}" for name, to in columns.items()], "columns")
    if done.recipe == "dpo":
        return
    scale = str(done.take("loss_scale", "default"))
    meaning = {"default": "assistant", "last_round": "last_turn", "all": "all", "ignore_empty_think": "assistant"}
    parts = scale.split("+")
    done.put("train_on", next((meaning[part] for part in parts if part in meaning), "assistant"),
             "loss_scale" if "loss_scale" in done.values else None)  # fmt: skip
    if "ignore_empty_think" in parts:
        done.put("mask_generation_prompt", True, "loss_scale")
    for part in set(parts) - meaning.keys():
        done.lose("loss_scale", f"{part}: tokens are either trained or not (loss marks of turns, docs/data.md)")


def _source(done: Conversion, key: str, text: str, alone: bool) -> shared.DataSource:
    path, _, count = text.partition("#")
    prefix = next((p for p in ("HF::", "MS::") if path.startswith(p)), "")
    path, _, subset = path.removeprefix(prefix).partition(":")
    if count and alone:
        done.put("max_samples", int(count), f"{key}: #{count}")
        done.differ(f"{key}: #{count} samples rows at random; max_samples takes the first rows.")
    elif count:
        done.lose(f"{key}: {text}", f"shorten the file to {count} rows, or set a weight: a.jsonl:0.5")
    return shared.DataSource(path, None, subset or None)


def _modules(value: Any) -> list[str]:
    """Return the modules that get an adapter; ALL means all linear layers."""
    return ["all-linear"] if str(value).upper() in ("ALL", "['ALL']") else shared.modules(value)


def _training(done: Conversion) -> None:
    """Convert parallelism, batch, optimizer and evaluation."""
    if (size := done.take("sequence_parallel_size", 1)) > 1:
        done.put("sp_size", size, "sequence_parallel_size")
    sharding.split_layers(done, "deepspeed_autotp_size")
    if done.take("gradient_accumulation_steps") is None:
        key, micro = done.first("per_device_train_batch_size")
        micro = number(micro) or 1
        done.put("per_device_train_batch_size", micro, key)
        ranks = done.gpus or 1
        rows = micro * ranks * max(1, -(-16 // (micro * ranks)))
        done.put("effective_batch_size", rows)
        done.differ(f"effective batch: ms-swift accumulates at least 16 rows, here {rows}.")
    else:
        shared.batch(done, "per_device_train_batch_size", "gradient_accumulation_steps")
    if name := done.take("optimizer"):
        if name in ("muon", "muonclip"):
            done.put("optim", "muon", "optimizer")
        else:
            done.lose("optimizer", "unsupported optimizer (docs/optimizers.md lists the values of optim)")
    if share := number(done.take("split_dataset_ratio", 0)):
        done.put("eval_fraction", share, "split_dataset_ratio")
    has_rows = bool(share) or "eval_data" in done.lines
    if has_rows and done.values.get("eval_strategy") is None:  # evaluates as often as it saves
        steps = done.take("eval_steps")
        done.put("eval_strategy", "steps", "eval_steps" if steps else None)
        done.put("eval_steps", steps or done.values.get("save_steps") or 500, "eval_steps" if steps else None)
        done.unread.discard("eval_strategy")
    else:
        shared.evaluation(done, has_rows)


def _adapters(done: Conversion) -> None:
    """Convert the adapter to continue from."""
    folders = words(done.take("adapters") or [])
    if len(folders) == 1:
        done.put("initial_adapter", folders[0], "adapters")
    elif folders:
        done.lose("adapters", "only one adapter can be continued; merge the earlier ones (swift export --merge_lora)")


def _length(done: Conversion) -> None:
    length = number(done.take("max_length"))
    pack_length = done.take("packing_length")
    packing = done.take("packing", False)
    done.put("packing", packing, "packing" if "packing" in done.values else None)
    if packing and pack_length:
        done.put("max_length", pack_length, "packing_length")
    elif length:
        done.put("max_length", length, "max_length")
    elif packing:
        done.lose("max_length", "ms-swift packs up to the model's limit; the default here is 2048")
    if not length and not packing:
        shared.error_on_long_rows(done, "ms-swift uses the model's limit")
    if done.take("truncation_strategy") == "split":
        done.differ("truncation_strategy: split cuts a text into several rows; here the rest is truncated.")


def _template(done: Conversion) -> None:
    """Convert the weights' dtype and the template."""
    key, dtype = done.first("torch_dtype", "dtype")
    if dtype in ("float32", "fp32") and not {"fp16", "bf16"} & done.values.keys():
        shared.write_fp32(done, key)
    elif dtype in ("float16", "fp16") and "fp16" not in done.values:
        shared.write_half(done, "fp16", key)
    elif dtype in ("bfloat16", "bf16") and "bf16" not in done.values:
        done.put("bf16", True, key)
    if (value := done.take("template")) and value not in ("default", "dummy"):
        template(done, "template", value)


KIT = Kit(
    name="ms-swift",
    version="4.6.0",
    marks=(
        "tuner_type", "train_type", "sft_type", "rlhf_type", "split_dataset_ratio", "attn_impl", "torch_dtype",
        "model_author", "dataset_num_proc", "quant_bits", "quant_method", "loss_scale", "target_modules",
        "lora_rank", "truncation_strategy", "val_dataset", "lazy_tokenize", "packing_length", "dataset",
        "model_type",
    ),
    keys=shared.TRAINING | shared.weights() | {
        "model": Key("model"),
        "model_id_or_path": Key("model"),
        "model_revision": Key("model_revision"),
        "output_dir": Key("output_dir"),
        "learning_rate": Key("learning_rate", default=lambda done: 1e-4 if "adapter" in done.trained else 1e-5,
                             page="1e-4, full fine-tuning 1e-5"),
        "lora_rank": Key("lora_r", default=8, only="lora adapter"),
        "lora_alpha": Key("lora_alpha", default=32, only="lora adapter"),
        "lora_dropout_p": Key("lora_dropout", default=0.05, other="lora_dropout", only="lora adapter"),
        "target_regex": Key("lora_target_modules", default="all-linear", other="target_modules lora_target_modules",
                            only="adapter", read=_modules),
        "target_parameters": Key("lora_target_parameters", only="adapter", read=words),
        "modules_to_save": Key("modules_to_save", only="adapter", read=words),
        "beta": Key("beta", default=lambda done: 2.0 if done.values.get("rlhf_type") == "simpo" else 0.1,
                    page="0.1, simpo 2", only="preference"),
        "rpo_alpha": Key("rpo_alpha", only="preference", skip_off=True),
        "label_smoothing": Key("label_smoothing", only="preference", skip_off=True),
        "cpo_alpha": Key("rpo_alpha", default=1.0, only="simpo"),
        "simpo_gamma": Key("simpo_gamma", default=1, only="simpo"),
        "padding_free": Key("padding_free", skip_off=True),
        "truncation_strategy": Key("truncation", default="delete", values=TRUNCATIONS),
        "gradient_checkpointing": Key("gradient_checkpointing", values={True: None}),
        "lr_scheduler_type": Key("lr_scheduler_type", default="cosine"),
        "weight_decay": Key("weight_decay", default=0.1),
        "adam_beta2": Key("adam_beta2", default=0.95),
        "data_seed": Key("data_seed"),
        "dataset_num_proc": Key("preprocessing_num_workers"),
        "streaming": Key("streaming", skip_off=True),
        "shuffle_buffer_size": Key("shuffle_buffer_size"),
        "new_special_tokens": Key("new_tokens"),
        "use_dora": Key("use_dora", skip_off=True),
        "use_rslora": Key("use_rslora", skip_off=True),
        "lorap_lr_ratio": Key("loraplus_lr_ratio"),
        "experts_impl": Key("experts_implementation"),
    },
    rules=(
        Rule("tuner_type train_type sft_type rlhf_type loss_type quant_bits init_weights",
             "recipe sft, lora or dpo; adapter, loss_type, load_in_4bit, init_lora_weights", _recipe),
        Rule("dataset val_dataset columns loss_scale", "data, eval_data, columns, max_samples, train_on", _data,
             "ids are resolved on the Hugging Face Hub, not on ModelScope"),
        Rule("max_length packing packing_length", "max_length, packing", _length,
             "ms-swift drops longer rows by default"),
        Rule("per_device_train_batch_size gradient_accumulation_steps split_dataset_ratio sequence_parallel_size "
             "deepspeed_autotp_size optimizer",
             "the same, effective_batch_size, eval_fraction, sp_size, tp_size, optim", _training,
             "default: at least 16 rows per step"),
        Rule("torch_dtype template", "bf16, chat_template", _template),
        Rule("adapters", "initial_adapter", _adapters, "merge several first (swift export --merge_lora)"),
        *shared.RULES,
        Shared("attn_impl", "attn_implementation", shared.attention),
        Rule(shared.SAME, "the same"),
    ),
    lost=shared.NO_COUNTERPART | {
        "replace {{NAME}} in the rows of swift/self-cognition by these names": (
            "model_name model_author"
        ),
        "the reference is the initial model; continue a run with zerofit resume": (
            "resume_only_model ref_model ref_adapters"
        ),
        "images, videos and audio are not trained": (
            "freeze_vit freeze_aligner freeze_llm max_pixels vit_* aligner_lr"
        ),
        "rows are reshuffled each epoch unless both are false": "dataset_shuffle train_dataloader_shuffle",
        "conversations always use the chat template": "use_chat_template",
        "the chat template controls the format of thinking (mask_generation_prompt)": (
            "enable_thinking add_non_thinking_prefix disable_ignore_empty_think preserve_thinking response_prefix "
            "agent_template"
        ),
        "not needed here": (
            "add_version create_checkpoint_symlink check_model lazy_tokenize load_args "
            "tuner_backend bnb_4bit_* packing_num_proc packing_strategy "
            "remove_unused_columns dataloader_persistent_workers ddp_backend padding_side "
            "max_model_len device_map save_only_model ignore_args_error save_safetensors "
            "safe_serialization max_shard_size strict disable_auto_column_mapping template_backend "
            "val_dataset_shuffle logging_first_step lora_bias"
        ),
        "unsupported method": (
            "lisa_* use_galore galore_* external_plugins custom_* "
            "callbacks acc_strategy router_aux_loss_coef lora_ga_* reft_* adalora_* interleave_prob "
            "stopping_strategy"
        ),
        "set generation options in zerofit chat": (
            "max_new_tokens temperature top_k top_p repetition_penalty predict_with_generate eval_* metric"
        ),
    },
    refused={
        shared.OTHER_LOSS: "enable_dft_loss loss_type",
        shared.SOME_WEIGHTS: "freeze_parameters* trainable_parameters*",
    },
    meaning=("loss: mean over the trained tokens of a step on all GPUs, as in ms-swift.",),
    same_names=True,
    defaults=shared.DEFAULTS | {
        "loss_type": "cross_entropy", "per_device_train_batch_size": 1,
        "dataset_shuffle": True, "train_dataloader_shuffle": True, "gradient_checkpointing": True, "check_model": True,
        "add_version": True, "use_chat_template": True, "freeze_vit": True, "freeze_aligner": True,
        "add_non_thinking_prefix": True, "remove_unused_columns": False, "safe_serialization": True,
        "padding_side": "right", "template_backend": "swift", "logging_first_step": True, "report_to": ["tensorboard"],
        "tuner_backend": "peft", "quant_method": "bnb", "truncation_strategy": "delete", "stopping_strategy":
        "first_exhausted", "lora_bias": "none", "task_type": "causal_lm",
    },
)  # fmt: skip
