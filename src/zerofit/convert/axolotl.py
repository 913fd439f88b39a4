"""The key table for axolotl."""

from typing import Any

from zerofit.convert import sharding, shared
from zerofit.convert.conversion import Conversion, Key, Kit, Line, Rule, Shared, number, words
from zerofit.convert.templates import arguments, file_or_text, template

PREFERENCE = {"dpo": "sigmoid", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}

OTHER_JOBS = "not supported; zerofit trains SFT, LoRA and preferences (dpo, ipo, orpo, simpo, kto)"


def _recipe(done: Conversion) -> None:
    """Choose recipe and preference loss from `rl` and `adapter`."""
    rl, adapter = done.take("rl"), done.take("adapter")
    if rl and rl not in PREFERENCE:
        done.refuse(f"rl: {rl}", OTHER_JOBS)
    for key in ("reward_model", "process_reward_model", "diffusion", "kd_trainer"):
        if done.take(key):
            done.refuse(key, OTHER_JOBS)
    if done.take("processor_type"):
        done.differ("processor_type: only the text part of the model trains; rows with other media are rejected.")
    kind = "lora" if adapter else ""
    done.choose("dpo" if rl else kind or "sft", "rl", "adapter", adapter=kind, origin="adapter")
    if rl:
        losses = words(done.take("dpo_loss_type", [])) or [PREFERENCE[rl]]
        if len(losses) > 1 or done.take("dpo_loss_weights"):
            done.refuse("dpo_loss_type", "zerofit supports one loss at a time")
        shared.preference(done, losses[0], "rl")
    if not adapter:
        return
    if done.take("load_in_4bit") or (adapter == "qlora" and not done.values.get("gptq")):
        done.put("load_in_4bit", True, "load_in_4bit")
    elif done.take("load_in_8bit"):
        done.put("load_in_8bit", True, "load_in_8bit")


def _data(done: Conversion) -> None:
    """Convert the list of data sets: path, split, configuration, columns and the mask."""
    key, entries = done.first("datasets", "pretraining_dataset")
    entries = [{"path": entries}] if isinstance(entries, str) else entries or []
    entries = [entry if isinstance(entry, dict) else {"path": entry} for entry in entries]
    shared.data(done, [source for entry in entries for source in _sources(done, entry)], key or "datasets")
    kinds = {str(entry.get("type")) for entry in entries}
    if done.recipe != "dpo":
        full_rows = done.take("train_on_inputs") is True or key == "pretraining_dataset" or kinds == {"completion"}
        roles = {str(entry["roles_to_train"]) for entry in entries if entry.get("roles_to_train")}
        origin = key if kinds == {"completion"} else "train_on_inputs" if "train_on_inputs" in done.values else None
        done.put("train_on", "all" if full_rows else "assistant", origin)
        if roles - {"['assistant']", "['gpt']", "['assistant', 'gpt']", "['gpt', 'assistant']"}:
            done.lose("datasets: roles_to_train", "only assistant answers (train_on) or marked turns are trained")
    held_out = done.take("test_datasets")
    if held_out:
        sources = [source for entry in held_out for source in _sources(done, entry)]
        shared.data(done, sources, "test_datasets", "eval_data")
    if any(kind.startswith(("alpaca", "{")) or kind in ("context_qa", "explainchoice") for kind in kinds):
        done.differ(
            "datasets: type: axolotl formats such rows with `### Instruction:` or similar; zerofit uses the chat "
            "template (chat_template accepts a Jinja file)."
        )


FIELDS = {"field_messages": "messages", "field_chosen": "chosen", "field_rejected": "rejected", "field": "text",
          "text_column": "text"}  # fmt: skip

FIELDS_OF_TYPE = "system instruction input output prompt chosen rejected completion label".split()  # field_...

NAMES = {  # key of a data set -> values that are detected automatically
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
    "message_field_training": ("train", "training", "trainable", "weight"),
    "ds_type": ("json", "parquet", "csv", "text", "arrow"),
}


def _sources(done: Conversion, entry: dict[str, Any]) -> list[shared.DataSource]:
    columns = {ours: entry[theirs] for theirs, ours in FIELDS.items() if entry.get(theirs)}
    if columns.get("messages") in ("conversations", "messages"):
        del columns["messages"]
    if isinstance(kind := entry.get("type"), dict):
        columns |= {name: kind[f"field_{name}"] for name in FIELDS_OF_TYPE if kind.get(f"field_{name}")}
    for name, known in NAMES.items():
        if dict.get(entry, name) in known:
            entry.get(name)
    mappings = dict.get(entry, "message_property_mappings")
    if isinstance(mappings, dict) and set(dict.items(mappings)) <= {
        (name, known) for name in ("role", "content") for known in NAMES[f"message_field_{name}"]
    }:
        entry.get("message_property_mappings").items()
    if entry.get("chat_template") and not done.values.get("chat_template"):
        template(done, "datasets: chat_template", entry["chat_template"])
    options = entry.get("split"), entry.get("name"), entry.get("revision"), columns
    return [
        shared.DataSource(path, *options) for path in shared.files(entry.get("data_files")) or [entry.get("path", "")]
    ]


SCHEDULES = ("linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt "
             "reduce_lr_on_plateau cosine_with_min_lr warmup_stable_decay").split()  # fmt: skip


def _schedule(done: Conversion) -> None:
    """Convert optimizer, warm-up and schedule."""
    shared.optimizer(done, "optimizer")
    share, steps = 0.03, number(done.take("max_steps") or 0)  # share of all steps, at most 100 steps
    if all(done.values.get(key) is None for key in ("warmup_steps", "warmup_ratio")):
        if steps > 0:
            share = min(int(share * steps), 100)
        else:
            done.differ("warm-up: axolotl's default is 3 % of the steps, at most 100: set warmup_steps: 100 for more "
                        "than 3,333 steps.")  # fmt: skip
    shared.warmup(done, "warmup_steps", "warmup_ratio", share)
    kind, smallest = done.take("lr_scheduler", "cosine"), done.take("cosine_min_lr_ratio")
    origin = "lr_scheduler" if "lr_scheduler" in done.values else None
    if kind not in SCHEDULES:
        done.lose("lr_scheduler", f"unsupported schedule {kind}; replaced by cosine")
        kind = "cosine"
    if smallest and kind == "cosine":
        done.put("lr_scheduler_type", "cosine_with_min_lr", "lr_scheduler, cosine_min_lr_ratio")
        done.put("lr_scheduler_kwargs", {"min_lr_rate": smallest}, "cosine_min_lr_ratio")
    else:
        done.put("lr_scheduler_type", kind, origin)


def _batch(done: Conversion) -> None:
    micro, batch = done.take("micro_batch_size"), done.take("batch_size")
    if batch and not done.values.get("gradient_accumulation_steps"):
        done.values["gradient_accumulation_steps"] = max(1, number(batch) // number(micro or 1))
    key, size = done.first("context_parallel_size", "sequence_parallel_degree", "context_parallel")
    size = number(size.get("size", 1)) if isinstance(size, dict) else size
    sharding.split_rows(done, key, size)
    all_gpus, width = done.take("tensor_parallel"), done.take("tensor_parallel_size", 1)
    if all_gpus and done.gpus:  # `auto` means all GPUs of the job
        width = done.gpus
    elif all_gpus:
        done.lose("tensor_parallel", "uses all GPUs of the job; convert with --gpus N to set tp_size")
    if width > 1:
        done.put(
            "tp_size", width, "tensor_parallel_size" if "tensor_parallel_size" in done.values else "tensor_parallel"
        )
        if done.lines.pop("sp_size", None):
            done.lose(str(key), "sp_size and tp_size exclude each other; tp_size is written")
    shared.batch(done, "micro_batch_size", "gradient_accumulation_steps")


def _times(done: Conversion) -> None:
    """Convert when to save and evaluate; n times per epoch becomes a share of all steps."""
    epochs = number(done.take("num_epochs", 1.0))
    for theirs, ours in (("saves_per_epoch", "save_steps"), ("evals_per_epoch", "eval_steps")):
        count = done.take(theirs)
        if count and done.values.get(ours) is None and (share := 1 / (count * epochs)) < 1:
            done.values[ours] = round(share, 6)
    has_rows = shared.held_out(done, "val_set_size")
    if has_rows and done.values.get("eval_strategy") is None:
        done.values["eval_strategy"] = "steps" if done.values.get("eval_steps") else None
    shared.evaluation(done, has_rows)
    shared.saving(done, "epoch", limit=4)
    for key, ours in (("evals_per_epoch", "eval_steps"), ("saves_per_epoch", "save_steps")):
        if done.values.get(key) and ours in done.lines:
            done.lines[ours] = Line(done.lines[ours].value, f"{key}: {done.values[key]}")


def _machine(done: Conversion) -> None:
    """Convert precision, kernels, checkpointing and trackers."""
    shared.precision(done, "bf16", "fp16")
    for key, name in (("bfloat16", "bf16"), ("float16", "fp16")):
        if done.take(key):
            shared.write_half(done, name, key)
    if "bf16" in done.values and done.values["bf16"] is None and not {"bf16", "fp16"} & {*done.lines, *done.on_gpus}:
        shared.write_fp32(done, "bf16")
    plugins = " ".join(map(str, done.take("plugins", [])))
    kernels = [key for key in sorted(done.unread) if key.startswith("liger_") and done.take(key)]
    if "CutCrossEntropy" in plugins:
        done.keep("plugins")
    if "LigerPlugin" in plugins or kernels:
        done.on_gpus["use_liger_kernel"] = Line(True, "plugins: LigerPlugin")
    for name in plugins.split():
        if "LigerPlugin" not in name and "CutCrossEntropy" not in name:
            done.lose(f"plugins: {name}", "axolotl plugins are not supported (docs/extending.md)")
    done.keep(*(key for key in done.values if key.startswith(("liger_", "cut_cross_entropy"))))  # fused_loss is similar
    checkpointing = done.take("gradient_checkpointing")
    if checkpointing is not None:
        done.put("gradient_checkpointing", bool(checkpointing), "gradient_checkpointing")
    if checkpointing in ("offload", "unsloth") or done.take("activation_offloading"):
        done.put("activation_offload", True, "gradient_checkpointing" if checkpointing else "activation_offloading")
    report = [name for name in ("wandb", "mlflow", "tensorboard") if done.take(f"use_{name}")]
    report = [*report, "wandb"] if done.values.get("wandb_project") and "wandb" not in report else report
    shared.write_trackers(done, "wandb_project" if "use_wandb" not in done.values else "use_wandb", report)
    if (name := done.take("wandb_name") or done.take("wandb_run_id")) and report:
        done.put("run_name", name, "wandb_name")


def _template(done: Conversion) -> None:
    value, text = done.take("chat_template"), done.take("chat_template_jinja")
    if value == "jinja" or text:
        file_or_text(done, "chat_template_jinja")
    else:
        template(done, "chat_template", str(value).removeprefix("tokenizer_default_fallback_") if value else None)
    arguments(done, "chat_template_kwargs", done.take("chat_template_kwargs"))


DEFAULTS = {
    "bf16": "auto", "tf32": "auto", "shuffle_merged_datasets": True, "peft_init_lora_weights": True,
    "pretraining_sample_concatenation": True, "save_safetensors": True, "datasets.train_on_eos": "turn",
    "datasets.train_on_eot": "turn", "datasets.split": "train", "include_tokens_per_second": False,
    "remove_unused_columns": True, "tokenizer_use_fast": True,
}  # fmt: skip


KIT = Kit(
    name="axolotl",
    version="0.19.0",
    marks=(
        "base_model", "micro_batch_size", "sequence_len", "num_epochs", "sample_packing", "val_set_size",
        "datasets", "dataset_prepared_path", "lora_target_linear", "lr_scheduler", "optimizer",
        "pad_to_sequence_len", "flash_attention", "evals_per_epoch", "saves_per_epoch", "train_on_inputs",
        "special_tokens",
    ),
    keys=shared.weights("kto_desirable_weight", "kto_undesirable_weight") | {
        "base_model": Key("model"),
        "revision_of_model": Key("model_revision"),
        "trust_remote_code": Key("trust_remote_code", skip_off=True),
        "output_dir": Key("output_dir", default="./model-out"),
        "sequence_len": Key("max_length", default=512),
        "excess_length_strategy": Key("truncation", default="drop",
                                      values={"truncate": "truncate_right", "raise": "error"}),
        "sample_packing": Key("packing", default=False, note="a micro batch has micro_batch_size packs of sequence_len "
                              "tokens; axolotl fills bins of micro_batch_size x sequence_len"),
        "pretraining_sample_concatenation": Key("packing"),
        "tokens": Key("new_tokens"),
        "lora_r": Key("lora_r", only="adapter"),
        "lora_alpha": Key("lora_alpha", only="adapter"),
        "lora_dropout": Key("lora_dropout", default=0.0, only="adapter"),
        "lora_target_linear": Key("lora_target_modules", values={True: ["all-linear"]}, only="adapter", skip_off=True),
        "lora_target_modules": Key("lora_target_modules", only="adapter", read=shared.modules),
        "lora_target_parameters": Key("lora_target_parameters", only="adapter", read=words),
        "lora_modules_to_save": Key("modules_to_save", only="adapter", skip_off=True),
        "peft_use_dora": Key("use_dora", only="adapter", skip_off=True),
        "peft_use_rslora": Key("use_rslora", only="adapter", skip_off=True),
        "peft_init_lora_weights": Key("init_lora_weights", only="adapter", skip_off=True),
        "loraplus_lr_ratio": Key("loraplus_lr_ratio", only="adapter", skip_off=True),
        "rl_beta": Key("beta", default=0.1, other="dpo_beta orpo_alpha", only="preference"),
        "rpo_alpha": Key("rpo_alpha", only="preference", skip_off=True),
        "cpo_alpha": Key("rpo_alpha", default=1.0, only="simpo"),
        "simpo_gamma": Key("simpo_gamma", default=0.5, only="simpo"),
        "num_epochs": Key("num_train_epochs", default=1.0),
        "max_steps": Key("max_steps", values={-1: None, 0: None}),
        "lr_scheduler_kwargs": Key("lr_scheduler_kwargs", skip_off=True),
        "tf32": shared.GPU["tf32"],
        "flash_attention": Key("attn_implementation", values={True: "flash_attention_2"}, skip_off=True, on_gpu=True),
        "eager_attention": Key("attn_implementation", values={True: "eager"}, skip_off=True),
        "learning_rate": Key("learning_rate"),
        "weight_decay": Key("weight_decay", default=0.0),
        "max_grad_norm": Key("max_grad_norm", default=1.0),
        "adam_beta1": Key("adam_beta1"),
        "adam_beta2": Key("adam_beta2"),
        "adam_epsilon": Key("adam_epsilon"),
        "neftune_noise_alpha": Key("neftune_noise_alpha"),
        "noisy_embedding_alpha": Key("neftune_noise_alpha"),
        "dpo_label_smoothing": Key("label_smoothing"),
        "precompute_ref_log_probs": Key("precompute_ref_log_probs"),
        "seed": Key("seed", default=42),
        "reinit_weights": Key("random_init", skip_off=True),
        "tiled_mlp": Key("tiled_mlp", values={False: None, True: "auto"}),
        "logging_steps": Key("logging_steps"),
        "max_samples": Key("max_samples"),
        "streaming": Key("streaming", skip_off=True),
        "dataset_processes": Key("preprocessing_num_workers"),
        "dataset_num_proc": Key("preprocessing_num_workers"),
        "dataloader_num_workers": Key("dataloader_num_workers"),
        "dataloader_prefetch_factor": Key("dataloader_prefetch_factor"),
        "ddp_timeout": Key("ddp_timeout"),
        "hub_model_id": Key("hub_model_id", note="push_to_hub: true uploads the model at the end"),
        "hub_strategy": Key("hub_strategy"),
        "load_best_model_at_end": Key("load_best_model_at_end", skip_off=True),
        "metric_for_best_model": Key("metric_for_best_model"),
        "early_stopping_patience": Key("early_stopping_patience"),
        "lora_model_dir": Key("initial_adapter", skip_off=True, only="lora adapter"),
        "greater_is_better": Key("greater_is_better"),
    },
    rules=(
        Rule("rl adapter dpo_loss_type load_in_4bit load_in_8bit",
             "recipe sft, lora or dpo; loss_type, load_in_4bit, load_in_8bit", _recipe),
        Rule("datasets pretraining_dataset test_datasets train_on_inputs", "data, eval_data, columns, train_on", _data,
             "all data sets share split, configuration and columns"),
        Rule("chat_template chat_template_jinja chat_template_kwargs",
             "chat_template, chat_template_kwargs", _template),
        Rule("micro_batch_size gradient_accumulation_steps batch_size",
             "per_device_train_batch_size, gradient_accumulation_steps", _batch),
        Rule("optimizer lr_scheduler cosine_min_lr_ratio warmup_steps warmup_ratio",
             "optim, lr_scheduler_type, lr_scheduler_kwargs, warmup_steps", _schedule),
        Rule("val_set_size saves_per_epoch evals_per_epoch save_steps eval_steps",
             "eval_fraction, save_steps, eval_steps", _times, "n times per epoch becomes a share of all steps"),
        Rule("bf16 fp16 plugins gradient_checkpointing use_wandb",
             "bf16, fp16, use_liger_kernel, gradient_checkpointing, activation_offload, report_to", _machine),
        Shared("attn_implementation", "the same", shared.attention),
        Shared("deepspeed", "zero, offload", sharding.deepspeed),
        Shared("fsdp fsdp_config fsdp_version", "zero, offload", sharding.fsdp, sharding.FSDP_NOTE),
    ),
    lost=shared.NO_COUNTERPART | {
        "rows are padded to the longest row of a batch, or not at all (padding_free)": (
            "pad_to_sequence_len pad_to_multiple_of eval_sample_packing sample_packing_* multipack_real_batches "
            "streaming_multipack_buffer_size batch_flattening eval_batch_size eval_sequence_len min_sample_len "
            "max_prompt_len"
        ),
        "continue with zerofit resume or resume_from_checkpoint": "resume_from_checkpoint",
        "a run stops automatically on NaN and with early_stopping_patience": "loss_watchdog_*",
        "evaluation computes only the loss": (
            "eval_table_size eval_max_new_tokens do_bench_eval do_causal_lm_eval eval_causal_lm_metrics "
            "generate_samples num_generation_samples generation_* accelerator_config"
        ),
        "use fused_lora or compile_layers (docs/speed.md)": (
            "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel flash_attn_* fused_attn_kernel "
            "use_kernels torch_compile* flex_attn* flash_optimum gemma4_hybrid_attn_impl chunked_cross_entropy* "
            "sdpa_varlen use_glm_dsa_kernels dsv4_* pretrain_multipack_*"
        ),
        "LoRA's layers and ranks are the same everywhere": (
            "peft_layers_to_transform peft_layers_pattern lora_rank_pattern lora_alpha_pattern "
            "lora_fan_in_fan_out peft"
        ),
        "use packing: true": "max_packed_sequence_len",
        "zerofit data counts repeated rows and max_duplicate_fraction limits them": (
            "dataset_exact_deduplication"
        ),
        "all weights share a learning rate (except loraplus_lr_ratio); write optim_args as text: a=1,b=2": (
            "embedding_lr* lr_groups optim_args optim_target_modules eta_min loraplus_lr_embedding"
        ),
        "warm-up is linear, and the decay lasts to the end": "lr_quadratic_warmup cosine_constant_lr_ratio",
        "axolotl reads adam_epsilon": "adam_eps",
        "unsupported method": (
            "qat quantization gptq fp8* relora* lisa_* use_onebitllms jagged_restart_* use_pose pose_* "
            "eaft_* llmcompressor nvfp4_* torchdistx_path gptq_*"
        ),
        "zero: 3 shards all weights, including experts": (
            "expert_parallel_* dp_shard_size dp_replicate_size quantize_moe_experts use_scattermoe use_sonicmoe "
            "llama4_linearized_experts experts_implementation kt_config"
        ),
        "set in the model's config.json": (
            "model_config model_quantization_config* bnb_config_kwargs ple_cpu_offload base_model_ignore_patterns "
            "tokenizer_use_mistral_common experimental_skip_move_to_device cls_model_config"
        ),
        "images are not trained": (
            "skip_prepare_dataset remove_unused_columns image_size image_resize_algorithm freeze_mm_modules"
        ),
        "rows are shuffled in each epoch (train_sampling_strategy: sequential keeps their order)": (
            "shuffle_merged_datasets shuffle_before_merging_datasets"
        ),
        "the end token of each trained answer is trained": (
            "datasets.train_on_eos datasets.train_on_eot test_datasets.train_on_eos test_datasets.train_on_eot"
        ),
        "rows are split by Ulysses, not a ring": "context_parallel.*",
        "formats are detected from the columns (docs/data.md)": "datasets.* test_datasets.* pretraining_dataset.*",
        "not needed here": (
            "strict ddp* local_rank debug device_map xformers_attention s2_attention use_otel_metrics otel_* "
            "sdp_attention low_cpu_mem_usage save_safetensors save_first_step include_tkps is_preprocess "
            "gc_steps save_only_model dataset_keep_in_memory include_tokens_per_second heads_k_stride "
            "ring_attn_func trl vllm push_dataset_to_hub total_num_tokens"
        ),
    },
    refused={shared.OTHER_LOSS: "use_eaft use_dynamic_finetuning", shared.SOME_WEIGHTS: "unfrozen_parameters"},
    meaning=(
        "loss: mean over the trained tokens of a step on all GPUs; axolotl averages the means of the GPUs.",
    ),
    defaults=DEFAULTS, null_is_absent=True,
)  # fmt: skip
