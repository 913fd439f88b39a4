"""The table of ms-swift's keys."""

from zerofit.convert import sharding, shared
from zerofit.convert.conversion import Conversion, Key, Kit, Line, Rule, as_object, number, words
from zerofit.convert.templates import template

PREFERENCE = {"dpo": ("sigmoid", 0.1), "orpo": ("orpo", 0.1), "simpo": ("simpo", 2.0), "kto": ("kto", 0.1)}

OTHER_JOBS = "zerofit trains SFT, LoRA and preferences (dpo, orpo, simpo, kto)"

ADAPTERS = ("lora", "ia3", "oft", "vera")


def _recipe(done: Conversion) -> None:
    """Choose the recipe from `tuner_type` and `rlhf_type`, and write the preference loss and the adapter."""
    key, kind = done.first("tuner_type", "train_type", "sft_type")
    kind = kind or "lora"
    rl = done.take("rlhf_type")
    if rl and rl not in PREFERENCE:
        done.refuse(f"rlhf_type: {rl}", f"has no counterpart: {OTHER_JOBS}")
    if done.take("task_type", "causal_lm") != "causal_lm":
        done.refuse("task_type", f"has no counterpart: {OTHER_JOBS}")
    if kind != "full" and kind not in ADAPTERS:
        done.refuse(f"tuner_type: {kind}", f"is no adapter of zerofit's: {', '.join(ADAPTERS)} (docs/adapters.md)")
    if "dpo" in done.file.stem and not rl and not done.recipe:
        done.differ("rlhf_type: not in the file; `swift rlhf` takes dpo: convert with --recipe dpo.")
    done.choose("dpo" if rl else "sft" if kind == "full" else "lora", "rlhf_type", key or "tuner_type")
    if done.recipe == "dpo":
        _preference(done, rl or "dpo")
    if kind != "full":
        _adapter(done, kind)
    for key in done.unread & {"lora_rank", "lora_alpha", "lora_dropout", "target_modules"} if kind == "full" else ():
        done.lose(key, "the file has no adapter, so all weights train")
    key, rate, default = done.named("learning_rate", 1e-5 if kind == "full" else 1e-4)
    done.put("learning_rate", default if rate is None else rate, key)


def _preference(done: Conversion, rl: str) -> None:
    loss, beta = PREFERENCE[rl]
    given = words(done.take("loss_type", []))
    if len(given) > 1:
        done.refuse("loss_type", "zerofit has one loss at a time")
    done.put("loss_type", given[0] if given else loss, "loss_type" if given else "rlhf_type")
    key, value, _ = done.named("beta", beta)
    done.put("beta", beta if value is None else value, key)
    if rl == "kto":
        shared.kto(done)
    if rl == "simpo":
        done.put("simpo_gamma", done.take("simpo_gamma", 1), "simpo_gamma" if "simpo_gamma" in done.given else None)
        done.put("rpo_alpha", done.take("cpo_alpha", 1.0), "cpo_alpha" if "cpo_alpha" in done.given else None)
    elif weight := done.take("rpo_alpha"):
        done.put("rpo_alpha", weight, "rpo_alpha")
    if smoothing := done.take("label_smoothing"):
        done.put("label_smoothing", smoothing, "label_smoothing")


def _adapter(done: Conversion, kind: str) -> None:
    if done.recipe == "dpo" or kind != "lora":
        done.put("adapter", kind, "tuner_type")
    if kind == "lora":
        shared.lora(done, {
            "lora_r": done.named("lora_rank", 8),
            "lora_alpha": done.named("lora_alpha", 32),
            "lora_dropout": (*done.first("lora_dropout_p", "lora_dropout"), 0.05),
        })  # fmt: skip
    shared.parameters(done, "target_parameters")
    key, value = done.first("target_regex", "target_modules", "lora_target_modules")
    value = "all-linear" if str(value).upper() in ("ALL", "['ALL']") else value
    shared.targets(done, key, value, "all-linear")
    if value := done.take("modules_to_save"):
        done.put("modules_to_save", words(value), "modules_to_save")
    weights = str(done.take("init_weights", "true")).lower()
    if weights in ("true", "false"):
        done.keep(*["init_weights"] * (weights == "true"))
    else:
        done.put("init_lora_weights", weights, "init_weights")
    key, bits = done.first("quant_bits", "quantization_bit")
    if bits:
        if bits in (4, 8) and done.take("quant_method", "bnb") == "bnb":
            done.put(f"load_in_{bits}bit", True, key)
        else:
            done.lose(str(key), "load_in_4bit (NF4) or load_in_8bit, by bitsandbytes")


def _data(done: Conversion) -> None:
    """Convert data sets, written as id:subset#count, and the mask."""
    for key, ours in (("dataset", "data"), ("val_dataset", "eval_data")):
        value = done.take(key, [])
        listed = [str(one) for one in value] if isinstance(value, list) else str(value).split() if value else []
        sources = [_source(done, key, one, alone=len(listed) == 1) for one in listed]
        shared.data(done, sources, key, ours)
        if any("/" in source.path and "." not in source.path for source in sources):
            done.differ(f"{key}: ids are looked up on the Hugging Face Hub here, on ModelScope there (unless use_hf).")
    shuffled = [done.take(key, True) for key in ("dataset_shuffle", "train_dataloader_shuffle")]
    if shuffled == [False, False] or (done.given.get("streaming") is True and not shuffled[0]):
        done.put("train_sampling_strategy", "sequential", "dataset_shuffle, train_dataloader_shuffle")
    if isinstance(columns := as_object(done.take("columns")), dict):  # {name in the file: standard name}
        names = {"query": "prompt", "response": "completion", "rejected_response": "rejected"}
        done.put("columns", [f"{names.get(to, to)}={name}" for name, to in columns.items()], "columns")
    if done.recipe == "dpo":
        return
    scale = str(done.take("loss_scale", "default"))
    meaning = {"default": "assistant", "last_round": "last_turn", "all": "all", "ignore_empty_think": "assistant"}
    parts = scale.split("+")
    done.put("train_on", next((meaning[part] for part in parts if part in meaning), "assistant"),
             "loss_scale" if "loss_scale" in done.given else None)  # fmt: skip
    if "ignore_empty_think" in parts:
        done.put("mask_generation_prompt", True, "loss_scale")
    for part in set(parts) - meaning.keys():
        done.lose("loss_scale", f"{part}: tokens are in the loss or not (marks of turns, docs/data.md)")


def _source(done: Conversion, key: str, text: str, alone: bool) -> shared.Source:
    path, _, count = text.partition("#")
    prefix = next((p for p in ("HF::", "MS::") if path.startswith(p)), "")
    path, _, subset = path.removeprefix(prefix).partition(":")
    if count and alone:
        done.put("max_samples", int(count), f"{key}: #{count}")
        done.differ(f"{key}: #{count} draws rows at random there; max_samples takes the first ones.")
    elif count:
        done.lose(f"{key}: {text}", f"{count} rows of one set: cut the file, or weigh it as a.jsonl:0.5")
    return shared.Source(path, None, subset or None)


def _training(done: Conversion) -> None:
    """Convert batch, epochs, warm-up, evaluation, saving and the optimizer."""
    if (size := done.take("sequence_parallel_size", 1)) > 1:
        done.put("sp_size", size, "sequence_parallel_size")
    if size := done.take("deepspeed_autotp_size"):
        done.put("tp_size", size, "deepspeed_autotp_size")
    key, micro, _ = done.named("per_device_train_batch_size", 1)
    micro = number(micro) or 1
    accumulation = done.named("gradient_accumulation_steps", None)
    if accumulation[1] is None:
        done.put("per_device_train_batch_size", micro, key)
        ranks = done.gpus or 1
        steps = max(1, -(-16 // (micro * ranks)))
        done.put("effective_batch_size", micro * ranks * steps)
        done.differ(f"effective batch: ms-swift accumulates up to 16 rows or more, here {micro * ranks * steps}.")
    else:
        shared.batch(done, (key, micro, 1), accumulation)
    shared.steps(done, done.named("num_train_epochs", 3.0))
    shared.warmup(done)
    shared.schedule_arguments(done)
    given = done.take("optim")
    shared.optimizer(done, given and "optim", given)
    if own := done.take("optimizer"):
        muon = own in ("muon", "muonclip")
        if muon:
            done.put("optim", "muon", "optimizer")
        else:
            done.lose("optimizer", "optim has other names (docs/optimizers.md)")
    share = number(done.take("split_dataset_ratio", 0))
    if share:
        done.put("eval_fraction", share, "split_dataset_ratio")
    _evaluation(done, bool(share) or "eval_data" in done.lines)
    shared.saving(done)


def _evaluation(done: Conversion, has_rows: bool) -> None:
    """Evaluate as often as is saved, where the file does not say."""
    if has_rows and done.given.get("eval_strategy") is None:
        steps = done.given.get("eval_steps") or done.given.get("save_steps") or 500
        done.put("eval_strategy", "steps", "eval_steps" if done.given.get("eval_steps") else None)
        done.put("eval_steps", steps, "eval_steps" if done.given.get("eval_steps") else None)
        done.unread -= {"eval_steps", "eval_strategy"}
    else:
        shared.evaluation(done, has_rows)


def _length(done: Conversion) -> None:
    length = number(done.take("max_length"))
    whole = done.take("packing_length")
    on = done.take("packing", False)
    done.put("packing", on, "packing" if "packing" in done.given else None)
    if on and whole:
        done.put("max_length", whole, "packing_length")
    elif length:
        done.put("max_length", length, "max_length")
    elif on:
        done.lose("max_length", "ms-swift packs up to the model's own limit; here to 2048 unless the file says more")
    strategy = done.take("truncation_strategy", "delete")
    names = {"delete": "drop", "left": "truncate_left", "right": "truncate_right"}
    done.put("truncation", names.get(strategy, "truncate_right"),
             "truncation_strategy" if "truncation_strategy" in done.given else None)  # fmt: skip
    if not length and not on:
        shared.uncut(done, "ms-swift takes the model's own limit")
    if strategy == "split":
        done.differ("truncation_strategy: split cuts a text into several rows there; here the rest is cut off.")


def _machine(done: Conversion) -> None:
    """Convert precision, attention, kernels, sharding, trackers and the template."""
    key, dtype = done.first("torch_dtype", "dtype")
    if dtype in ("float32", "fp32") and not {"fp16", "bf16"} & done.given.keys():
        shared.single(done, key)
    elif dtype in ("float16", "fp16") and "fp16" not in done.given:
        shared.half(done, "fp16", key)
    elif dtype in ("bfloat16", "bf16") and "bf16" not in done.given:
        done.put("bf16", True, key)
    shared.precision(done)
    shared.tf32(done)
    shared.attention(done, "attn_impl", done.take("attn_impl"))
    shared.liger(done, "use_liger_kernel")
    sharding.deepspeed(done, "deepspeed")
    sharding.fsdp(done, "fsdp", "fsdp_config")
    shared.report(done, "report_to", words(done.take("report_to", ["tensorboard"])))
    if "report_to" not in done.given:
        done.lost.pop("report_to", None)
    if done.take("padding_free"):
        done.put("padding_free", True, "padding_free")
    if (value := done.take("template")) and value not in ("default", "dummy"):
        template(done, "template", value)
    if done.take("gradient_checkpointing") is False:
        done.lines["gradient_checkpointing"] = Line(False, "gradient_checkpointing")


KIT = Kit(
    name="ms-swift",
    version="4.6.0",
    marks=(
        "tuner_type", "train_type", "sft_type", "rlhf_type", "split_dataset_ratio", "attn_impl", "torch_dtype",
        "model_author", "dataset_num_proc", "quant_bits", "quant_method", "loss_scale", "target_modules",
        "lora_rank", "truncation_strategy", "val_dataset", "lazy_tokenize", "packing_length", "dataset",
        "model_type",
    ),
    keys=shared.TRAINING | {
        "model": Key("model"),
        "model_id_or_path": Key("model"),
        "model_revision": Key("model_revision"),
        "output_dir": Key("output_dir"),
        "lr_scheduler_type": Key("lr_scheduler_type", default="cosine"),
        "weight_decay": Key("weight_decay", default=0.1),
        "adam_beta2": Key("adam_beta2", default=0.95),
        "data_seed": Key("data_seed"),
        "dataset_num_proc": Key("preprocessing_num_workers"),
        "streaming": Key("streaming", values={False: None}),
        "shuffle_buffer_size": Key("shuffle_buffer_size"),
        "new_special_tokens": Key("new_tokens"),
        "use_dora": Key("use_dora", values={False: None}),
        "use_rslora": Key("use_rslora", values={False: None}),
        "lorap_lr_ratio": Key("loraplus_lr_ratio"),
        "experts_impl": Key("experts_implementation"),
    },
    rules=(
        Rule("tuner_type train_type sft_type rlhf_type learning_rate", "recipe sft, lora or dpo; learning_rate",
             _recipe, "default rate 1e-4, of all weights 1e-5"),
        Rule("lora_rank lora_alpha lora_dropout target_modules target_regex quant_bits",
             "lora_r, lora_alpha, lora_dropout, lora_target_modules, load_in_4bit",
             note="defaults 8, 32, 0.05, all-linear"),
        Rule("beta loss_type rpo_alpha simpo_gamma cpo_alpha", "beta, loss_type, rpo_alpha, simpo_gamma"),
        Rule("dataset val_dataset columns loss_scale", "data, eval_data, columns, max_samples, train_on", _data,
             "ids of the Hugging Face Hub, not of ModelScope"),
        Rule("max_length packing packing_length truncation_strategy", "max_length, packing, truncation", _length,
             "longer rows are dropped there by default"),
        Rule("per_device_train_batch_size gradient_accumulation_steps num_train_epochs warmup_ratio "
             "split_dataset_ratio",
             "the same, effective_batch_size, warmup_steps, eval_fraction", _training,
             "default: 16 rows a step, or more"),
        Rule("deepspeed fsdp", "zero, offload", note="deepspeed_autotp_size is tp_size"),
        Rule("torch_dtype attn_impl use_liger_kernel report_to template", "bf16, attn_implementation, chat_template",
             _machine),
        Rule(shared.SAME, "the same"),
    ),
    lost=shared.NO_COUNTERPART | {
        "rows of swift/self-cognition have these names as {{NAME}}: write them into the file": (
            "model_name model_author"
        ),
        "merge the adapter into its base first (swift export --merge_lora), and give the merged folder as model": (
            "adapters resume_only_model ref_model ref_adapters"
        ),
        "images, videos and audios are not trained": (
            "freeze_vit freeze_aligner freeze_llm max_pixels vit_* aligner_lr"
        ),
        "the system turn is a turn of the rows": "system",
        "rows are in another order in each epoch, unless both are false": "dataset_shuffle train_dataloader_shuffle",
        "conversations go through the chat template": "use_chat_template",
        "the chat template alone decides how thinking is written (mask_generation_prompt)": (
            "enable_thinking add_non_thinking_prefix disable_ignore_empty_think preserve_thinking response_prefix "
            "agent_template"
        ),
        "not needed here": (
            "add_version create_checkpoint_symlink check_model lazy_tokenize load_args "
            "tuner_backend bnb_4bit_* packing_num_proc packing_strategy "
            "remove_unused_columns dataloader_persistent_workers ddp_backend padding_side "
            "max_model_len device_map save_only_model ignore_args_error gradient_checkpointing save_safetensors "
            "safe_serialization max_shard_size strict disable_auto_column_mapping template_backend "
            "val_dataset_shuffle logging_first_step lora_bias"
        ),
        "no method of this kind": (
            "lisa_* use_galore galore_* external_plugins custom_* "
            "callbacks acc_strategy router_aux_loss_coef lora_ga_* reft_* adalora_* interleave_prob "
            "stopping_strategy"
        ),
        "ray starts zerofit with launchers/ray (docs/ray.md)": "use_ray device_groups",
        "what a generation does is said to zerofit chat": (
            "max_new_tokens temperature top_k top_p repetition_penalty predict_with_generate eval_* metric"
        ),
    },
    refused={
        shared.OTHER_LOSS: "enable_dft_loss loss_type",
        shared.SOME_WEIGHTS: "freeze_parameters* trainable_parameters*",
    },
    meaning=("loss: mean over the trained tokens of the whole step on all GPUs, as in ms-swift.",),
    same_names=True,
    defaults=shared.DEFAULTS | {
        "loss_type": "cross_entropy",
        "dataset_shuffle": True, "train_dataloader_shuffle": True, "gradient_checkpointing": True, "check_model": True,
        "add_version": True, "use_chat_template": True, "freeze_vit": True, "freeze_aligner": True,
        "add_non_thinking_prefix": True, "remove_unused_columns": False, "safe_serialization": True,
        "padding_side": "right", "template_backend": "swift", "logging_first_step": True, "report_to": ["tensorboard"],
        "tuner_backend": "peft", "quant_method": "bnb", "truncation_strategy": "delete", "stopping_strategy":
        "first_exhausted", "lora_bias": "none", "task_type": "causal_lm",
    },
)  # fmt: skip
