"""A class of each family of `make models`; the page is that of the result file."""

import sys

import pytest
from conftest import ROOT, run_world

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
    assert {name for name, why in found["mamba"]["columns"].items() if why} == {"side by side", "packed"}


def test_the_page_shows_what_holds_and_why_not(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix_page, "PAGE", tmp_path / "models.md")
    columns = ("built", "padded", "packed")
    kinds = {
        "one": {"columns": {"built": "", "padded": "", "packed": ""}},
        "two": {"columns": {"built": "", "padded": "", "packed": "no <kernel> | of /a/b/c.py"}},
        "three": {"columns": {"built": "ValueError: no size"}},
        "four": {"columns": {"built": "", "padded": "RuntimeError: x"}},
    }
    matrix_page.write({"kinds": kinds}, columns)
    text = matrix_page.PAGE.read_text()
    assert "4 types tried, 3 built; all columns hold for 1. Each: padded 2, packed 1." in text
    assert "| `two` | yes | [2] |" in text and "2. no (kernel) / of c.py" in text
    assert "| `four` | [1] |  |" in text and "- `three`: ValueError: no size" in text
