"""Test on a CPU that the flags of the GPU tests and benchmarks are accepted, and how outcomes are judged."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from gpu import cases

from zerofit.base import hardware
from zerofit.config import resolve

sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
import gpu_attention
import stages

GPU = hardware.GPUS["h200-141g"]
PARSED = [case for case in cases.ALL.values() if case.by != "make"]


@pytest.mark.parametrize("case", PARSED, ids=lambda case: case.name)
def test_every_flag_is_accepted(case, monkeypatch):
    if case.package and not importlib.util.find_spec(case.package):
        pytest.skip(f"{case.package} is not installed")
    monkeypatch.chdir(ROOT)
    flags = shlex.split(case.flags)
    settings = resolve.resolve_settings(case.recipe, [*flags, "--output_dir", "unused"], 1, GPU)
    assert not settings.use_cpu and settings.effective_batch_size == 32
    if "--zero" in flags:
        assert str(settings.zero) == flags[flags.index("--zero") + 1]


def test_every_flag_of_the_stages_is_accepted(tmp_path, monkeypatch):
    """Those of benchmarks/gpu, for an H100, and of the model of 8B."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(shutil, "which", lambda name: name)  # --compile_layers needs a compiler
    stages.write_files()
    ((_, holds, text),) = stages.child_flags()
    assert holds, text
    assert int(text.split()[0]) > 35


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("words", [["first.sh"], ["second.sh", "speed"], ["second.sh", "kernels"]], ids=" ".join)
def test_the_stages_run_on_a_cpu(words, tmp_path):
    """Every stage's code, with tiny shapes: none of it may wait for a GPU to be found wrong."""
    script = str(ROOT / "benchmarks" / "gpu" / words[0])
    env = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path), "BUDGET": "480"}
    done = subprocess.run(["bash", script, *words[1:], "--check"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and ", 0 wrong" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_benchmark_of_attention_goes_on_without_flash_attention_3(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"no {name}")

    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", missing)
    assert gpu_attention.with_flash_3("attention", None, 1.0) == ["attention", None, "no FA3", None]


def test_cases_name_each_other_rightly():
    listed = [
        *cases.USER_COMMANDS,
        cases.KILLED,
        cases.STOPPED,
        cases.CANARY,
        *cases.SAVED,
        *cases.RESUMED,
        *cases.SETTINGS,
    ]
    assert len(cases.ALL) == len(listed) > 110
    assert {case.after for case in cases.RESUMED} == {case.name for case in cases.SAVED}
    needed = cases.with_what_they_need({"qlora-z3", "resume-sft-z3-to-z0"})
    assert [case.name for case in needed] == ["from-sft-z3", "resume-sft-z3-to-z0", "qlora-z0", "qlora-z3"]


def test_what_the_budget_does_not_reach_is_skipped(tmp_path):
    case = cases.ALL["sft-z0"]
    outcomes = cases.run_all([case], tmp_path, parallel=1, budget_seconds=0)
    with pytest.raises(pytest.skip.Exception, match=r"the budget of .* was spent"):
        cases.check(case, outcomes["sft-z0"])


@pytest.mark.parametrize(("exit_code", "output"), [(1, ""), (None, ""), (0, "note: padding_free is off: it mixes")])
def test_a_case_that_went_wrong_fails(exit_code, output):
    with pytest.raises(AssertionError):
        cases.check(cases.ALL["sft-z0"], cases.Outcome(True, exit_code, [], output))


def test_a_case_without_the_output_that_it_must_have_fails():
    case = cases.ALL["memory-report-z0"]
    cases.check(case, cases.Outcome(True, 0, [], "peak memory of rank 0"))
    with pytest.raises(AssertionError, match="not in the output"):
        cases.check(case, cases.Outcome(True, 0, [], ""))
