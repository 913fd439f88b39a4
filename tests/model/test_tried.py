"""A launch, `zerofit data` and `make plan` say what was tried with a model's class."""

import json

import pytest
from conftest import ROOT

from zerofit.model.tried import classes


def test_the_sentence_names_what_does_not_hold(monkeypatch):
    types = {"one": {}, "two": {"packed": "why", "LoRA": "why"}}
    monkeypatch.setattr(classes, "results", lambda: {"transformers": "1.2.3", "types": types})
    assert classes.sentence("one").endswith(
        "tried with a tiny model, transformers 1.2.3: all columns hold (docs/models.md)"
    )
    assert "not packed, LoRA (docs/models.md)" in classes.sentence("two")
    assert (
        classes.sentence("three") == "model type three: never tried with zerofit; docs/models.md lists those that were"
    )


def test_the_list_is_of_the_result_file():
    record = json.loads((ROOT / "benchmarks" / "results" / "models.json").read_text())
    for kind, failed in classes.results()["types"].items():
        columns = record["kinds"][kind]["columns"]
        assert set(failed) == {name for name, why in columns.items() if why}, kind


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_what_people_train_most_is_in_the_list(kind):
    assert kind in classes.results()["types"]
