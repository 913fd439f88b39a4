"""Answers to eval rows while training (--eval_generation_rows): the same on one and two ranks and at each stage."""

import pytest
from conftest import TINY, recipe_process, run_world

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.model import generation

# A learning rate at which some of the answers are right after 30 steps: they end at different lengths.
FLAGS = [
    "--model", str(TINY / "model"), "--data", str(TINY / "train.jsonl"), "--eval_data", str(TINY / "eval.jsonl"),
    "--num_samples", "0", "--effective_batch_size", "32", "--per_device_train_batch_size", "8",
    "--learning_rate", "3e-3", "--max_steps", "30", "--eval_strategy", "steps", "--eval_steps", "15",
    "--logging_steps", "30", "--save_strategy", "no", "--bf16", "false", "--eval_generation_rows", "31",
]  # fmt: skip


def scores(run) -> list[float]:
    return [line["eval_exact_match"] for line in run.metrics if "eval_exact_match" in line]


@pytest.mark.parametrize("stages", [["3"], pytest.param(["0", "2"], marks=pytest.mark.slow)])
def test_two_ranks_answer_as_one_at_each_stage(stages, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    alone = run_world(1, {"0": ("sft", [*FLAGS, "--zero", "0"])}, tmp_path / "one")["0"]
    runs = run_world(2, {zero: ("sft", [*FLAGS, "--zero", zero]) for zero in stages}, tmp_path / "two")
    wanted = scores(alone)
    assert len(wanted) >= 2 and 0 < wanted[-1] < 1, wanted
    for zero, run in runs.items():
        assert run.json("result.json")["world_size"] == 2
        assert scores(run) == pytest.approx(wanted, abs=1.5 / 31), zero  # a near tie between two tokens


def test_the_time_and_the_rows_are_said(tmp_path):
    flags = [*FLAGS, "--zero", "0", "--max_steps", "2", "--eval_steps", "1", "--max_tokens_per_sample", "7"]
    done = recipe_process("sft", *flags, "--output_dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("exact match: ")]
    assert " of 200 eval rows, with answers of up to 7 tokens, " in line and line.endswith(" s per evaluation")
    assert "  exact match 0.000" in done.stdout


def test_only_answers_within_the_bound_are_compared(monkeypatch):
    class Trainer:
        settings = type("Settings", (), {"eval_generation_rows": 2, "max_tokens_per_sample": 3})
        args = type("Args", (), {"process_index": 0})
        generation_time_reported = True

    rows = [{"input_ids": [1] * 9, "labels": [-100] * (9 - n) + [1] * n} for n in (4, 3, 2, 1)]
    Trainer.eval_tokens = type("Tokens", (), {"dataset": rows})
    given = []
    monkeypatch.setattr(generation, "exact_match", lambda trainer, chosen: given.append(chosen) or 0.5)
    assert generation.exact_match_of_first_rows(Trainer) == {"exact_match": 0.5} and given == [rows[1:3]]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("recipe", "more", "says"),
    [
        ("sft", [], "set --eval_data or --eval_fraction"),
        ("dpo", ["--eval_fraction", "0.1"], "answers are compared in supervised fine-tuning only"),
    ],
)
def test_where_nothing_can_be_compared(recipe, more, says):
    words = ["--model", str(TINY / "model"), "--data", "x.jsonl", "--eval_generation_rows", "4", *more]
    with pytest.raises(UserError, match=says):
        resolve.resolve_settings(recipe, words, 1)
