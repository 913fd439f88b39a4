"""The table of LLaMA-Factory's keys."""

from pathlib import Path
from typing import Any

from zerofit.convert import sharding, shared
from zerofit.convert.conversion import Conversion, Key, Kit, Rule, Shared, number, sectioned, words
from zerofit.convert.templates import arguments, template
from zerofit.job import settings_file

OTHER_JOBS = "not supported; zerofit trains pt, sft, kto and dpo (pref_loss sigmoid, hinge, ipo, orpo or simpo)"

KINDS = {"full": "sft", "lora": "lora", "oft": "lora"}


def _recipe(done: Conversion) -> None:
    """Choose recipe, preference loss and adapter from `stage` and `finetuning_type`."""
    stage, kind = done.take("stage", "sft"), done.take("finetuning_type", "lora")
    if key := next((key for key in ("train_dataset", "dist_config", "peft_config") if key in done.values), None):
        done.refuse(key, "LLaMA-Factory's new layout (v1) is not supported")
    if done.values.get("export_dir") or not (done.take("do_train") or done.values.get("dataset")):
        done.refuse("do_train", "the file trains nothing (it exports, chats or predicts)")
    if stage not in ("pt", "sft", "dpo", "kto"):
        done.refuse(f"stage: {stage}", OTHER_JOBS)
    if kind not in KINDS:
        done.refuse(
            f"finetuning_type: {kind}", "not supported; zerofit trains all weights (sft, dpo) or an adapter (lora)"
        )
    pairs, adapter = stage in ("dpo", "kto"), kind if kind != "full" else ""
    origin = "finetuning_type" if "finetuning_type" in done.values else None
    done.choose("dpo" if pairs else KINDS[kind], "stage", "finetuning_type", adapter=adapter, origin=origin)
    if done.take("do_train", True) is False:
        done.refuse("do_train: false", "the file trains nothing")
    if pairs:
        loss = done.take("pref_loss", "sigmoid")
        if loss == "kto_pair":
            done.refuse("pref_loss: kto_pair", OTHER_JOBS)
        loss, key = ("kto", "stage") if stage == "kto" else (loss, "pref_loss")
        shared.preference(done, loss, key if key in done.values else None)
    if adapter:
        shared.quantized(done, "quantization_method", "quantization_bit")
    elif bits := done.take("quantization_bit"):
        done.lose("quantization_bit", f"full fine-tuning cannot train weights in {bits} bits")
    if kind == "lora" and done.take("pissa_init"):
        rounds = done.take("pissa_iter", 16)
        done.put("init_lora_weights", "pissa" if rounds == -1 else f"pissa_niter_{rounds}", "pissa_init")


def _data(done: Conversion) -> None:
    """Convert the names of data sets, using dataset_info.json if it exists."""
    folder = str(done.take("dataset_dir", "data"))
    registry = _registry(done.file, folder)
    for key, ours in (("dataset", "data"), ("eval_dataset", "eval_data")):
        names = words(done.take(key, []))
        unknown = [name for name in names if name not in registry]
        sources = [_source(done, name, registry.get(name), folder) for name in names]
        shared.data(done, sources, f"{key}, dataset_dir" if "dataset_dir" in done.values else key, ours)
        if unknown:
            done.differ(
                f"{key}: {', '.join(unknown)}: not found in {folder}/dataset_info.json; check the file names in data, "
                "or convert next to that file."
            )
    if "preference" not in done.trained:
        is_text = done.values.get("stage") == "pt"
        value, key = ("all", "stage: pt") if is_text else ("assistant", None)
        for name, meaning in (("mask_history", "last_turn"), ("train_on_prompt", "all")):
            if done.take(name):
                value, key = meaning, name
        done.put("train_on", value, key)
    if (count := done.take("max_samples")) and len(words(done.values.get("dataset", []))) > 1:
        done.lose("max_samples", f"LLaMA-Factory takes {count} rows of each set; max_samples limits all sets together")
    elif count:
        done.put("max_samples", count, "max_samples")
    if done.take("mix_strategy", "concat") != "concat":
        done.lose("mix_strategy", "sets are concatenated; set weights with data: [a.jsonl:2]")


def _registry(file: Path, folder: str) -> dict[str, dict]:
    for base in (Path(folder), file.parent / folder, file.parent):
        path = base / "dataset_info.json"
        if path.is_file():
            entries = settings_file.load(str(path), keep_text=True)[0]
            return {name: entry | {"_folder": str(path.parent)} for name, entry in entries.items()}
    return {}


COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system",
           "messages": "messages", "chosen": "chosen", "rejected": "rejected", "tools": "tools",
           "kto_tag": "label"}  # fmt: skip


def _source(done: Conversion, name: str, entry: dict | None, folder: str) -> shared.DataSource:
    if entry is None:
        return shared.DataSource(name if "/" in name or "." in name else f"{folder}/{name}.json")
    entry = done.linked_files[f"{name} in dataset_info.json"] = sectioned(entry)
    theirs = entry.get("columns") or {}
    columns = {ours: theirs[key] for key, ours in COLUMNS.items() if key in theirs and theirs[key] != ours}
    if columns.get("messages") == "conversations":
        del columns["messages"]
    if entry.get("tags"):
        entry["tags"].items()
        done.differ(f"dataset: {name}: turns are read as role/content or from/value.")
    for key in ("formatting", "ranking", "file_name", "hf_hub_url", "ms_hub_url", "_folder"):
        entry.get(key)  # the format is detected from the columns
    path = entry.get("hf_hub_url") or (entry.get("file_name") and str(Path(entry["_folder"]) / entry["file_name"]))
    path = path or entry.get("ms_hub_url") or name
    return shared.DataSource(str(path), entry.get("split"), entry.get("subset"), entry.get("revision"), columns)


def _training(done: Conversion) -> None:
    """Convert sequence parallelism, evaluation and `use_muon`."""
    key, size = done.first("sequence_parallel_size", "context_parallel_size")
    sharding.split_rows(done, key, size and number(size))
    if done.take("use_muon"):
        done.put("optim", "muon", "use_muon")
    shared.evaluation(done, shared.held_out(done, "val_size"))


def _oft_block(size: Any) -> list[str]:
    return [f"oft_block_size={size}"]


def _packing(done: Conversion) -> None:
    neat, (key, packing) = done.take("neat_packing"), done.first("packing", "dataset_concatenation")
    is_text = done.values.get("stage") == "pt"
    enabled = bool(neat or (is_text if packing is None else packing))
    done.put("packing", enabled, ", ".join(filter(None, ("neat_packing" * bool(neat), key))) or None)
    if enabled and not neat:
        done.differ(
            "packing: attention never crosses rows of a pack; in LLaMA-Factory it does without neat_packing"
            + (", and texts are cut at cutoff_len." if is_text else ".")
        )


def _template(done: Conversion) -> None:
    template(done, "template", done.take("template"))
    thinks = done.take("enable_thinking")
    arguments(done, "enable_thinking", {"enable_thinking": False} if thinks is False else None)
    if "template" not in done.values:
        done.differ("template: the tokenizer's template is used, as in LLaMA-Factory.")


KIT = Kit(
    name="LLaMA-Factory",
    version="0.9.5",
    marks=(
        "finetuning_type", "stage", "cutoff_len", "lora_target", "dataset_dir", "template", "plot_loss",
        "overwrite_cache", "preprocessing_num_workers", "val_size", "lora_rank", "pref_loss", "pref_beta",
        "quantization_bit", "neat_packing", "flash_attn", "enable_liger_kernel", "export_dir",
    ),
    keys=shared.TRAINING | shared.weights("kto_chosen_weight", "kto_rejected_weight") | {
        "model_name_or_path": Key("model"),
        "model_revision": Key("model_revision", values={"main": None}),
        "trust_remote_code": Key("trust_remote_code", skip_off=True),
        "output_dir": Key("output_dir"),
        "lora_rank": Key("lora_r", default=8, only="lora adapter"),
        "lora_alpha": Key("lora_alpha", default=lambda done: 2 * done.lines["lora_r"].value, page="2 x lora_rank",
                          only="lora adapter"),
        "lora_dropout": Key("lora_dropout", default=0.0, only="lora adapter"),
        "lora_target": Key("lora_target_modules", default="all", only="lora adapter", read=shared.modules),
        "oft_target": Key("lora_target_modules", default="all", only="oft adapter", read=shared.modules),
        "oft_block_size": Key("adapter_config", default=32, only="oft adapter", read=_oft_block),
        "additional_target": Key("modules_to_save", only="adapter", read=words),
        "pref_beta": Key("beta", default=0.1, only="preference"),
        "pref_ftx": Key("rpo_alpha", only="preference", skip_off=True),
        "dpo_label_smoothing": Key("label_smoothing", only="preference", skip_off=True),
        "simpo_gamma": Key("simpo_gamma", default=0.5, only="simpo"),
        "cutoff_len": Key("max_length", default=2048),
        "streaming": Key("streaming", skip_off=True),
        "buffer_size": Key("shuffle_buffer_size"),
        "preprocessing_num_workers": Key("preprocessing_num_workers"),
        "pure_bf16": Key("pure_bf16", skip_off=True),
        "use_dora": Key("use_dora", skip_off=True),
        "use_rslora": Key("use_rslora", skip_off=True),
        "loraplus_lr_ratio": Key("loraplus_lr_ratio"),
        "train_from_scratch": Key("random_init", skip_off=True),
        "fp8": Key("fp8", skip_off=True),
        "enable_liger_kernel": Key("use_liger_kernel", skip_off=True, on_gpu=True),
        "disable_gradient_checkpointing": Key("gradient_checkpointing", values={True: False}, skip_off=True),
        "add_tokens": Key("new_tokens", read=words),
        "early_stopping_steps": Key("early_stopping_patience"),
        "use_unsloth_gc": Key("activation_offload", skip_off=True),
        "disable_shuffling": Key("train_sampling_strategy", values={False: None, True: "sequential"}),
    },
    rules=(
        Rule("stage finetuning_type quantization_bit pref_loss",
             "recipe sft, lora or dpo; adapter, load_in_4bit, loss_type", _recipe),
        Rule("dataset eval_dataset dataset_dir max_samples train_on_prompt mask_history",
             "data, eval_data, columns, train_on", _data, "names are looked up in dataset_info.json if it exists"),
        Rule("sequence_parallel_size val_size use_muon", "sp_size, eval_fraction, optim", _training,
             "Ulysses instead of a ring"),
        Shared("per_device_train_batch_size gradient_accumulation_steps", "the same", shared.batch, "default: batch 8"),
        Rule("packing neat_packing", "packing", _packing, "attention never crosses rows of a pack"),
        *shared.RULES,
        Shared("flash_attn attn", "attn_implementation", shared.attention),
        Rule("template enable_thinking", "chat_template, chat_template_kwargs", _template),
        Rule(shared.SAME, "the same"),
    ),
    lost=shared.NO_COUNTERPART | {
        "formats are detected from the columns (docs/data.md)": "dataset_info.*",
        "the reference is the initial model": "ref_model",
        "set initial_adapter to continue one adapter; merge earlier ones first (docs/adapters.md)": (
            "adapter_name_or_path create_new_adapter adapter_folder"
        ),
        "the recipe always trains; set eval_data or eval_fraction to evaluate": (
            "do_train do_eval do_predict predict_with_generate compute_accuracy eval_on_each_dataset eval_num_beams"
        ),
        "set rope_parameters in the model's config.json": "rope_scaling",
        "sp_size uses Ulysses; tiled_mlp: auto computes the MLP in parts": "sequence_parallel_* alst_*",
        "rows are padded to the longest row of a batch, or not at all (padding_free)": "pad_to_multiple_of",
        "report.html and metrics.jsonl record the speed of each run": "include_mfu",
        "Gaudi is not supported": (
            "use_habana use_lazy_mode use_hpu_graphs* gaudi_config_name throughput_warmup_steps use_flash_attention "
            "flash_attention_* attn_softmax_bf16 pipelining_fwd_bwd"
        ),
        "use optim: galore_adamw or apollo_adamw with optim_args: rank=16": (
            "use_galore galore_* use_apollo apollo_*"
        ),
        "Megatron is not supported; use zero, tp_size or pp_size (recipes/pipeline.py)": (
            "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size virtual_pipeline* "
            "moe_* overlap_* recompute_* use_mca use_distributed_optimizer apply_rope_fusion bias_activation_fusion "
            "sequence_parallel"
        ),
        "unsupported optimizer or method": (
            "use_badam badam_* use_adam_mini use_llama_pro freeze_trainable_* freeze_extra_modules "
            "asft_alpha eaft_alpha use_kt kt_* use_hyper_parallel hyper_parallel_args "
            "ld_alpha pref_bco_weight shift_attn mixture_of_depths enable_qat qat_* fake_quant_*"
        ),
        "images, videos and audio are not trained": (
            "image_* video_* freeze_vision_tower media_dir crop_to_patches freeze_multi_modal_projector "
            "freeze_language_model use_audio_in_video audio_sampling_rate"
        ),
        "the chat template controls the format of thinking (mask_generation_prompt)": "preserve_thinking",
        "use compile_layers: true or fused_lora": "use_unsloth use_v1_kernels",
        "not needed here": (
            "low_cpu_mem_usage upcast_* infer_* print_param_status use_kv_cache quantization_type "
            "double_quantization quantization_device_map pissa_convert ddp_timeout_ "
            "include_effective_tokens_per_second interleave_probs ignore_pad_token_for_loss offload_folder vllm_* "
            "sglang_* loraplus_lr_embedding fp8_* enable_torch_profiler profil*"
        ),
    },
    refused={shared.OTHER_LOSS: "use_dft_loss use_asft_loss use_eaft_loss"},
    meaning=(
        "loss: mean over the trained tokens of a step on all GPUs, as in transformers 5.",
    ),
    same_names=True,
    defaults=shared.DEFAULTS | {
        "quantization_method": "bnb", "use_fast_tokenizer": True, "use_kv_cache": True, "double_quantization": True,
        "ignore_pad_token_for_loss": True, "use_reentrant_gc": True, "low_cpu_mem_usage": True, "enable_thinking": True,
        "freeze_vision_tower": True, "freeze_multi_modal_projector": True, "dataset_dir": "data", "flash_attn": "auto",
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
        "infer_backend": "huggingface", "infer_dtype": "auto",
    },
)  # fmt: skip
