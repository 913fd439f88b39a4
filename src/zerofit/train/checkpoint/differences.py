"""Compare a run with the checkpoint it resumes from: refuse or report what differs."""

import json

from zerofit.errors import UserError

# Arguments that decide which rows a step sees and how they are weighted.
ROWS = ("seed", "data_seed", "packing", "eval_fraction", "train_sampling_strategy", "max_samples", "streaming",
        "shuffle_buffer_size", "max_length")  # fmt: skip

# Arguments of an adapter or a preference loss: with another SHAPE the weights do not load; with another MEANING they
# compute something else.
SHAPE = (
    "adapter",
    "adapter_config",
    "lora_r",
    "lora_target_modules",
    "use_dora",
    "num_virtual_tokens",
    "modules_to_save",
)

MEANING = ("lora_alpha", "use_rslora", "init_lora_weights", "load_in_4bit", "load_in_8bit", "beta", "loss_type",
           "label_smoothing", "rpo_alpha", "simpo_gamma", "precompute_ref_log_probs")  # fmt: skip

# Arguments that may change on resume, and whose value is used then.
THIS_RUNS = "this run's is taken"

CHECKPOINTS = "the checkpoint's goes on, which keeps it with its optimizer states"

MAY_CHANGE = {
    "learning_rate": CHECKPOINTS, "loraplus_lr_ratio": CHECKPOINTS, "weight_decay": CHECKPOINTS,
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs",
                     "lora_dropout", "gradient_checkpointing", "gradient_checkpointing_every",
                     "gradient_checkpointing_policy"), THIS_RUNS),
}  # fmt: skip


def record(settings) -> dict:
    """Return the arguments that a later resume compares, for the checkpoint's facts."""
    values = settings.written()
    arguments = {name: values.get(name) for name in (*ROWS, *SHAPE, *MEANING, *MAY_CHANGE)}
    if arguments["data_seed"] is None:
        arguments["data_seed"] = arguments["seed"]
    if not arguments["streaming"]:
        arguments["shuffle_buffer_size"] = None
    return json.loads(json.dumps(arguments, default=str))  # as it will be read back from the file


def check(settings, known: dict, where: str) -> None:
    """Compare this run with the checkpoint's facts, as far as the version that saved it recorded them.

    Raises: UserError for the first difference that makes it a different run; with --ignore_resume_mismatch only for
        one with which the weights do not load, the others become lines of settings.decisions.
    """
    was, now = known.get("settings", {}), record(settings)
    other_names = [name for name in was if name in now and was[name] != now[name]]
    for name in (name for name in SHAPE if name in other_names):
        raise UserError(f"{where}: {_sentence(name, was[name], now[name])}; its weights fit no other adapter.")
    for sentence in _refusals(settings, known, other_names, was, now):
        if not settings.ignore_resume_mismatch:
            raise UserError(f"{where}: {sentence} (--ignore_resume_mismatch true goes on nevertheless).")
        settings.decisions.append(f"ignore_resume_mismatch: the checkpoint {sentence}")
    for name in (name for name in MAY_CHANGE if name in other_names):
        taken = MAY_CHANGE[name]
        if name == "weight_decay" and settings.resharded:  # resharding uses this run's optimizer groups
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
            reason = ": it would go on at another place of the data" if name == "effective_batch_size" else ""
            yield f"was saved with {name} {saved}, this run has {current}{reason}; use {flag}"
    for name in (name for name in (*ROWS, *MEANING) if name in other):
        yield _sentence(name, was[name], now[name])
    options = "--train_on, --mask_generation_prompt, --truncation, --columns, --data_format or --max_length"
    meaning = {"data": f"data, tokenizer, template, {options}", "model": "model"}
    for name, fingerprint in known.get("fingerprints", {}).items():
        if fingerprint != settings.fingerprints[name]:
            yield f"was saved with another {meaning[name]} than this run has; give it the same"


def _sentence(name: str, was, now) -> str:
    fix = f"leave --{name} out" if was is None else f"use --{name} {_shown(was)}"
    return f"was saved with {name} {_shown(was)}, this run has {_shown(now)}; {fix}"


def _shown(value) -> str:
    """Format the value as on a command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
