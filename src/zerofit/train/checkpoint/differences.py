"""Compare a run with the checkpoint it resumes from: refuse or report what differs."""

import json

from zerofit.errors import UserError

# Arguments that decide which rows a step sees and how they are weighted.
ROWS = ("seed", "data_seed", "packing", "eval_fraction", "train_sampling_strategy", "max_samples", "streaming",
        "shuffle_buffer_size", "max_length")  # fmt: skip

# Arguments of the adapter whose weights would fit no other, and those that would fit and mean something else.
SHAPE = (
    "adapter",
    "adapter_config",
    "lora_r",
    "lora_target_modules",
    "use_dora",
    "num_virtual_tokens",
    "modules_to_save",
)

MEANING = ("lora_alpha", "use_rslora", "init_lora_weights", "load_in_4bit", "load_in_8bit")

# Arguments that may change on the way, and what becomes of the new value.
THIS_RUNS = "this run's is taken"

CHECKPOINTS = "the checkpoint's goes on, which keeps it with its optimizer states"

MAY_CHANGE = {
    "learning_rate": CHECKPOINTS, "loraplus_lr_ratio": CHECKPOINTS, "weight_decay": CHECKPOINTS,
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs",
                     "lora_dropout"), THIS_RUNS),
}  # fmt: skip


def record(settings) -> dict:
    """Return the arguments that a later resume compares, for the checkpoint's facts."""
    found = {name: settings.values.get(name) for name in (*ROWS, *SHAPE, *MEANING, *MAY_CHANGE)}
    if found["data_seed"] is None:
        found["data_seed"] = found["seed"]
    if not found["streaming"]:
        found["shuffle_buffer_size"] = None
    return json.loads(json.dumps(found, default=str))  # as it comes back from the file


def check(settings, known: dict, where: str) -> None:
    """Compare this run with the checkpoint's facts; what an older version has not recorded is not compared.

    Raises: UserError for the first difference that makes another run of it; --ignore_resume_mismatch: it is said instead, as far
        as the weights fit.
    """
    was, now = known.get("settings", {}), record(settings)
    other = [name for name in was if name in now and was[name] != now[name]]
    for name in (name for name in SHAPE if name in other):
        raise UserError(f"{where}: {_sentence(name, was[name], now[name])}; its weights fit no other adapter.")
    for sentence in _refusals(settings, known, other, was, now):
        if not settings.ignore_resume_mismatch:
            raise UserError(f"{where}: {sentence} (--ignore_resume_mismatch true goes on nevertheless).")
        settings.decisions.append(f"ignore_resume_mismatch: the checkpoint {sentence}")
    for name in (name for name in MAY_CHANGE if name in other):
        taken = MAY_CHANGE[name]
        if name == "weight_decay" and settings.resharded:  # the optimizer's groups are this run's
            taken = THIS_RUNS
        settings.decisions.append(f"{name} {_shown(was[name])} of the checkpoint is {_shown(now[name])} here: {taken}")


def _refusals(settings, known: dict, other: list[str], was: dict, now: dict):
    """Yield a sentence for each difference that makes another run of it."""
    for name in ("effective_batch_size", "optim", "precision"):
        before, here = known.get(name, getattr(settings, name)), getattr(settings, name)
        if before != here:
            flag = f"--{before} true" if name == "precision" and before != "fp32" else f"--{name} {before}"
            if name == "precision" and before == "fp32":
                flag = f"--{here} false"
            because = ": it would go on at another place of the data" if name == "effective_batch_size" else ""
            yield f"was saved with {name} {before}, this run has {here}{because}; use {flag}"
    for name in (name for name in (*ROWS, *MEANING) if name in other):
        yield _sentence(name, was[name], now[name])
    meaning = {"data": "data, tokenizer, template or --max_length", "model": "model"}
    for name, fingerprint in known.get("fingerprints", {}).items():
        if fingerprint != settings.fingerprints[name]:
            yield f"was saved with another {meaning[name]} than this run has; give it the same"


def _sentence(name: str, was, now) -> str:
    fix = f"leave --{name} out" if was is None else f"use --{name} {_shown(was)}"
    return f"was saved with {name} {_shown(was)}, this run has {_shown(now)}; {fix}"


def _shown(value) -> str:
    """Return the value as it is written on a command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
