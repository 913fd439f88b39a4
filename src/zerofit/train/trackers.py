"""Continue a tracker's curve after a resume: the run's id is kept in the run folder and given back.

trackio needs nothing: it resumes the run of the same name, which is that of the run folder.
"""

import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from zerofit.job import run_folder
from zerofit.job.stretches import TRACKERS

# Tracker: the variables from which it reads the run's id, and that it may continue that run.
VARIABLES = {
    "wandb": ("WANDB_RUN_ID", {"WANDB_RESUME": "allow"}),
    "comet_ml": ("COMET_EXPERIMENT_KEY", {"COMET_MODE": "get_or_create"}),
    "mlflow": ("MLFLOW_RUN_ID", {}),
    "tensorboard": ("TENSORBOARD_LOGGING_DIR", {}),
}

LOGS = "runs"  # of the run folder, where transformers has tensorboard's files

_set: dict[str, str] = {}  # variables that an earlier run of this process has set


def start(report_to: str | Iterable[str] | None, folder: Path) -> None:
    """Give the trackers of this process the ids of the run in the folder, and keep new ones. Call on rank 0.

    What the user's environment says stays. mlflow's server makes the id: `remember` keeps it.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    kept = run_folder.read_json(folder / "run.json").get(TRACKERS) or {}
    for name in VARIABLES if "all" in names else names:
        variable, more = VARIABLES.get(name, ("", {}))
        is_the_users = os.environ.get(variable) not in (None, _set.get(variable))
        if not variable or is_the_users:
            continue
        made = {"wandb": uuid.uuid4().hex, "comet_ml": uuid.uuid4().hex, "tensorboard": LOGS}
        if (own := kept.get(name) or made.get(name)) is None:
            continue
        kept[name] = own
        os.environ[variable] = _set[variable] = str(folder / own) if name == "tensorboard" else own
        for other, value in more.items():
            os.environ.setdefault(other, value)
    if kept:
        run_folder.put_into_run(folder, {TRACKERS: kept})


def remember(report_to: Iterable[str], folder: Path) -> None:
    """Keep the id that mlflow's server has given the run. Call on rank 0 once training has begun."""
    if "mlflow" not in report_to:
        return
    import mlflow

    if active := mlflow.active_run():
        kept = run_folder.read_json(folder / "run.json").get(TRACKERS) or {}
        run_folder.put_into_run(folder, {TRACKERS: kept | {"mlflow": active.info.run_id}})


def forget_later_steps(trainer, step: int) -> None:
    """Have tensorboard leave out what an earlier start has logged after this step. Call on rank 0."""
    from transformers.integrations import TensorBoardCallback

    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.logging_dir:
            from torch.utils.tensorboard import SummaryWriter

            callback.tb_writer = SummaryWriter(log_dir=callback.logging_dir, purge_step=step + 1)
