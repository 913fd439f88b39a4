"""Numbers of the recipes against a training loop in plain PyTorch (benchmarks/oracle.py holds it and all cases)."""

import functools
import sys

import pytest
from conftest import ROOT, run_python, runs_slow, slow_but

sys.path.insert(0, str(ROOT / "benchmarks"))
import oracle

SHORT = "sft-0-ranks1 lora-0-ranks1 offload-3-all-ranks2".split()
CASES = [*SHORT, "experts-qwen3_moe-micro4-ranks2", "experts-mixtral-micro1-ranks1", "sft-2-bf16-ranks2"]


@pytest.fixture(scope="module")
def differences(tmp_path_factory, request):
    cases = [case for case in oracle.all_cases() if case.name in (CASES if runs_slow(request) else SHORT)]
    return oracle.largest_differences(
        cases, tmp_path_factory.mktemp("oracle"), functools.partial(run_python, timeout=900)
    )


@pytest.mark.oracle
@pytest.mark.parametrize("name", slow_but(CASES, SHORT))
def test_a_run_is_what_plain_pytorch_computes(differences, name, record_property):
    (case,) = (case for case in oracle.all_cases() if case.name == name)
    record_property("relative_difference", max(differences[name].values()))
    assert oracle.beyond([case], differences) == []


def test_what_is_not_a_number_is_beyond_the_bound():
    (case,) = (case for case in oracle.all_cases() if case.name == "sft-0-ranks1")
    assert len(oracle.beyond([case], {case.name: dict.fromkeys(oracle.BOUNDS["fp32"], float("nan"))})) == 5
