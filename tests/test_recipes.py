"""The recipes and the examples of own ones take the same steps in the same order, so that none misses a new one."""

import ast

import pytest
from conftest import ROOT, TINY, Run, recipe_process

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


def test_a_run_prints_decisions_on_typed_arguments_and_keeps_the_rest(tmp_path):
    flags = ["--max_steps", "1", "--eval_strategy", "no", "--num_samples", "0", "--data", str(TINY / "train.jsonl")]
    short = recipe_process("sft", *flags, "--output_dir", str(tmp_path / "short"))
    typed = recipe_process("sft", *flags, "--fused_loss", "auto", "--output_dir", str(tmp_path / "typed"))
    verbose = recipe_process("sft", *flags, "--verbose", "true", "--output_dir", str(tmp_path / "verbose"))
    decisions = Run(tmp_path / "short").json("run.json")["decisions"]
    hidden = next(sentence for sentence in decisions if sentence.startswith("padding_free "))
    assert short.stdout.index("\nstep 1/1") and hidden not in short.stdout
    assert len(short.stdout.partition("\nstep 1/1")[0].splitlines()) <= 12
    assert short.stdout.count("certificate: ") == 2 and "  holds " not in short.stdout
    assert "  - fused_loss " in typed.stdout and "  - fused_loss " not in short.stdout
    assert hidden in verbose.stdout and "  holds " in verbose.stdout
