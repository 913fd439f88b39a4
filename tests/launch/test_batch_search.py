"""The batch-size search: real steps within a limit, the same answer on every rank; and the presets."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, Run, run_python

from zerofit import recipe
from zerofit.base.errors import UserError
from zerofit.config import presets, resolve
from zerofit.job import program
from zerofit.launch import batch_search

DATA = ["--data", str(TINY / "train.jsonl"), "--max_samples", "40"]


def settings(*flags, ranks=1):
    return resolve.resolve_settings("sft", [*DATA, *flags], ranks)


@pytest.mark.parametrize(("fits", "answer", "tries"), [(1, 1, 2), (6, 6, 6), (23, 16, 6), (48, 48, 6)])
def test_the_search_finds_the_largest_divisor_that_fits(monkeypatch, fits, answer, tries):
    tried = []

    def run(settings, ladder, limit):
        good = [size for size in ladder if size <= fits]
        tried.extend(ladder[: len(good) + 1])
        return {size: {"peak_bytes": size, "seconds": 1.0} for size in good}

    monkeypatch.setattr(batch_search, "_run", run)
    found = batch_search.search(settings("--effective_batch_size", "48", "--memory_limit", "1"))
    assert found.size == answer
    assert len(tried) == len(set(tried)) <= tries + 1  # no size twice
    assert found.tried.get(answer) and all(found.tried[s] is None for s in found.tried if s > answer)


def test_nothing_fits_and_no_limit(monkeypatch):
    monkeypatch.setattr(batch_search, "_run", lambda *_: {})
    with pytest.raises(UserError, match="a micro batch of 1 does not fit"):
        batch_search.search(settings("--memory_limit", "1"))
    with pytest.raises(UserError, match="--memory_limit"):
        batch_search.search(settings())


def test_auto_is_a_word_for_the_probe():
    for words in (["--per_device_train_batch_size", "auto"], ["--per-device-train-batch-size=auto"]):
        assert settings(*words).search_batch_size is True
    assert settings("--per_device_train_batch_size", "4").search_batch_size is False
    flags = ["--per_device_train_batch_size", "auto", "--zero", "3", "--max_steps=2"]
    found = batch_search.with_size(settings(*flags, "--effective_batch_size", "8", "--packing", "true"), 4)
    wanted = {"data": DATA[1:2], "max_samples": 40, "search_batch_size": False, "zero": 3, "max_steps": 2,
              "effective_batch_size": 8, "packing": True, "per_device_train_batch_size": 4}  # fmt: skip
    assert found.values == wanted


@pytest.mark.bad_input
def test_ranks_without_a_gpu_search_for_nothing(monkeypatch):
    monkeypatch.setattr("sys.argv", ["sft.py", *DATA, "--per_device_train_batch_size", "auto"])
    with pytest.raises(
        UserError, match=r"without a launcher, the plan can choose the size only on a GPU.*; start with `zero"
    ):
        recipe.parse(program.start(str(ROOT / "recipes" / "sft.py")).recipe)


@pytest.mark.slow  # the README has the same command
def test_a_real_search_under_zero_3_with_two_ranks(tmp_path):
    """Micro batch x accumulation x ranks stays the effective batch."""
    flags = [*DATA, "--zero", "3", "--per_device_train_batch_size", "auto", "--memory_limit", "0.0165",
             "--effective_batch_size", "32", "--max_length", "64", "--max_steps", "1", "--num_samples", "0",
             "--save_strategy", "no", "--output_dir", str(tmp_path / "run")]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "zerofit", "launch", "--gpus", "2", str(ROOT / "recipes" / "sft.py"), *flags],
        capture_output=True, text=True, timeout=500, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("   ")]
    sizes = {int(words[0]): "peak" in words for words in lines if words and words[0].isdigit()}
    fitting = [size for size, fits in sizes.items() if fits]
    assert fitting and not all(sizes.values()), sizes  # the limit was met
    recorded = {n: entry["value"] for n, entry in Run(tmp_path / "run").json("run.json")["arguments"].items()}
    assert recorded["per_device_train_batch_size"] == max(fitting)
    assert recorded["gradient_accumulation_steps"] * max(fitting) * 2 == 32


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_is_its_flags_and_flags_win(name):
    found = settings("--preset", name)
    for flag, value in presets.PRESETS[name].items():
        assert found.values[flag] == value and found.source[flag] == f"preset {name}"
    assert found.effective_batch_size == 32
    assert any(s.startswith(f"preset {name}: --") for s in found.decisions)
    assert settings("--preset", name, "--per_device_train_batch_size", "2").per_device_train_batch_size == 2


@pytest.mark.slow
def test_presets_train(tmp_path):
    """Each runs as it is; on a CPU in the precision that a CPU has."""
    from conftest import run_world

    common = [*DATA, "--max_steps", "2", "--max_length", "64", "--num_samples", "0", "--save_strategy", "no",
              "--logging_steps", "1"]  # fmt: skip
    cases = {f"{name}-{recipe}": (recipe, [*common, "--preset", name]) for name in presets.PRESETS
             for recipe in (("sft", "lora") if name == "gpu-12g" else ("sft",))}  # fmt: skip
    runs = run_world(1, cases, tmp_path)
    assert len({round(run.losses[0], 4) for name, run in runs.items()}) == 1  # the first loss knows no optimizer


@pytest.mark.bad_input
def test_unknown_preset():
    with pytest.raises(UserError, match="--preset gpu-7g: must be one of gpu-12g"):
        resolve.resolve_settings("sft", ["--preset", "gpu-7g"], 1)


@pytest.mark.slow
def test_a_failing_step_is_no_out_of_memory(tmp_path):
    flags = [*DATA, "--memory_limit", "1", "--chat_template", str(tmp_path / "none.jinja")]
    done = run_python(["-m", "zerofit", "batch-size", *flags, "--output_dir", str(tmp_path / "run")])
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "none.jinja" in done.stderr
    assert not (tmp_path / "run").exists()
