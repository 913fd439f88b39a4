"""Compare a run with the checkpoint to resume from, and refuse or report differences."""

import json
from pathlib import Path

from zerofit.base.errors import UserError
from zerofit.job import parallel_dims, program
from zerofit.job.settings import json_value

# Arguments that determine the rows of a step and their weights.
ROWS = ("seed", "data_seed", "packing", "eval_fraction", "train_sampling_strategy", "max_samples", "streaming",
        "shuffle_buffer_size", "max_length")  # fmt: skip

# Arguments of an adapter or a loss. If one of SHAPE differs, the weights do not load; if one of MEANING differs, they
# compute something else.
SHAPE = (
    "adapter",
    "adapter_config",
    "lora_r",
    "lora_target_modules",
    "lora_target_parameters",
    "use_dora",
    "num_virtual_tokens",
    "modules_to_save",
    "freeze",
    "train_only",
    "embedding_learning_rate",
    "head_learning_rate",
)

MEANING = ("lora_alpha", "use_rslora", "init_lora_weights", "load_in_4bit", "load_in_8bit", "beta", "loss_type",
           "label_smoothing", "label_smoothing_factor", "rpo_alpha", "simpo_gamma", "desirable_weight",
           "undesirable_weight",
           "precompute_ref_log_probs")  # fmt: skip

# Arguments that may change on resume, and which value is used.
THIS_RUN = "this run's value is used"

CHECKPOINT = "the checkpoint's value is kept, with its optimizer states"

GROUP_OPTIONS = ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")  # in the optimizer's parameter groups

MAY_CHANGE = {
    **dict.fromkeys(("learning_rate", "loraplus_lr_ratio", *GROUP_OPTIONS), CHECKPOINT),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs",
                     "lora_dropout", "gradient_checkpointing", "gradient_checkpointing_every",
                     "gradient_checkpointing_policy"), THIS_RUN),
}  # fmt: skip

# Arguments that do not change the training, or that other checks compare (data and model by fingerprints; batch,
# optimizer, precision and the split over ranks). Every other difference is reported.
IGNORED = set("""
    batch_eval_metrics bf16 config debug deepspeed disable_tqdm effective_batch_size fp16 greater_is_better
    early_stopping_patience early_stopping_threshold
    hang_timeout ignore_plan ignore_resume_mismatch load_best_model_at_end local_rank metric_for_best_model num_samples
    max_restarts max_tokens_per_sample on_oom optim output_dir plan prediction_loss_only preset project push_to_hub
    certificate report_to resume_from_checkpoint run_name show shuffle_seed skip_memory_metrics canary
    bad_rows chat_template chat_template_kwargs columns data data_config data_format data_split eval_data model
    model_revision train_on truncation trust_remote_code preprocessing_num_workers max_duplicate_fraction
    max_eval_overlap_fraction max_truncated_fraction min_supervised_fraction
    gpus gpu_type gradient_accumulation_steps memory_limit memory_report node_local_storage offload offload_path
    initial_adapter upload_to per_device_eval_batch_size per_device_train_batch_size search_batch_size use_cpu zero
    activation_checkpointing activation_checkpointing_kwargs activation_offload
    attn_implementation experts_implementation fused_loss gradient_checkpointing_kwargs liger_kernel_config
    padding_free tiled_mlp use_cache use_liger_kernel verbose
""".split())  # fmt: skip

IGNORED_PREFIXES = ("dataloader_", "ddp_", "eval_", "hub_", "include_", "log_", "logging_", "save_", "torch_compile",
              "trackio_")  # fmt: skip


def record(settings) -> dict:
    """Return the arguments that a later resume compares, for the checkpoint's facts."""
    values = settings.written()
    compared = [
        n for n in values if n not in {*IGNORED, *parallel_dims.size_flags()} and not n.startswith(IGNORED_PREFIXES)
    ]
    arguments = {name: values.get(name) for name in (*ROWS, *SHAPE, *MEANING, *MAY_CHANGE, *compared)}
    if arguments["data_seed"] is None:
        arguments["data_seed"] = arguments["seed"]
    if not arguments["streaming"]:
        arguments["shuffle_buffer_size"] = None
    return json.loads(json.dumps(arguments, default=str))  # as read from the file


def json_components(settings) -> dict[str, str | None]:
    """Return the optimizer and the scheduler of the DeepSpeed JSON, for a checkpoint's facts."""
    return {section: json_value(settings.deepspeed or {}, f"{section}.type") for section in ("optimizer", "scheduler")}


def check_json_components(settings, checkpoint: Path, known: dict, where: str) -> None:
    """Refuse a DeepSpeed JSON whose optimizer or scheduler does not match the states of the checkpoint.

    transformers loads a scheduler.pt, which a run with a scheduler in its JSON does not save. Raises: UserError.
    """
    now = json_components(settings)
    elsewhere = settings.node_local_storage or settings.values.get("pp_size", 1) > 1
    lacks_schedule = not elsewhere and not (checkpoint / "scheduler.pt").exists()
    was = known.get("of_json") or now | ({"scheduler": "scheduler"} if lacks_schedule and not now["scheduler"] else {})
    file = settings.values.get("deepspeed")
    for section in (section for section in now if now[section] != was[section]):
        saved, current = (types[section] or f"no {section}" for types in (was, now))
        fix = "pass that run's file with --deepspeed" if was[section] else f"remove this section from {file}"
        raise UserError(
            f"{where}: was saved with {saved} in its DeepSpeed JSON, this run has {current} in "
            f"{file or 'the default one'}, and the states are incompatible; {fix}."
        )
    if "of_json" not in known:
        optimizer = now["optimizer"] or settings.optim
        settings.decisions.append(f"{where}: does not record its optimizer; assuming states of {optimizer}")


def check(settings, known: dict, where: str) -> None:
    """Compare this run with the recorded facts of the checkpoint.

    Raises: UserError for the first difference that makes it a different run. With --ignore_resume_mismatch, only for
        differences with which the weights do not load; the others are added to settings.decisions.
    """
    was, now = known.get("settings", {}), record(settings)
    differing = [name for name in was if name in now and was[name] != now[name]]
    for name in (name for name in SHAPE if name in differing):
        raise UserError(
            f"{where}: {_sentence(name, was[name], now[name])}; otherwise its weights and optimizer states do not fit."
        )
    for sentence in _refusals(settings, known, differing, was, now):
        if not settings.ignore_resume_mismatch:
            raise UserError(f"{where}: {sentence} (add --ignore_resume_mismatch true to resume anyway).")
        settings.decisions.append(f"ignore_resume_mismatch: the checkpoint {sentence}")
    old, new = program.recorded_program(known), program.current()
    if old and new and old["sha256"] != new.sha256:
        settings.decisions.append(
            f"the program {old['file']} (sha256 {old['sha256'][:12]}) saved the checkpoint, this run uses "
            f"{new.facts['file']} ({new.sha256[:12]})"
        )
    for name in (name for name in differing if name not in (*ROWS, *MEANING)):
        used = MAY_CHANGE.get(name, THIS_RUN)
        if name in GROUP_OPTIONS and settings.resharded:  # resharding uses this run's optimizer groups
            used = THIS_RUN
        settings.decisions.append(f"{name} {_shown(was[name])} of the checkpoint is {_shown(now[name])} here: {used}")


def _refusals(settings, known: dict, differing: list[str], was: dict, now: dict):
    """Yield a sentence for each difference that makes it a different run."""
    for name in ("effective_batch_size", "optim", "precision"):
        saved, current = known.get(name, getattr(settings, name)), getattr(settings, name)
        if saved != current:
            flag = f"--{saved} true" if name == "precision" and saved != "fp32" else f"--{name} {saved}"
            if name == "precision" and saved == "fp32":
                flag = f"--{current} false"
            reason = " and would continue at another position in the data" if name == "effective_batch_size" else ""
            yield f"was saved with {name} {saved}, this run has {current}{reason}; use {flag}"
    for name in (name for name in (*ROWS, *MEANING) if name in differing):
        yield _sentence(name, was[name], now[name])
    options = "--train_on, --mask_generation_prompt, --truncation, --columns, --data_format or --max_length"
    meaning = {"data": f"data, tokenizer, template, {options}", "model": "model"}
    for name, fingerprint in known.get("fingerprints", {}).items():
        if fingerprint != settings.fingerprints[name]:
            yield f"was saved with another {meaning[name]} than this run; use the same"


def _sentence(name: str, was, now) -> str:
    fix = f"remove --{name}" if was is None else f"use --{name} {_shown(was)}"
    return f"was saved with {name} {_shown(was)}, this run has {_shown(now)}; {fix}"


def _shown(value) -> str:
    """Format the value as on a command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
