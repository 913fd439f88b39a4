"""A resumed run is one run: its means, its report and its records tell all stretches."""

import json
import shlex
import shutil

import pytest
from conftest import TINY, Run, recipe_process, two_layers

from zerofit.base import command_line
from zerofit.job import run_segments
from zerofit.report import run_page

FLAGS = [
    "--model", str(two_layers()), "--data", str(TINY / "train.jsonl"), "--max_samples", "32", "--max_steps", "6",
    "--effective_batch_size", "4", "--logging_steps", "4", "--save_strategy", "steps", "--save_steps", "3",
    "--save_total_limit", "3", "--num_samples", "1", "--learning_rate", "1e-3", "--eval_strategy", "no",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A whole run, and a copy of its folder that goes on from step 3, in the middle of a mean over four steps."""
    folder = tmp_path_factory.mktemp("stretches")
    done = recipe_process("sft", *FLAGS, "--output_dir", str(folder / "whole"))
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(folder / "whole", folder / "resumed")
    for name in ("checkpoint-6", "final"):
        shutil.rmtree(folder / "resumed" / name)
    words = ["--resume_from_checkpoint", str(folder / "resumed" / "checkpoint-3")]
    done = recipe_process("sft", *FLAGS, *words, "--output_dir", str(folder / "resumed"))
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(folder / "whole"), Run(folder / "resumed")


@pytest.mark.slow
def test_the_first_line_after_a_resume_is_the_mean_of_the_same_steps(runs):
    lines = [[(line["step"], line["loss"]) for line in run.metrics if "loss" in line] for run in runs]
    assert [step for step, _ in lines[0]] == [4, 6] and lines[0] == lines[1]


def test_records_and_report_have_both_segments_and_how_the_run_began(runs):
    whole, resumed = (run.json("run.json") for run in runs)
    assert "stretches" not in whole and whole["before"] == resumed["before"]
    ((stretch),) = resumed["stretches"]
    assert (stretch["from_step"], stretch["to_step"], stretch["command"]) == (0, 3, whole["command"])
    samples = [run.json("result.json")["samples"] for run in runs]
    assert [s["before"] for s in samples[0]] == [s["before"] for s in samples[1]] != [None]
    seconds = resumed["resumed"][0]["train_seconds"]
    assert 0 < seconds == run_segments.previous_seconds(resumed) < 600
    run = run_page.Run(runs[1].folder)
    assert [row[0] for row in run_page._segments(run)] == ["1 to 3", "4 to 6"]
    assert "since the last resume" in run_page.summary(run)["training time"]
    page = run_page.render_run(run)
    assert "its segments" in page and "1 to 3" in page
    assert "its segments" not in run_page.render_run(run_page.Run(runs[0].folder))


def test_a_run_that_goes_on_from_an_older_checkpoint_forgets_the_segments_after_it(tmp_path):
    old = [{"from_step": 0, "to_step": 10}, {"from_step": 10, "to_step": 20}]
    (tmp_path / "run.json").write_text(json.dumps({"command": "c", "world_size": 2, "stretches": old}))
    found = {at: run_segments.carried_over(tmp_path, at)["stretches"] for at in (5, 10, 25)}
    steps = {at: [(one["from_step"], one["to_step"]) for one in of] for at, of in found.items()}
    assert steps == {5: [(0, 5)], 10: [(0, 10)], 25: [(0, 10), (10, 20), (20, 25)]}
    assert run_segments.carried_over(tmp_path, 0) == {} == run_segments.carried_over(tmp_path / "none", 3)


def test_the_users_own_command_line(monkeypatch):
    monkeypatch.delenv("ZEROFIT_GOALS", raising=False)
    monkeypatch.setattr("sys.argv", ["x/zerofit", "sft", "--gpus", "2", "--hub_token", "secret"])
    assert command_line.as_typed() == "zerofit sft --gpus 2 --hub_token '<hidden>'"
    monkeypatch.setenv("ZEROFIT_GOALS", "sft")
    monkeypatch.setenv("MAKELEVEL", "1")
    monkeypatch.setenv("ZEROFIT_GIVEN", "ARGS OUT")
    monkeypatch.setenv("OUT", "it's")
    monkeypatch.setenv("ARGS", "--run_name $x --hub_token abc")
    wanted = ["make", "sft", "ARGS=--run_name '$x' --hub_token '<hidden>'", "OUT=it's"]
    assert shlex.split(command_line.as_typed()) == wanted
    monkeypatch.setenv("ZEROFIT_FROM_ENVIRONMENT", "MODEL")
    monkeypatch.setenv("MODEL", "my base")
    assert shlex.split(command_line.as_typed()) == ["MODEL=my base", *wanted]
