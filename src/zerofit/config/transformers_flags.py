"""Refuse unsupported TrainingArguments, with the reason; tests/config/test_transformers_flags.py covers the others."""

import difflib
import importlib.util
from typing import Any

from zerofit.base.errors import UserError
from zerofit.job.settings import decide

_LOSS_ONLY = "evaluation computes the loss and its perplexity and keeps no predictions; leave it out"

_PRECISION = "evaluation runs in the precision of the training; use --bf16 or --fp16, or leave it out"

_SHARDING = "the model would stay whole on each GPU, ZeRO shards it here; use --zero 3"


# Argument -> why it has no effect, or a wrong one, under this trainer, and what to do instead. transformers' default
# value is accepted.
REFUSED = {
    "fsdp": _SHARDING,
    "fsdp_config": _SHARDING,
    "parallelism_config": "sequence parallelism is --sp_size, tensor parallelism --tp_size and pipelines --pp_size "
    "here, and there is no context parallelism; leave it out",
    "do_predict": "there is no test set to predict; give it as --eval_data",
    "dataloader_drop_last": "an epoch's last step is filled up with rows without loss, so that each row counts once; "
    "leave it out",
    "bf16_full_eval": _PRECISION,
    "fp16_full_eval": _PRECISION,
    "prediction_loss_only": _LOSS_ONLY,
    "eval_accumulation_steps": _LOSS_ONLY,
    "eval_do_concat_batches": _LOSS_ONLY,
    "eval_use_gather_object": _LOSS_ONLY,
    "include_for_metrics": _LOSS_ONLY,
    "batch_eval_metrics": _LOSS_ONLY,
    "label_names": "the labels come from --train_on; leave it out",
    "length_column_name": "lengths are counted from the tokens themselves; leave it out",
    "accelerator_config": "the recipe sets up the processes and divides the rows among them; leave it out",
    "auto_find_batch_size": "the steps would see other rows; use --per_device_train_batch_size auto, or --on_oom retry",
    "save_on_each_node": "checkpoints are written once; on machines without a shared disk use --node_local_storage "
    "true",
    "enable_jit_checkpoint": "SIGTERM and SIGUSR1 save a checkpoint without it; leave it out",
    "skip_memory_metrics": "its numbers would be shown nowhere; use --memory_report true",
    "restore_callback_states_from_checkpoint": "no callback of this trainer has a state to restore; leave it out",
}

OFF = ("", "none", "false", "[]", "{}")  # values that mean off for an argument that is off by default

# Value of --report_to -> (modules, one of which is needed; packages to install).
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
    """Refuse the arguments that have no effect, or a wrong one, under this trainer.

    Raises: UserError that names the argument, the reason and what to use instead.
    """
    from accelerate.utils import DynamoBackend

    given, defaults = settings.given, settings.defaults
    for name, why in REFUSED.items():
        off = given.get(name) == defaults[name] or (not defaults[name] and str(given.get(name)).lower() in OFF)
        if name in given and not off:
            raise UserError(f"--{name} {given[name]}: {why}.")
    backend = given.get("torch_compile_backend")
    if backend and backend.upper() not in (known := DynamoBackend.__members__):
        raise UserError(
            f"--torch_compile_backend {backend}: accelerate has no such backend; it has {', '.join(known).lower()}."
        )
    if given.get("do_train") is False:
        raise UserError("--do_train false: a recipe trains; leave it out, or use --plan true to see whether it fits.")
    if given.get("logging_nan_inf_filter"):
        raise UserError(
            "--logging_nan_inf_filter true: a step without a finite loss is left out of the mean already, and said "
            "(--on_nan)."
        )
    backend = "gloo" if settings.use_cpu else "nccl"
    if given.get("ddp_backend") not in (None, backend):
        raise UserError(
            f"--ddp_backend {given['ddp_backend']}: the processes of this run talk over {backend}; leave it out."
        )
    _check_best_metric(settings, given)
    has_rows = bool(settings.eval_data or settings.eval_fraction)  # they alone decide whether evaluation runs
    if given.get("do_eval") is True and not has_rows:
        raise UserError(
            "--do_eval true: there are no rows to evaluate on; name them with --eval_data or --eval_fraction."
        )
    if given.get("do_eval") is False and has_rows:
        raise UserError("--do_eval false: there are rows to evaluate on; leave out --eval_data and --eval_fraction.")
    check_trackers(settings.report_to)


def _check_best_metric(settings, given: dict[str, Any]) -> None:
    """Refuse a --metric_for_best_model that is not computed; for the others, lower is better."""
    metrics, name = settings.objective.metrics, given.get("metric_for_best_model")  # also refuses an unknown objective
    if settings.early_stopping_patience is not None:
        _check_early_stopping(settings)
        if name is None:
            name = (settings.recipe.score or metrics)[0]
            decide(settings, "metric_for_best_model", name, "--early_stopping_patience goes by it")
    if name is None:
        return
    score = [f"eval_{known}" for known in settings.recipe.score or metrics]
    if f"eval_{name.removeprefix('eval_')}" not in score:
        raise UserError(
            f"--metric_for_best_model {name}: an evaluation of {settings.recipe} computes {' and '.join(score)}."
        )
    if given.get("greater_is_better") is None:  # transformers' default is true for what does not end in "loss"
        decide(settings, "greater_is_better", False)


def _check_early_stopping(settings) -> None:
    """Refuse early stopping where nothing is evaluated."""
    if settings.eval_strategy == "no" or not (settings.eval_data or settings.eval_fraction):
        raise UserError(
            "--early_stopping_patience: the run has no evaluations to go by; name rows with --eval_data or "
            "--eval_fraction, and leave out --eval_strategy no."
        )


def check_trackers(names: str | list[str] | None) -> None:
    """Raise UserError for a tracker of --report_to that is unknown or not installed."""
    for name in [names] if isinstance(names, str) else names or []:
        if name in ("none", "all"):
            continue
        if name not in TRACKERS:
            close = difflib.get_close_matches(name, TRACKERS, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are none, all, {', '.join(TRACKERS)}."
            raise UserError(f"--report_to {name}: no such tracker; {hint}")
        modules, packages = TRACKERS[name]
        if modules and not any(importlib.util.find_spec(module) for module in modules):
            raise UserError(f"--report_to {name}: is not installed: pip install {packages}.")
