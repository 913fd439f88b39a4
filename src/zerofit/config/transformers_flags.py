"""Refuse unsupported TrainingArguments with the reason; tests/config/test_transformers_flags.py covers the others."""

import difflib
import importlib.util
from typing import Any

from zerofit.base.errors import UserError
from zerofit.job.settings import decide

_LOSS_ONLY = "evaluation computes loss and perplexity only, without predictions; leave it out"

_PRECISION = "evaluation uses the precision of the training; use --bf16 or --fp16, or leave it out"

_SHARDING = "FSDP is unsupported, ZeRO shards the model here; use --zero 3"


# Argument -> why this trainer does not support it, and the alternative. transformers' default is accepted.
REFUSED = {
    "fsdp": _SHARDING,
    "fsdp_config": _SHARDING,
    "parallelism_config": "use --sp_size for sequence parallelism, --tp_size for tensor parallelism and --pp_size for "
    "pipelines; context parallelism is unsupported",
    "do_predict": "test sets are unsupported; use --eval_data",
    "dataloader_drop_last": "the last step of an epoch is padded with rows without loss, so that each row counts once; "
    "leave it out",
    "bf16_full_eval": _PRECISION,
    "fp16_full_eval": _PRECISION,
    "prediction_loss_only": _LOSS_ONLY,
    "eval_accumulation_steps": _LOSS_ONLY,
    "eval_do_concat_batches": _LOSS_ONLY,
    "eval_use_gather_object": _LOSS_ONLY,
    "include_for_metrics": _LOSS_ONLY,
    "batch_eval_metrics": _LOSS_ONLY,
    "label_names": "--train_on sets the labels; leave it out",
    "length_column_name": "lengths are counted from the tokens; leave it out",
    "accelerator_config": "the recipe sets up the processes and distributes the rows; leave it out",
    "auto_find_batch_size": "it changes the rows of a step; use --per_device_train_batch_size auto, or --on_oom retry",
    "save_on_each_node": "checkpoints are written once; without a shared disk use --node_local_storage true",
    "enable_jit_checkpoint": "SIGTERM and SIGUSR1 save a checkpoint anyway; leave it out",
    "skip_memory_metrics": "its numbers are not printed; use --memory_report true",
    "restore_callback_states_from_checkpoint": "the callbacks of this trainer do not have states; leave it out",
}

OFF = ("", "none", "false", "[]", "{}")  # values of an argument that turn it off

# Value of --report_to -> (modules, at least one required; packages to install).
TRACKERS = {
    "azure_ml": (("azureml",), "azureml-core azureml-mlflow"),
    "clearml": (("clearml",), "clearml"),
    "codecarbon": (("codecarbon",), "codecarbon"),
    "comet_ml": (("comet_ml",), "comet-ml"),
    "dagshub": (("dagshub",), "dagshub mlflow"),
    "dvclive": (("dvclive",), "dvclive"),
    "flyte": (("flytekit",), "flytekit flytekitplugins-deck-standard"),
    "kubeflow": ((), ""),
    "mlflow": (("mlflow",), "mlflow"),
    "neptune": (("neptune",), "neptune"),
    "swanlab": (("swanlab",), "swanlab"),
    "tensorboard": (("tensorboard", "tensorboardX"), "tensorboard"),
    "trackio": (("trackio",), "trackio"),
    "wandb": (("wandb",), "wandb"),
}


def resolve(settings) -> None:
    """Refuse the arguments that have no effect or a wrong one in this trainer.

    Raises: UserError with the argument, the reason and the alternative.
    """
    from accelerate.utils import DynamoBackend

    explicit, defaults = settings.explicit, settings.defaults
    for name, why in REFUSED.items():
        off = explicit.get(name) == defaults[name] or (not defaults[name] and str(explicit.get(name)).lower() in OFF)
        if name in explicit and not off:
            raise UserError(f"--{name} {explicit[name]}: {why}.")
    backend = explicit.get("torch_compile_backend")
    if backend and backend.upper() not in (known := DynamoBackend.__members__):
        raise UserError(
            f"--torch_compile_backend {backend}: unknown to accelerate; use one of {', '.join(known).lower()}."
        )
    if explicit.get("do_train") is False:
        raise UserError("--do_train false: recipes always train; leave it out, or use --plan true for a dry run.")
    if explicit.get("logging_nan_inf_filter"):
        raise UserError(
            "--logging_nan_inf_filter true: --on_nan already excludes steps with a non-finite loss from the mean and "
            "reports them; leave it out."
        )
    backend = "gloo" if settings.use_cpu else "nccl"
    if explicit.get("ddp_backend") not in (None, backend):
        raise UserError(f"--ddp_backend {explicit['ddp_backend']}: this run uses {backend}; leave it out.")
    _check_best_metric(settings, explicit)
    has_rows = bool(settings.eval_data or settings.eval_fraction)  # evaluation runs if rows are set
    if explicit.get("do_eval") is True and not has_rows:
        raise UserError("--do_eval true: eval rows are missing; add --eval_data or --eval_fraction.")
    if explicit.get("do_eval") is False and has_rows:
        raise UserError("--do_eval false: eval rows are set; leave out --eval_data and --eval_fraction.")
    check_trackers(settings.report_to)


def _check_best_metric(settings, explicit: dict[str, Any]) -> None:
    """Refuse a --metric_for_best_model that is not computed; lower is better for all others."""
    metrics, name = (
        settings.objective.metrics,
        explicit.get("metric_for_best_model"),
    )  # may raise UserError
    if settings.early_stopping_patience is not None:
        _check_early_stopping(settings)
        if name is None:
            name = (settings.recipe.score or metrics)[0]
            decide(settings, "metric_for_best_model", name, "used by --early_stopping_patience")
    if name is None:
        return
    score = [f"eval_{known}" for known in settings.recipe.score or metrics]
    if f"eval_{name.removeprefix('eval_')}" not in score:
        raise UserError(
            f"--metric_for_best_model {name}: an evaluation of {settings.recipe} computes {' and '.join(score)}."
        )
    if explicit.get("greater_is_better") is None:  # transformers' default is true for names that do not end in "loss"
        decide(settings, "greater_is_better", False)


def _check_early_stopping(settings) -> None:
    """Refuse early stopping without evaluations."""
    if settings.eval_strategy == "no" or not (settings.eval_data or settings.eval_fraction):
        raise UserError(
            "--early_stopping_patience needs evaluations; add --eval_data or --eval_fraction, and leave out "
            "--eval_strategy no."
        )


def check_trackers(names: str | list[str] | None) -> None:
    """Raise UserError for a tracker of --report_to that is unknown or not installed."""
    for name in [names] if isinstance(names, str) else names or []:
        if name in ("none", "all"):
            continue
        if name not in TRACKERS:
            close = difflib.get_close_matches(name, TRACKERS, 1)
            hint = f"did you mean {close[0]}?" if close else f"use none, all, {', '.join(TRACKERS)}."
            raise UserError(f"--report_to {name}: unknown tracker; {hint}")
        modules, packages = TRACKERS[name]
        if modules and not any(importlib.util.find_spec(module) for module in modules):
            raise UserError(f"--report_to {name}: is not installed: pip install {packages}.")
