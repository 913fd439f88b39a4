"""Compare a run with the checkpoint it resumes from: refuse or report what differs."""

import json
from pathlib import Path

from zerofit.base.errors import UserError
from zerofit.job import groups, program
from zerofit.job.settings import json_value

# Arguments that decide which rows a step sees and how they are weighted.
ROWS = ("seed", "data_seed", "packing", "eval_fraction", "train_sampling_strategy", "max_samples", "streaming",
        "shuffle_buffer_size", "max_length")  # fmt: skip

# Arguments of an adapter or a loss: with another SHAPE the weights do not load; with another MEANING they compute
# something else.
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

# Arguments that may change on resume, and the value that is used then.
THIS_RUNS = "this run's is used"

CHECKPOINTS = "the checkpoint's is kept, with its optimizer states"

OF_GROUPS = ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")  # in the optimizer's parameter groups

MAY_CHANGE = {
    **dict.fromkeys(("learning_rate", "loraplus_lr_ratio", *OF_GROUPS), CHECKPOINTS),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs",
                     "lora_dropout", "gradient_checkpointing", "gradient_checkpointing_every",
                     "gradient_checkpointing_policy"), THIS_RUNS),
}  # fmt: skip

# Arguments that do not change what is trained, or whose effect is compared instead (data and model by fingerprints,
# batch, optimizer, precision and the split over ranks by their own checks). Every other difference is reported.
DO_NOT_MATTER = set("""
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
    padding_free tiled_mlp use_cache use_liger_kernel
""".split())  # fmt: skip

BEGINNINGS = ("dataloader_", "ddp_", "eval_", "hub_", "include_", "log_", "logging_", "save_", "torch_compile",
              "trackio_")  # fmt: skip


def record(settings) -> dict:
    """Return the arguments that a later resume compares, for the checkpoint's facts."""
    values = settings.written()
    matter = [n for n in values if n not in {*DO_NOT_MATTER, *groups.flags()} and not n.startswith(BEGINNINGS)]
    arguments = {name: values.get(name) for name in (*ROWS, *SHAPE, *MEANING, *MAY_CHANGE, *matter)}
    if arguments["data_seed"] is None:
        arguments["data_seed"] = arguments["seed"]
    if not arguments["streaming"]:
        arguments["shuffle_buffer_size"] = None
    return json.loads(json.dumps(arguments, default=str))  # as it is read from the file


def of_json(settings) -> dict[str, str | None]:
    """Return the optimizer and the scheduler that a DeepSpeed JSON has, for a checkpoint's facts."""
    return {section: json_value(settings.deepspeed or {}, f"{section}.type") for section in ("optimizer", "scheduler")}


def check_json(settings, checkpoint: Path, known: dict, where: str) -> None:
    """Refuse another optimizer or scheduler of a DeepSpeed JSON than the checkpoint's: its states are of that one.

    transformers looks for a scheduler.pt, which a run whose JSON has a scheduler does not save. Raises: UserError.
    """
    now = of_json(settings)
    elsewhere = settings.node_local_storage or settings.values.get("pp_size", 1) > 1
    lacks_schedule = not elsewhere and not (checkpoint / "scheduler.pt").exists()
    was = known.get("of_json") or now | ({"scheduler": "scheduler"} if lacks_schedule and not now["scheduler"] else {})
    file = settings.values.get("deepspeed")
    for section in (section for section in now if now[section] != was[section]):
        had, has = (one[section] or f"no {section}" for one in (was, now))
        fix = "give the file of that run with --deepspeed" if was[section] else f"leave the section out of {file}"
        raise UserError(
            f"{where}: was saved with {had} in its DeepSpeed JSON, this run has {has} in "
            f"{file or 'one'}: {fix}; the states of one do not fit the other."
        )
    if "of_json" not in known:
        own = now["optimizer"] or settings.optim
        settings.decisions.append(f"{where}: does not record its optimizer; its states are taken to be those of {own}")


def check(settings, known: dict, where: str) -> None:
    """Compare this run with the checkpoint's facts, as far as the version that saved it recorded them.

    Raises: UserError for the first difference that makes it a different run; with --ignore_resume_mismatch only for
        one with which the weights do not load, the others become lines of settings.decisions.
    """
    was, now = known.get("settings", {}), record(settings)
    other_names = [name for name in was if name in now and was[name] != now[name]]
    for name in (name for name in SHAPE if name in other_names):
        raise UserError(
            f"{where}: {_sentence(name, was[name], now[name])}; its weights and optimizer states fit no other."
        )
    for sentence in _refusals(settings, known, other_names, was, now):
        if not settings.ignore_resume_mismatch:
            raise UserError(f"{where}: {sentence} (add --ignore_resume_mismatch true to resume anyway).")
        settings.decisions.append(f"ignore_resume_mismatch: the checkpoint {sentence}")
    if (saved_by := program.said_by(known)) and (running := program.current()) and saved_by["sha256"] != running.sha256:
        settings.decisions.append(
            f"the program of the checkpoint, {saved_by['file']} (sha256 {saved_by['sha256'][:12]}), is "
            f"{running.facts['file']} ({running.sha256[:12]}) here: {THIS_RUNS}"
        )
    for name in (name for name in other_names if name not in (*ROWS, *MEANING)):
        taken = MAY_CHANGE.get(name, THIS_RUNS)
        if name in OF_GROUPS and settings.resharded:  # resharding uses this run's optimizer groups
            taken = THIS_RUNS
        settings.decisions.append(f"{name} {_shown(was[name])} of the checkpoint is {_shown(now[name])} here: {taken}")


def _refusals(settings, known: dict, other: list[str], was: dict, now: dict):
    """Yield a sentence for each difference that makes it a different run."""
    for name in ("effective_batch_size", "optim", "precision"):
        saved, current = known.get(name, getattr(settings, name)), getattr(settings, name)
        if saved != current:
            flag = f"--{saved} true" if name == "precision" and saved != "fp32" else f"--{name} {saved}"
            if name == "precision" and saved == "fp32":
                flag = f"--{current} false"
            reason = ": it would continue at another position in the data" if name == "effective_batch_size" else ""
            yield f"was saved with {name} {saved}, this run has {current}{reason}; use {flag}"
    for name in (name for name in (*ROWS, *MEANING) if name in other):
        yield _sentence(name, was[name], now[name])
    options = "--train_on, --mask_generation_prompt, --truncation, --columns, --data_format or --max_length"
    meaning = {"data": f"data, tokenizer, template, {options}", "model": "model"}
    for name, fingerprint in known.get("fingerprints", {}).items():
        if fingerprint != settings.fingerprints[name]:
            yield f"was saved with another {meaning[name]} than this run has; use the same"


def _sentence(name: str, was, now) -> str:
    fix = f"leave --{name} out" if was is None else f"use --{name} {_shown(was)}"
    return f"was saved with {name} {_shown(was)}, this run has {_shown(now)}; {fix}"


def _shown(value) -> str:
    """Format the value as on a command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
