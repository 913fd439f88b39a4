"""Test on a CPU that the flags of the GPU tests and benchmarks are accepted, and how outcomes are judged."""

import importlib.util
import shlex
import shutil
import sys

import pytest
import torch
from conftest import ROOT, slow_but
from gpu import cases

from zerofit.base import hardware
from zerofit.config import resolve
from zerofit.plan import simulate

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_8b
import gpu_attention

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


@pytest.mark.parametrize("kind", gpu_8b.KINDS)
def test_every_flag_of_the_benchmark_is_accepted(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_8b, "FILES", tmp_path)
    monkeypatch.setattr(gpu_8b, "HIDDEN", tmp_path / "hidden")
    monkeypatch.setattr(shutil, "which", lambda name: name)  # --compile_layers needs a compiler
    gpu_8b.write_files()
    for setting in gpu_8b.KINDS[kind]:
        if not setting.package or importlib.util.find_spec(setting.package):
            settings = resolve.resolve_settings(setting.recipe, [*setting.flags(), "--output_dir", "unused"], 1, GPU)
            assert settings.effective_batch_size == gpu_8b.ROWS, setting.name


@pytest.mark.parametrize("name", slow_but(["as typed", "no-checkpointing", "compile-layers", "mixed"], ["as typed"]))
def test_the_benchmark_has_the_plans_figures_of_each_setting(name, tmp_path, monkeypatch):
    for folder, value in {"FILES": tmp_path, "HIDDEN": tmp_path / "hidden"}.items():
        monkeypatch.setattr(gpu_8b, folder, value)
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    failed = simulate.SimulationFailed("not in this test")
    monkeypatch.setattr(simulate, "run_all", lambda questions, *a, **k: [failed] * len(questions))
    gpu_8b.write_files()
    (setting,) = [one for one in gpu_8b.KINDS["lora"] if one.name == name]
    found = gpu_8b.predicted(setting, GPU)
    assert 5_000 < found["planned_tokens_per_second"] < 25_000 and 16 < found["planned_bytes"] / 2**30 < 160


def test_the_benchmarks_table_has_medians_beside_the_plans_speed():
    made_up = {
        "setting": "default", "losses": [2.0, 1.5], "tokens_per_second": 10_500.0, "tokens_per_second_wall": 10_400.0,
        "planned_tokens_per_second": 10_000.0, "mfu": 0.5, "peak_bytes": 2**30, "planned_bytes": 2**30,
        "held_bytes": 2**31,
    }  # fmt: skip
    failed = {"setting": "compile", "losses": [], "failed": "3 steps in 150 s", "no_plan": "no plan: UserError: no"}
    lines = gpu_8b.gpu_job.table(gpu_8b.HEAD, map(gpu_8b.row, (made_up, failed)))
    head, first, second = ([cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:]))
    assert dict(zip(head, first, strict=True)) == {
        "setting": "default", "tok/s": "10,500", "tok/s wall": "10,400", "planned tok/s": "10,000", "off it": "+5.0%",
        "MFU": "50.0%", "peak GiB": "1.00", "planned GiB": "1.00", "planned/peak": "1.000", "held GiB": "2.00",
        "last loss": "1.5000", "notes": "",
    }  # fmt: skip
    assert dict(zip(head, second, strict=True))["notes"] == "3 steps in 150 s; no plan: UserError: no"


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
