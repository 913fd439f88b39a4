"""What a plan shows while it searches: an answer by formula, what is simulated, how the exact answer differs."""

import contextlib
import sys

import pytest
from conftest import ROOT

from zerofit.commands import plan as plan_command
from zerofit.commands import plan_progress
from zerofit.plan import candidates, simulate

FLAGS = ["--model", str(ROOT / "tests" / "configs" / "llama3.2-1b"), "--max_length", "1024", "--gpu_type", "h100-80g",
         "--gpus", "4"]  # fmt: skip


@pytest.fixture
def plan(monkeypatch, tmp_path, capsys):
    """Return a function that plans with simulations of as many GiB as `size_of` says; it returns the lines."""

    def run(size_of, *more):
        def run_all(questions, cache=None, seconds=None):
            sizes = [int(size_of(question.request) * 2**30) for question in questions]
            part = {"gradients": 0, "optimizer": 0, "activations": 0, "logits": 0, "buffers": 0}
            return [
                {"peak": {"forward": part | {"parameters": size}}, "total": {"forward": size}, "host": 0,
                 "host_saving": 0, "model_states": {}, "parameters": 1, "trainable": 1}
                for size in sizes
            ]  # fmt: skip

        monkeypatch.setattr(simulate, "run_all", run_all)
        with contextlib.suppress(candidates.NothingFits):
            plan_command.main([*FLAGS, *more, "--output_dir", str(tmp_path)])
        return capsys.readouterr().out.splitlines()

    return run


def place(lines, start):
    (found,) = [i for i, line in enumerate(lines) if line.startswith(start)]
    return found


def test_the_answer_by_formula_comes_before_a_simulation(plan, tmp_path):
    lines = plan(lambda request: 10, "--exact", "true")
    first = place(lines, "by formula, with a margin of ")
    assert first < place(lines, "  sft ZeRO-") and "by simulation" in lines[first]
    assert place(lines, "by simulation: the same setting") > first
    assert lines[first] in (tmp_path / "plan.md").read_text()


def test_what_is_clear_of_the_limit_is_not_simulated(plan, tmp_path):
    lines = plan(lambda request: pytest.fail("a simulation"))
    assert not [line for line in lines if "simulation" in line and "not simulated" not in line]
    assert "settings of sft on 4 x H100" in (tmp_path / "plan.md").read_text()


@pytest.mark.slow
def test_the_exact_answer_says_why_it_is_another(plan):
    first = plan(lambda request: 10, "--exact", "true")
    zero = first[place(first, "by formula")].split("ZeRO-")[1][0]
    lines = plan(lambda request: 99 if str(request.get("zero")) == zero else 10, "--exact", "true")
    relation = lines[place(lines, "by simulation")]
    assert "another setting; the setting by formula does not fit: 102." in relation and "GiB > " in relation


@pytest.mark.slow
def test_an_answer_by_formula_that_nothing_confirms(plan):
    fixed = ["--per_device_train_batch_size", "1", "--zero", "3", "--offload", "none"]
    lines = plan(lambda request: 99, *fixed, "--exact", "true")
    assert "by simulation: nothing fits; the setting by formula" in lines[place(lines, "by simulation")]


def test_a_setting_that_fits_where_no_formula_said_so(plan):
    fixed = ["--per_device_train_batch_size", "32", "--zero", "0", "--gradient_checkpointing", "false"]
    lines = plan(lambda request: 10, *fixed, "--effective_batch_size", "128")
    assert "none of these settings fits" in lines[place(lines, "by formula")]
    assert lines[place(lines, "by simulation")].endswith("a setting fits")


def test_a_terminal_has_one_line_that_changes_below_what_stays(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = []
    with plan_progress.SearchProgress(lines) as shown:
        shown.now("simulating sft ZeRO-3")
        shown.print_line("  sft ZeRO-3: 10.0 GiB")
        shown._print("first answer", keep=True)
    said = capsys.readouterr().out
    assert said == ("\r\033[K  simulating sft ZeRO-3 (0 s)\r\033[K  sft ZeRO-3: 10.0 GiB\r\033[Kfirst answer\n\r\033[K")
    assert lines == ["  sft ZeRO-3: 10.0 GiB", "first answer"]


def test_a_log_hears_of_a_long_simulation_ever_more_rarely(monkeypatch, capsys):
    time = SimpleTime()
    monkeypatch.setattr(plan_progress, "time", time)
    shown = plan_progress.SearchProgress([])
    shown.now("simulating sft ZeRO-3")
    for time.now in range(100):
        shown._show()
    shown.print_line("  sft ZeRO-3: 10.0 GiB")
    for time.now in range(100, 200):
        shown._show()
    assert capsys.readouterr().out.splitlines() == [
        *(f"  still simulating sft ZeRO-3 ({seconds} s)" for seconds in (20, 40, 80)),
        "  sft ZeRO-3: 10.0 GiB",
    ]


class SimpleTime:
    now = 0

    def monotonic(self):
        return self.now
