"""The ids that trackers get from the run folder, without their packages."""

import os

import pytest

from zerofit.job import run_folder, run_segments
from zerofit.train import trackers


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for variable, more in trackers.VARIABLES.values():
        for name in (variable, *more):
            monkeypatch.setenv(name, "x")  # restored afterwards
            monkeypatch.delenv(name)


def test_a_run_keeps_the_ids_of_its_trackers(tmp_path, monkeypatch):
    run_folder.write_json(tmp_path / "run.json", {"recipe": "sft"})
    trackers.start(["wandb", "comet_ml", "tensorboard", "mlflow", "trackio"], tmp_path)
    first = {name: os.environ.pop(name) for name in ("WANDB_RUN_ID", "COMET_EXPERIMENT_KEY", "TENSORBOARD_LOGGING_DIR")}
    assert first["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "runs") and "MLFLOW_RUN_ID" not in os.environ
    assert os.environ["WANDB_RESUME"] == "allow" and len(first["COMET_EXPERIMENT_KEY"]) == 32
    for step in (0, 3):  # a retry from the start, and a resume
        run_folder.write_json(tmp_path / "run.json", {"recipe": "sft"} | run_segments.carried_over(tmp_path, step))
        trackers.start(["wandb", "comet_ml", "tensorboard"], tmp_path)
        assert {name: os.environ.pop(name) for name in first} == first
    run_folder.put_into_run(tmp_path, {"trackers": {"mlflow": "abc"}})
    trackers.start("all", tmp_path)
    assert os.environ["MLFLOW_RUN_ID"] == "abc"


def test_the_users_own_id_stays(tmp_path, monkeypatch):
    run_folder.write_json(tmp_path / "run.json", {})
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    trackers.start("wandb", tmp_path)
    assert os.environ["WANDB_RUN_ID"] == "mine" and "WANDB_RESUME" not in os.environ
    assert "trackers" not in run_folder.read_json(tmp_path / "run.json")
    trackers.start(None, tmp_path)
