"""A run ends after evaluations that are no better, on all ranks after the same step, and a resume keeps the count."""

import pytest
from conftest import TINY, recipe_process, run_world, two_layers

from zerofit.base.errors import UserError
from zerofit.config import resolve

# With a learning rate of 0 no evaluation is better than the first.
FLAGS = [
    "--data", str(TINY / "train.jsonl"), "--eval_data", str(TINY / "eval.jsonl"), "--max_samples", "16",
    "--num_samples", "0", "--effective_batch_size", "4", "--per_device_train_batch_size", "2", "--learning_rate", "0",
    "--max_steps", "12", "--eval_strategy", "steps", "--eval_steps", "1", "--logging_steps", "1",
    "--max_length", "64",
]  # fmt: skip


def case(zero: str, *more: str):
    return "sft", [*FLAGS, "--model", two_layers(), "--zero", zero, *more]


def test_all_ranks_stop_after_the_same_step_at_each_stage(tmp_path):
    patient = ["--early_stopping_patience", "2", "--save_strategy", "no"]
    saved = ["--early_stopping_patience", "3", "--save_strategy", "steps", "--save_steps", "1"]
    cases = {zero: case(zero, *patient) for zero in ("0", "2", "3")}
    cases["threshold"] = case("2", *patient, "--learning_rate", "1e-6", "--early_stopping_threshold", "10")
    cases["better"] = case("2", *patient, "--learning_rate", "1e-3", "--max_steps", "5")
    cases["first"] = case("2", *saved, "--max_steps", "3")
    runs = run_world(2, cases, tmp_path)
    for name in ("0", "2", "3", "threshold"):
        result = runs[name].json("result.json")
        assert (result["world_size"], result["steps"], result["status"]) == (2, 3, "finished"), name
    assert runs["better"].json("result.json")["steps"] == 5
    # after the evaluations of steps 2 and 3, one more without gain is enough
    on = ["--resume_from_checkpoint", str(tmp_path / "first" / "checkpoint-3")]
    resumed = run_world(2, {"resumed": case("2", *saved, *on)}, tmp_path)["resumed"]
    assert resumed.json("result.json")["steps"] == 4


def test_what_a_person_reads(tmp_path):
    flags = [*case("0", "--early_stopping_patience", "1", "--load_best_model_at_end", "true")[1],
             "--save_strategy", "steps", "--save_steps", "1"]  # fmt: skip
    done = recipe_process("sft", *flags, "--output_dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "early stopping: eval_loss did not improve in 1 evaluation, best value " in done.stdout
    assert ": the run ends at step 2 of 12" in done.stdout and "ETA at most 0:" in done.stdout


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--early_stopping_patience needs evaluations; add --eval_data"),
        (
            ["--eval_fraction", "0.1", "--eval_strategy", "no"],
            "--early_stopping_patience needs evaluations; .*--eval_strategy no",
        ),
        (["--eval_fraction", "0.1", "--early_stopping_threshold", "-1"], "it must be 0 or more"),
    ],
)
def test_what_cannot_stop_early_is_refused(flags, says):
    words = ["--model", str(TINY / "model"), "--data", str(TINY / "train.jsonl"), "--early_stopping_patience", "2"]
    with pytest.raises(UserError, match=says):
        resolve.resolve_settings("sft", [*words, *flags], 1)


def test_the_loss_decides_unless_another_metric_is_named():
    words = ["--model", str(TINY / "model"), "--data", "x.jsonl", "--eval_fraction", "0.1"]
    settings = resolve.resolve_settings("sft", [*words, "--early_stopping_patience", "2"], 1)
    assert (settings.metric_for_best_model, settings.greater_is_better) == ("loss", False)
    assert settings.source["metric_for_best_model"] == "decided"


def test_a_schedule_warms_up_stays_and_decays(tmp_path):
    """warmup_stable_decay of transformers, as docs/training.md has it, at each stage on two ranks."""
    more = ["--lr_scheduler_type", "warmup_stable_decay", "--warmup_steps", "2", "--learning_rate", "1e-3",
            "--lr_scheduler_kwargs", '{"num_decay_steps": 3}', "--max_steps", "8", "--eval_strategy", "no",
            "--save_strategy", "no"]  # fmt: skip
    for zero, run in run_world(2, {zero: case(zero, *more) for zero in ("0", "2", "3")}, tmp_path).items():
        rates = [line["learning_rate"] for line in run.metrics if "learning_rate" in line]
        assert len(rates) == 8 and rates[0] < 1e-3 and rates[2:5] == [1e-3] * 3 and rates[5:] == sorted(rates[5:])[::-1]
        assert rates[-1] < 5e-4, zero
