"""examples/notebook.ipynb runs from its first cell to its last, and its model answers."""

import ast
import contextlib
import io
import json

import pytest
from conftest import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def cells() -> list[str]:
    """The sources of the code cells."""
    found = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def test_it_is_kept_without_outputs():
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
        assert cell["cell_type"] == "markdown" or ast.parse("".join(cell["source"]))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    said = io.StringIO()
    *first, last = cells()
    tree = ast.parse(last)
    with contextlib.redirect_stdout(said):
        for source in first:
            exec(compile(source, str(NOTEBOOK), "exec"), names)
        exec(compile(ast.Module(tree.body[:-1], []), str(NOTEBOOK), "exec"), names)
        answer = eval(compile(ast.Expression(tree.body[-1].value), str(NOTEBOOK), "eval"), names)
    text = said.getvalue()
    assert "chosen: sft ZeRO-" in text and "'in the loss" not in text and "in the loss" in text
    assert names["losses"][-1][1] < 0.5 * names["losses"][0][1]
    assert answer.startswith("Kai ")
