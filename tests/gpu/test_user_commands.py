"""Test `make sft` and `make lora` on a GPU, as a user types them."""

import json

import pytest

from . import cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", cases.USER_COMMANDS, ids=lambda case: case.name)
def test_make_learns_the_bundled_task(case, outcomes):
    outcome = outcomes[case.name]
    cases.check(case, outcome)
    result = json.loads((outcome.folder / "result.json").read_text())
    assert result["status"] == "finished" and result["world_size"] == 1
    assert result["exact_match_before"] < 0.1 and result["exact_match_after"] > 0.5
    assert (outcome.folder / "final").is_dir()
