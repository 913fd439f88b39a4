"""The recipes and the examples of own ones take the same steps in the same order, so that none misses a new one."""

import ast

import pytest
from conftest import ROOT

FILES = [
    *sorted((ROOT / "recipes").glob("*.py")),
    *sorted((ROOT / "examples" / "extending").glob("*.py")),
    ROOT / "tests" / "launch" / "scaled.py",
    ROOT / "tests" / "launch" / "recomputed.py",
]

# What a recipe does beyond the common steps.
MORE = {"add_adapter", "trainer.add_callback"}

# Names of the same step: a pipeline loads a stage of the model, and each recipe has a trainer of its own.
SAME = {"load_stage": "load_model"}


def steps(file) -> list[str]:
    """The calls in main() of functions and methods, in the order in which they are made."""
    tree = ast.parse(file.read_text())
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    calls = [node for node in ast.walk(main) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func) for call in sorted(calls, key=lambda c: (c.end_lineno, c.end_col_offset))]
    names = ["the trainer" if name.endswith("Trainer") else SAME.get(name, name) for name in names]
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return [name for name in names if name not in MORE and name not in own]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_recipe_takes_the_same_steps(file):
    expected = steps(ROOT / "recipes" / "sft.py")
    assert len(expected) > 10 and expected[0] == "recipe.parse" and expected[-1] == "write_result"
    assert steps(file) == expected
