"""Continue a tracker's curve after a resume: the run folder stores the tracker's run id.

trackio does not need an id: it resumes the run with the name of the run folder.
"""

import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from zerofit.job import run_folder
from zerofit.job.run_segments import TRACKERS

# Tracker: (variable of the run id, variables that allow it to continue the run).
VARIABLES = {
    "wandb": ("WANDB_RUN_ID", {"WANDB_RESUME": "allow"}),
    "comet_ml": ("COMET_EXPERIMENT_KEY", {"COMET_MODE": "get_or_create"}),
    "mlflow": ("MLFLOW_RUN_ID", {}),
    "tensorboard": ("TENSORBOARD_LOGGING_DIR", {}),
}

LOGS = "runs"  # transformers' folder for tensorboard in the run folder

_set: dict[str, str] = {}  # variables set by an earlier run of this process


def start(report_to: str | Iterable[str] | None, folder: Path) -> None:
    """Set the run ids of the folder for the trackers of this process, and store new ids. Call on rank 0.

    The user's environment takes precedence. mlflow's server creates the id, which `remember` stores.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    kept = run_folder.read_json(folder / "run.json").get(TRACKERS) or {}
    for name in VARIABLES if "all" in names else names:
        variable, more = VARIABLES.get(name, ("", {}))
        is_the_users = os.environ.get(variable) not in (None, _set.get(variable))
        if not variable or is_the_users:
            continue
        new_ids = {"wandb": uuid.uuid4().hex, "comet_ml": uuid.uuid4().hex, "tensorboard": LOGS}
        if (run_id := kept.get(name) or new_ids.get(name)) is None:
            continue
        kept[name] = run_id
        os.environ[variable] = _set[variable] = str(folder / run_id) if name == "tensorboard" else run_id
        for other, value in more.items():
            os.environ.setdefault(other, value)
    if kept:
        run_folder.put_into_run(folder, {TRACKERS: kept})


def remember(report_to: Iterable[str], folder: Path) -> None:
    """Store the run id of mlflow's server. Call on rank 0 after training has started."""
    if "mlflow" not in report_to:
        return
    import mlflow

    if active := mlflow.active_run():
        kept = run_folder.read_json(folder / "run.json").get(TRACKERS) or {}
        run_folder.put_into_run(folder, {TRACKERS: kept | {"mlflow": active.info.run_id}})


def forget_later_steps(trainer, step: int) -> None:
    """Hide entries after this step that an earlier start logged to tensorboard. Call on rank 0."""
    from transformers.integrations import TensorBoardCallback

    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.logging_dir:
            from torch.utils.tensorboard import SummaryWriter

            callback.tb_writer = SummaryWriter(log_dir=callback.logging_dir, purge_step=step + 1)
