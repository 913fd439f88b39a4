"""The key tables for TRL's command line files and for the alignment handbook, which adds data set mixtures."""

from typing import Any

from zerofit.base.errors import UserError
from zerofit.convert import shared
from zerofit.convert.conversion import Conversion, Key, Kit, Rule, Shared, number, words
from zerofit.convert.templates import TOKENIZER, file_or_text

PREFERENCE_KEYS = ("beta", "max_prompt_length", "precompute_ref_log_probs", "rpo_alpha", "label_smoothing",
                   "reference_free", "simpo_gamma", "cpo_alpha", "f_divergence_type", "sync_ref_model", "use_weighting",
                   "ref_model_init_kwargs", "loss_weights",
                   "max_completion_length")  # fmt: skip

EVAL_SPLITS = ("eval", "validation", "valid", "val", "dev", "test")  # detected automatically in a Hub data set

LOSSES = ("sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "apo_zero", "simpo", "orpo", "kto", "apo_zero_unpaired")

KTO_KEYS = ("desirable_weight", "undesirable_weight")  # keys of KTOTrainer only

OTHER_TRAINERS = {  # keys of unsupported trainers
    "GRPO": ("reward_funcs", "num_generations", "reward_weights", "use_vllm", "vllm_mode"),
    "reward modeling": ("center_rewards_coefficient", "num_labels"),
    "distillation": ("teacher_model_name_or_path", "lmbda", "seq_kd"),
}


def _recipe(done: Conversion) -> None:
    """Choose the recipe from the keys or the path (orpo, dpo), since TRL's files do not name their trainer."""
    for name, keys in OTHER_TRAINERS.items():
        if key := next((key for key in keys if done.values.get(key) is not None), None):
            done.refuse(key, f"{name} is not supported; zerofit trains SFT, LoRA and preferences")
    path = " ".join(part.lower() for part in done.file.parts[-4:])
    trainer = next((name for name in ("orpo", "simpo", "cpo", "dpo", "kto") if name in path), None)
    if any(done.values.get(key) is not None for key in KTO_KEYS):
        trainer = "kto"
    has_pairs = any(done.values.get(key) is not None for key in PREFERENCE_KEYS)
    kind = "lora" if done.take("use_peft") else ""
    done.choose("dpo" if has_pairs or trainer else kind or "sft", "use_peft", adapter=kind, origin="use_peft")
    if done.recipe != "dpo":
        if done.values.get("loss_type") == "chunked_nll":
            done.keep("loss_type")  # as fused_loss does
        return
    losses = words(done.take("loss_type", []))
    if len(losses) > 1 or (losses and losses[0] not in LOSSES):
        done.refuse(f"loss_type: {', '.join(losses)}", f"not supported; use one of {', '.join(LOSSES)}")
    loss = losses[0] if losses else trainer if trainer in ("orpo", "kto") else "sigmoid"
    if loss in ("orpo", "kto") and not losses:
        done.differ(f"loss_type: {loss.upper()} is derived from the path or the keys (TRL's files name no trainer).")
    shared.preference(done, loss, "loss_type" if losses else None)


def _data(done: Conversion) -> None:
    """Convert dataset_name, TRL's `datasets` and the handbook's dataset_mixture and dataset_mixer."""
    key, sources = _sources(done)
    split_key = "dataset_splits" if key == "dataset_mixer" else done.first("dataset_train_split", "train_split")[0]
    config_key = "dataset_config" if done.values.get("dataset_config") else "dataset_configs"
    shared.data(done, sources, key, split_key=split_key or "", config_key=config_key)
    if done.take("dataset_text_field", "text") != "text":
        done.put("columns", [f"text={done.values['dataset_text_field']}"], "dataset_text_field")
    shared.held_out(done, "dataset_mixture: test_split_size")
    if done.recipe != "dpo":
        _mask(done)


def _sources(done: Conversion) -> tuple[str, list[shared.DataSource]]:
    mixture = done.take("dataset_mixture")
    if mixture is not None and not isinstance(mixture, dict):
        raise UserError(f"{done.file}: dataset_mixture is {mixture}: it must be a mapping with `datasets`.")
    entries = done.take("datasets") or (mixture.get("datasets") if isinstance(mixture, dict) else None)
    if entries:
        key = "datasets" if done.values.get("datasets") else "dataset_mixture"
        return key, [source for entry in entries for source in _entry_sources(entry, done)]
    mixer = mixture if isinstance(mixture, dict) and mixture else done.take("dataset_mixer")
    if isinstance(mixer, dict):
        splits = [name for name in words(done.take("dataset_splits", ["train"])) if not name.startswith("test")]
        if len(splits) > 1:
            done.lose("dataset_splits", f"only {splits[0]} is trained; add the files of other splits to data")
        configs = words(done.take("dataset_configs", []))
        config = dict(zip(mixer, configs, strict=False)) if configs else {}
        return "dataset_mixer", [
            shared.DataSource(path, splits[0] if splits else None, config.get(path), weight=float(weight))
            for path, weight in mixer.items()
        ]
    name = done.take("dataset_name")
    split, config = done.first("dataset_train_split", "train_split")[1], done.take("dataset_config")
    if name and not config:  # the handbook and open-r1 use a list
        config = next(iter(words(done.take("dataset_configs", []))), None)
    if done.take("dataset_test_split", "test") in EVAL_SPLITS:
        done.keep("dataset_test_split")  # the eval split of a Hub data set is used automatically
    return "dataset_name", [shared.DataSource(name, split, config)] if name else []


def _entry_sources(entry: dict[str, Any], done: Conversion) -> list[shared.DataSource]:
    path = entry.get("id") or entry.get("path") or ""
    known = {"messages", "prompt", "completion", "chosen", "rejected", "text"}
    for column in set(words(entry.get("columns") or [])) - known:
        done.lose(f"dataset_mixture: {column}", "only the columns of a format are used (docs/data.md)")
    split, config = entry.get("split"), entry.get("config") or entry.get("name")
    weight = number(entry.get("weight"))
    return [
        shared.DataSource(file, split, config, weight=1.0 if weight is None else float(weight))
        for file in shared.files(entry.get("data_files")) or [path]
    ]


def _mask(done: Conversion) -> None:
    """Write the mask: TRL trains on full conversations by default."""
    answers, completion = done.take("assistant_only_loss"), done.take("completion_only_loss")
    if answers or completion:
        done.put("train_on", "assistant", "assistant_only_loss" if answers else "completion_only_loss")
        return
    done.put("train_on", "all", None if completion is None else "completion_only_loss")
    if completion is None:
        done.differ("train_on: TRL trains on all tokens of `messages` and `text` rows, but only on the completion of "
                    "prompt/completion rows: set train_on: assistant for these.")  # fmt: skip


def _evaluation(done: Conversion) -> None:
    """Convert when to evaluate."""
    mixed = done.values.get("dataset_splits") or done.values.get("dataset_mixture")
    has_split = not mixed and done.values.get("dataset_test_split", "test") in EVAL_SPLITS
    strategy = done.values.get("eval_strategy", done.values.get("evaluation_strategy"))
    shared.evaluation(done, strategy not in (None, False, "no") and (has_split or "eval_fraction" in done.lines))


def _length(done: Conversion) -> None:
    key, length = done.first("max_length", "max_seq_length")
    null_key = next((name for name in ("max_length", "max_seq_length") if key is None and name in done.values), None)
    if null_key:
        shared.error_on_long_rows(done, "TRL never truncates rows", null_key)
    else:
        done.put("max_length", 1024 if length is None else length, key)
    if done.recipe == "dpo":
        return
    packing = done.take("packing", bool(done.values.get("dataset_mixer")))
    done.put("packing", packing, "packing" if "packing" in done.values else None)
    if packing and "packing" not in done.values:
        done.differ("packing: the handbook's script (until 2025) packs if the file has a dataset_mixer.")
    strategy = done.take("packing_strategy", "bfd")
    if packing and strategy == "wrapped":
        done.differ("packing_strategy: wrapped splits rows at max_length in TRL; zerofit does not split rows.")


def _template_path(done: Conversion) -> None:
    """Write a path to a Jinja file; other paths name a tokenizer."""
    if str(path := done.take("chat_template_path")).endswith((".jinja", ".j2")):
        done.put("chat_template", path, "chat_template_path")


KEYS = shared.TRAINING | shared.weights() | {
    "model_name_or_path": Key("model"),
    "model_revision": Key("model_revision", values={"main": None}),
    "trust_remote_code": Key("trust_remote_code", skip_off=True),
    "output_dir": Key("output_dir"),
    "learning_rate": Key("learning_rate", default=lambda done: 1e-6 if done.recipe == "dpo" else 2e-5,
                         page="1e-6 for recipe dpo, otherwise 2e-5"),
    "lora_r": Key("lora_r", default=16, only="adapter"),
    "lora_alpha": Key("lora_alpha", default=32, only="adapter"),
    "lora_dropout": Key("lora_dropout", default=0.05, only="adapter"),
    "lora_target_modules": Key(
        "lora_target_modules", default=["q_proj", "v_proj"], only="adapter", read=shared.modules,
        default_note="q_proj and v_proj are peft's default for Llama and similar models; other families may differ"),
    "lora_target_parameters": Key("lora_target_parameters", only="adapter", read=words),
    "lora_modules_to_save": Key("modules_to_save", only="adapter", read=words),
    "load_in_4bit": Key("load_in_4bit", only="adapter", skip_off=True),
    "load_in_8bit": Key("load_in_8bit", only="adapter", skip_off=True),
    "use_dora": Key("use_dora", skip_off=True),
    "use_rslora": Key("use_rslora", skip_off=True),
    "beta": Key("beta", default=0.1, only="preference"),
    "label_smoothing": Key("label_smoothing", only="preference", skip_off=True),
    "rpo_alpha": Key("rpo_alpha", only="preference", skip_off=True),
    "precompute_ref_log_probs": Key("precompute_ref_log_probs", only="preference", skip_off=True),
    "cpo_alpha": Key("rpo_alpha", default=1.0, only="simpo"),
    "simpo_gamma": Key("simpo_gamma", default=0.5, only="simpo"),
    "truncation_mode": Key("truncation", default="keep_start", only="sft or lora",
                           values={"keep_start": "truncate_right", "keep_end": "truncate_left"}),
    "padding_free": Key("padding_free", skip_off=True),
    "activation_offloading": Key("activation_offload", skip_off=True),
    "use_liger": Key("use_liger_kernel", skip_off=True, on_gpu=True),
    "use_flash_attention_2": Key("attn_implementation", values={True: "flash_attention_2"}, skip_off=True, on_gpu=True),
    "dataset_num_proc": Key("preprocessing_num_workers"),
    "preprocessing_num_workers": Key("preprocessing_num_workers"),
    "max_train_samples": Key("max_samples"),
    "dataset_streaming": Key("streaming", skip_off=True),
    "gradient_checkpointing": Key("gradient_checkpointing"),
}  # fmt: skip

DEFAULTS = shared.DEFAULTS | {
    "disable_dropout": True, "auto_insert_empty_system_msg": True, "use_logits_to_keep": False, "eval_packing": None,
    "lora_task_type": "CAUSAL_LM", "gradient_checkpointing": True, "datasets.split": "train", "loss_type": "nll",
    "dataset_train_split": "train", "attn_implementation": "sdpa", "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
}  # fmt: skip

LOST = shared.NO_COUNTERPART | {
    "formats are detected from the columns (docs/data.md)": "datasets.* dataset_mixture.*",
    "the reference is the initial model": "ref_model* sync_ref_model model_init_kwargs_of_reference",
    "the weights' dtype follows from the precision; pure_bf16: true keeps them in bf16": (
        "torch_dtype dtype model_init_kwargs bnb_4bit_* use_bnb_nested_quant"
    ),
    "rows are truncated at max_length": "max_prompt_length max_completion_length",
    "rows are shuffled, and formats are detected from the columns": (
        "dataset_kwargs shuffle_dataset ignore_bias_buffers dataset_splits dataset_configs "
        "auto_insert_empty_system_msg text_column"
    ),
    "the tokenizer sets these tokens": "eos_token pad_token",
    "not needed here": (
        "eval_packing pad_to_multiple_of hub_model_revision disable_dropout decontaminate* "
        "average_tokens_across_devices use_logits_to_keep num_completions log_completions"
    ),
    "unsupported loss option": (
        "ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting loss_weights discopop_tau "
        "router_aux_loss_coef"
    ),
    "not supported for adapters": "lora_task_type lora_bias",
    "the base model of an adapter is its model": "base_model_revision",
    "run zerofit export or zerofit eval after the training": (
        "callbacks benchmarks push_to_hub_revision overwrite_hub_revision"
    ),
    TOKENIZER: "chat_template_path",
    "unsupported method": "mtp_*",
}

RULES = (
    Rule("use_peft loss_type", "recipe sft, lora or dpo; adapter, loss_type", _recipe),
    Rule("dataset_name dataset_config dataset_train_split datasets", "data, data_config, data_split", _data),
    Rule("assistant_only_loss completion_only_loss", "train_on", note="TRL trains on full conversations by default"),
    Shared("per_device_train_batch_size gradient_accumulation_steps", "the same", shared.batch, "default: batch 8"),
    Rule("max_length max_seq_length packing", "max_length, packing", _length, "default 1,024 tokens"),
    Rule("eval_strategy eval_steps", "the same", _evaluation),
    *shared.RULES,
    Shared("attn_implementation", "the same", shared.attention),
    Shared("chat_template", "the same", file_or_text),
    Rule("chat_template_path", "chat_template", _template_path),
    Rule(shared.SAME, "the same"),
)  # fmt: skip

REFUSED = {shared.OTHER_LOSS: "loss_type"}

MEANING = ("loss: mean over the trained tokens of a step on all GPUs, as in TRL.",)

TRL = Kit(
    name="TRL",
    version="1.16.0",
    marks=(
        "dataset_name", "model_name_or_path", "use_peft", "max_seq_length", "dataset_train_split",
        "dataset_test_split", "assistant_only_loss", "torch_dtype", "dataset_text_field", "packing_strategy",
        "dataset_config", "dataset_num_proc", "lora_modules_to_save", "max_prompt_length", "chat_template_path",
    ),
    keys=KEYS, rules=RULES, lost=LOST, refused=REFUSED, meaning=MEANING, same_names=True, defaults=DEFAULTS,
)  # fmt: skip

HANDBOOK = Kit(
    name="alignment-handbook",
    version="of 2025 (TRL 1.16.0)",
    marks=(
        "dataset_mixer", "dataset_mixture", "dataset_splits", "dataset_configs", "auto_insert_empty_system_msg",
        "model_name_or_path", "torch_dtype", "use_peft", "max_seq_length", "max_prompt_length",
    ),
    keys=KEYS,
    rules=(
        Rule("dataset_mixer dataset_mixture dataset_splits dataset_configs", "data, data_split, data_config",
             note="data sets that differ get path, config, split and weight each"),
        *RULES,
    ),
    lost=LOST, refused=REFUSED, meaning=MEANING, same_names=True, defaults=DEFAULTS, like=TRL,
)  # fmt: skip
