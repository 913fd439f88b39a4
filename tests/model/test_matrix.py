"""A class of each family of `make models`; the page is that of the result file."""

import json
import sys

import pytest
import torch
from conftest import ROOT, run_world

from zerofit.data import batches

sys.path.insert(0, str(ROOT / "tests" / "matrix"))
import matrix
import matrix_page
import tiny_models

# attention, sliding windows, experts, a state space beside attention
KINDS = ("gemma3_text", "qwen3_moe", "bamba")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    cases = {}
    for kind in KINDS:
        tiny_models.checkpoint(kind, folder / "models" / kind)
        cases[kind] = ("sft", [*matrix.COMMON, *matrix.PADDED, "--model", str(folder / "models" / kind)])
    return run_world(1, cases, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_of_each_family_trains_reloads_and_answers(runs, kind):
    one = runs[kind]
    assert matrix.compared(one, one, None, None) == ""
    final = one.folder / "final"
    assert matrix.reloaded(kind, final, one.folder.parent / "models" / kind) == ""
    assert matrix.generated(kind, final) == ""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_column_of_a_class_is_tried(tmp_path):
    found = {}
    matrix.try_all(["llama", "mamba"], tmp_path, found)
    assert set(found["llama"]["columns"]) == set(matrix.COLUMNS) and not any(found["llama"]["columns"].values())
    refused = {name: why for name, why in found["mamba"]["columns"].items() if why}
    assert refused.keys() == {"side by side", "packed"}, refused


def test_the_list_has_failures_and_refusals(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix_page, "LIST", tmp_path / "classes.json")
    kinds = {
        "one": {"built": "", "padded": "", "packed": ""},
        "two": {"built": "", "padded": "", "packed": "no <kernel> | of /a/b/c.py"},
        "three": {"built": "ValueError: no size"},
        "four": {"built": "", "padded": "RuntimeError: x"},
        "six": {"built": "", "padded": "zerofit sft: error: --model /a/six: not trained"},
    }
    record = {
        "kinds": {kind: {"columns": columns} for kind, columns in kinds.items()},
        "versions": {"transformers": "1"},
    }
    matrix_page.write(record)
    assert json.loads(matrix_page.LIST.read_text()) == {
        "transformers": "1",
        "types": {"one": {}, "two": {"packed": "no <kernel> | of c.py"}, "four": {"padded": "RuntimeError: x"}},
        "refused": {"six": "--model six: not trained", "three": "ValueError: no size"},
    }


def test_a_row_that_fills_a_batch_has_a_finite_gradient(tmp_path):
    """Gemma-3n's norms of zeros have none, and its padding token is embedded as zeros."""
    tiny_models.checkpoint("gemma3n_text", tmp_path)
    model = tiny_models.loader_of("gemma3n_text").from_pretrained(tmp_path)

    def finite(row):
        model.zero_grad()
        batch = {name: torch.tensor([row[name]]) for name in ("input_ids", "labels")}
        model(**batch, num_items_in_batch=1).loss.backward()
        return all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())

    pad = model.config.pad_token_id
    row = batches.filler(pad)
    assert finite(row) and not finite(row | {"input_ids": [pad] * len(row["input_ids"])})
