"""Test that every stage, precision, batch, memory technique and optimizer trains on one GPU, with its group's losses.

ZeRO runs with one rank here: NCCL takes no two ranks on one GPU, so partitions are whole and nothing is communicated.
"""

import math

import pytest

from . import cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", cases.SETTINGS, ids=lambda case: case.name)
def test_setting_trains(case, outcomes):
    outcome = outcomes[case.name]
    if case.package:
        pytest.importorskip(case.package)
    cases.check(case, outcome)
    assert [step["step"] for step in outcome.steps] == list(range(1, cases.STEPS + 1))
    assert all(math.isfinite(loss) and loss > 0 for loss in outcome.losses), outcome.losses
    if "--optim sgd" not in case.flags:  # too slow for so few steps
        assert outcome.losses[-1] < 0.9 * outcome.losses[0], outcome.losses
    first = cases.first_of_group(case)
    if case.group and outcomes[first.name].exit_code == 0:
        assert outcome.losses == pytest.approx(outcomes[first.name].losses, rel=case.within), (
            f"{case.why}; {first.name}"
        )
