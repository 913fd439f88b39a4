"""A launch, `zerofit data` and `make plan` report the test results of a model's class."""

import json

import pytest
from conftest import ROOT

from zerofit.model import tested_models


def test_the_sentence_names_what_does_not_hold(monkeypatch):
    types = {"one": {}, "two": {"packed": "why", "LoRA": "why"}}
    monkeypatch.setattr(tested_models, "results", lambda: {"transformers": "1.2.3", "types": types})
    assert tested_models.sentence("one").endswith("transformers 1.2.3: all checks pass (zerofit models one)")
    assert "except packed, LoRA (zerofit models two)" in tested_models.sentence("two")
    assert tested_models.sentence("three").startswith("model type three: not tested with zerofit; `zerofit models`")


def test_the_list_is_of_the_result_file():
    record = json.loads((ROOT / "benchmarks" / "results" / "models.json").read_text())
    for kind, failed in tested_models.results()["types"].items():
        columns = record["kinds"][kind]["columns"]
        assert set(failed) == {name for name, why in columns.items() if why}, kind


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_what_people_train_most_is_in_the_list(kind):
    assert kind in tested_models.results()["types"]
