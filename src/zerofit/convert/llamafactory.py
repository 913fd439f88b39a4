"""The table of LLaMA-Factory's keys."""

from pathlib import Path
from typing import Any

from zerofit.convert import sharding, shared
from zerofit.convert.conversion import Conversion, Key, Kit, Rule, Shared, number, sectioned, words
from zerofit.convert.templates import arguments, template
from zerofit.job import settings_file

OTHER_JOBS = "zerofit trains pt, sft, kto and dpo (with pref_loss sigmoid, hinge, ipo, orpo or simpo)"

KINDS = {"full": "sft", "lora": "lora", "oft": "lora"}


def _recipe(done: Conversion) -> None:
    """Choose the recipe from `stage` and `finetuning_type`, and write the preference loss and the adapter."""
    stage, kind = done.take("stage", "sft"), done.take("finetuning_type", "lora")
    if key := next((key for key in ("train_dataset", "dist_config", "peft_config") if key in done.given), None):
        done.refuse(key, "is of LLaMA-Factory's new layout (v1), whose keys are not read here")
    if done.given.get("export_dir") or not (done.take("do_train") or done.given.get("dataset")):
        done.refuse("do_train", "the file trains nothing (it exports, chats or predicts)")
    if stage not in ("pt", "sft", "dpo", "kto"):
        done.refuse(f"stage: {stage}", f"has no counterpart: {OTHER_JOBS}")
    if kind not in KINDS:
        done.refuse(
            f"finetuning_type: {kind}", "has no counterpart: all weights train (sft, dpo), or an adapter (lora)"
        )
    pairs, adapter = stage in ("dpo", "kto"), kind if kind != "full" else ""
    origin = "finetuning_type" if "finetuning_type" in done.given else None
    done.choose("dpo" if pairs else KINDS[kind], "stage", "finetuning_type", adapter=adapter, origin=origin)
    if done.take("do_train", True) is False:
        done.refuse("do_train: false", "trains nothing")
    if pairs:
        loss = done.take("pref_loss", "sigmoid")
        if loss == "kto_pair":
            done.refuse("pref_loss: kto_pair", f"has no counterpart: {OTHER_JOBS}")
        loss, key = ("kto", "stage") if stage == "kto" else (loss, "pref_loss")
        shared.preference(done, loss, key if key in done.given else None)
    if adapter:
        shared.quantized(done, "quantization_method", "quantization_bit")
    elif bits := done.take("quantization_bit"):
        done.lose("quantization_bit", f"all weights train, so none are in {bits} bits")
    if kind == "lora" and done.take("pissa_init"):
        rounds = done.take("pissa_iter", 16)
        done.put("init_lora_weights", "pissa" if rounds == -1 else f"pissa_niter_{rounds}", "pissa_init")


def _data(done: Conversion) -> None:
    """Convert the names of data sets, looked up in dataset_info.json where it is here."""
    folder = str(done.take("dataset_dir", "data"))
    registry = _registry(done.file, folder)
    for key, ours in (("dataset", "data"), ("eval_dataset", "eval_data")):
        names = words(done.take(key, []))
        unknown = [name for name in names if name not in registry]
        sources = [_source(done, name, registry.get(name), folder) for name in names]
        shared.data(done, sources, f"{key}, dataset_dir" if "dataset_dir" in done.given else key, ours)
        if unknown:
            done.differ(
                f"{key}: {', '.join(unknown)}: the files' names are in LLaMA-Factory's {folder}/dataset_info.json, "
                "which is not here; check those in data, or convert where it is."
            )
    if "preference" not in done.trained:
        is_text = done.given.get("stage") == "pt"
        value, key = ("all", "stage: pt") if is_text else ("assistant", None)
        for name, meaning in (("mask_history", "last_turn"), ("train_on_prompt", "all")):
            if done.take(name):
                value, key = meaning, name
        done.put("train_on", value, key)
    if (count := done.take("max_samples")) and len(words(done.given.get("dataset", []))) > 1:
        done.lose("max_samples", f"{count} rows of each set there: max_samples counts the rows of all sets")
    elif count:
        done.put("max_samples", count, "max_samples")
    if done.take("mix_strategy", "concat") != "concat":
        done.lose("mix_strategy", "sets are concatenated: weigh them as data: [a.jsonl:2]")


def _registry(file: Path, folder: str) -> dict[str, dict]:
    for base in (Path(folder), file.parent / folder, file.parent):
        path = base / "dataset_info.json"
        if path.is_file():
            known = settings_file.load(str(path), as_written=True)[0]
            return {name: entry | {"_folder": str(path.parent)} for name, entry in known.items()}
    return {}


COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system",
           "messages": "messages", "chosen": "chosen", "rejected": "rejected", "tools": "tools",
           "kto_tag": "label"}  # fmt: skip


def _source(done: Conversion, name: str, entry: dict | None, folder: str) -> shared.Source:
    if entry is None:
        return shared.Source(name if "/" in name or "." in name else f"{folder}/{name}.json")
    entry = done.held[f"{name} in dataset_info.json"] = sectioned(entry)
    theirs = entry.get("columns") or {}
    columns = {ours: theirs[key] for key, ours in COLUMNS.items() if key in theirs and theirs[key] != ours}
    if columns.get("messages") == "conversations":
        del columns["messages"]
    if entry.get("tags"):
        entry["tags"].items()
        done.differ(f"dataset: {name}: tags of turns are read as role/content or from/value.")
    for key in ("formatting", "ranking", "file_name", "hf_hub_url", "ms_hub_url", "_folder"):
        entry.get(key)  # the form of a row is found by its columns
    path = entry.get("hf_hub_url") or (entry.get("file_name") and str(Path(entry["_folder"]) / entry["file_name"]))
    path = path or entry.get("ms_hub_url") or name
    return shared.Source(str(path), entry.get("split"), entry.get("subset"), entry.get("revision"), columns)


def _training(done: Conversion) -> None:
    """Convert the GPUs that share a row, evaluation and an optimizer with a key of its own."""
    key, size = done.first("sequence_parallel_size", "context_parallel_size")
    sharding.split_rows(done, key, size and number(size))
    if done.take("use_muon"):
        done.put("optim", "muon", "use_muon")
    shared.evaluation(done, shared.held_out(done, "val_size"))


def _oft_block(size: Any) -> list[str]:
    return [f"oft_block_size={size}"]


def _packing(done: Conversion) -> None:
    neat, (key, packing) = done.take("neat_packing"), done.first("packing", "dataset_concatenation")
    is_text = done.given.get("stage") == "pt"
    on = bool(neat or (is_text if packing is None else packing))
    done.put("packing", on, ", ".join(filter(None, ("neat_packing" * bool(neat), key))) or None)
    if on and not neat:
        done.differ(
            "packing: rows of a pack do not see each other here, as with neat_packing; LLaMA-Factory's do without it"
            + (", and its texts are cut at cutoff_len, not packed whole." if is_text else ".")
        )


def _template(done: Conversion) -> None:
    template(done, "template", done.take("template"))
    thinks = done.take("enable_thinking")
    arguments(done, "enable_thinking", {"enable_thinking": False} if thinks is False else None)
    if "template" not in done.given:
        done.differ("template: LLaMA-Factory takes the tokenizer's own, as here.")


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
        "trust_remote_code": Key("trust_remote_code", asked=True),
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
        "pref_ftx": Key("rpo_alpha", only="preference", asked=True),
        "dpo_label_smoothing": Key("label_smoothing", only="preference", asked=True),
        "simpo_gamma": Key("simpo_gamma", default=0.5, only="simpo"),
        "cutoff_len": Key("max_length", default=2048),
        "streaming": Key("streaming", asked=True),
        "buffer_size": Key("shuffle_buffer_size"),
        "preprocessing_num_workers": Key("preprocessing_num_workers"),
        "pure_bf16": Key("pure_bf16", asked=True),
        "use_dora": Key("use_dora", asked=True),
        "use_rslora": Key("use_rslora", asked=True),
        "loraplus_lr_ratio": Key("loraplus_lr_ratio"),
        "train_from_scratch": Key("random_init", asked=True),
        "fp8": Key("fp8", asked=True),
        "enable_liger_kernel": Key("use_liger_kernel", asked=True, on_gpu=True),
        "disable_gradient_checkpointing": Key("gradient_checkpointing", values={True: False}, asked=True),
        "add_tokens": Key("new_tokens", read=words),
        "early_stopping_steps": Key("early_stopping_patience"),
        "use_unsloth_gc": Key("activation_offload", asked=True),
        "disable_shuffling": Key("train_sampling_strategy", values={False: None, True: "sequential"}),
    },
    rules=(
        Rule("stage finetuning_type quantization_bit pref_loss",
             "recipe sft, lora or dpo; adapter, load_in_4bit, loss_type", _recipe),
        Rule("dataset eval_dataset dataset_dir max_samples train_on_prompt mask_history",
             "data, eval_data, columns, train_on", _data, "names are looked up in dataset_info.json where it is here"),
        Rule("sequence_parallel_size val_size use_muon", "sp_size, eval_fraction, optim", _training,
             "heads are exchanged (Ulysses), not a ring"),
        Shared("per_device_train_batch_size gradient_accumulation_steps", "the same", shared.batch, "default: batch 8"),
        Rule("packing neat_packing", "packing", _packing, "rows of a pack never see each other"),
        *shared.RULES,
        Shared("flash_attn attn", "attn_implementation", shared.attention),
        Rule("template enable_thinking", "chat_template, chat_template_kwargs", _template),
        Rule(shared.SAME, "the same"),
    ),
    lost=shared.NO_COUNTERPART | {
        "rows are read by their columns (docs/data.md)": "dataset_info.*",
        "the reference is the model before training": "ref_model",
        "one adapter goes on as initial_adapter; merge those before it (zerofit export a --merge), see adapters.md": (
            "adapter_name_or_path create_new_adapter adapter_folder"
        ),
        "the recipe trains; rows to evaluate on are eval_data or eval_fraction": (
            "do_train do_eval do_predict predict_with_generate compute_accuracy eval_on_each_dataset eval_num_beams"
        ),
        "the position embeddings are the model's own: rope_parameters in its config.json": "rope_scaling",
        "sp_size exchanges heads (Ulysses); tiled_mlp: auto computes the MLP in parts": "sequence_parallel_* alst_*",
        "rows are padded to the longest of a batch, or not at all (padding_free)": "pad_to_multiple_of",
        "report.html and metrics.jsonl have the speed of each run": "include_mfu",
        "of Gaudi: the kernels and the precision of GPUs are chosen here": (
            "use_habana use_lazy_mode use_hpu_graphs* gaudi_config_name throughput_warmup_steps use_flash_attention "
            "flash_attention_* attn_softmax_bf16 pipelining_fwd_bwd"
        ),
        "galore_adamw and apollo_adamw are optimizers here, with optim_args: rank=16": (
            "use_galore galore_* use_apollo apollo_*"
        ),
        "of Megatron: zero, tp_size and pp_size (recipes/pipeline.py) split a model": (
            "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size virtual_pipeline* "
            "moe_* overlap_* recompute_* use_mca use_distributed_optimizer apply_rope_fusion bias_activation_fusion "
            "sequence_parallel"
        ),
        "no optimizer or method of this kind": (
            "use_badam badam_* use_adam_mini use_llama_pro freeze_trainable_* freeze_extra_modules "
            "asft_alpha eaft_alpha use_kt kt_* use_hyper_parallel hyper_parallel_args "
            "ld_alpha pref_bco_weight shift_attn mixture_of_depths enable_qat qat_* fake_quant_*"
        ),
        "images, videos and audios are not trained": (
            "image_* video_* freeze_vision_tower media_dir crop_to_patches freeze_multi_modal_projector "
            "freeze_language_model use_audio_in_video audio_sampling_rate"
        ),
        "the chat template alone decides how thinking is written (mask_generation_prompt)": "preserve_thinking",
        "compile_layers: true and fused_lora are this kit's kernels": "use_unsloth use_v1_kernels",
        "not needed here": (
            "low_cpu_mem_usage upcast_* infer_* print_param_status use_kv_cache quantization_type "
            "double_quantization quantization_device_map pissa_convert ddp_timeout_ "
            "include_effective_tokens_per_second interleave_probs ignore_pad_token_for_loss offload_folder vllm_* "
            "sglang_* loraplus_lr_embedding fp8_* enable_torch_profiler profil*"
        ),
    },
    refused={shared.OTHER_LOSS: "use_dft_loss use_asft_loss use_eaft_loss"},
    meaning=(
        "loss: mean over the trained tokens of the whole step on all GPUs, as in transformers 5.",
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
