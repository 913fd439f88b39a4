"""Reading and changing command lines."""

import pytest

from zerofit import entrypoint
from zerofit.base import command_line
from zerofit.base.errors import UserError, shortened

LINE = ["run.py", "--max-steps=2", "--data", "a.jsonl", "b.jsonl", "--packing", "--zero", "auto"]


def test_each_flag_with_its_values_and_words():
    assert command_line.by_flag(LINE) == [
        ("", ["run.py"], ["run.py"]),
        ("--max_steps", ["2"], ["--max-steps=2"]),
        ("--data", ["a.jsonl", "b.jsonl"], ["--data", "a.jsonl", "b.jsonl"]),
        ("--packing", [], ["--packing"]),
        ("--zero", ["auto"], ["--zero", "auto"]),
    ]
    assert command_line.names(LINE) == {"--max_steps", "--data", "--packing", "--zero"}


@pytest.mark.parametrize("name", ["--max_steps", "--max-steps"])
def test_a_flag_is_read_and_dropped_in_both_spellings(name):
    assert command_line.value_of(LINE, (name,)) == "2"
    assert command_line.drop(LINE, name, "--data") == ["run.py", "--packing", "--zero", "auto"]


def test_a_flag_with_several_values_is_named():
    """Such as `make sft ZERO=3 ARGS="--zero 2"`; a token's values are not shown."""
    flags = [
        "--zero=3",
        "--bf16",
        "--max_steps",
        "5",
        "--hub_token",
        "a",
        "--hub-token=b",
        "--max-steps=5",
        "--zero",
        "2",
    ]
    assert command_line.repeated(flags) == ["zero 2: the last value wins; before it, 3"]


def test_put_replaces_a_flag():
    changed = command_line.put(LINE, max_steps=3, packing=False, output_dir="x")
    assert changed == ["run.py", *LINE[2:5], "--zero", "auto", *"--max_steps 3 --packing false --output_dir x".split()]


@pytest.mark.bad_input
@pytest.mark.parametrize("said", ["--max_steps {}: must be an integer.", "--new_tokens '{}': it has it already."])
def test_a_value_of_thousands_of_letters_is_not_printed_whole(said, capsys):
    def main():
        raise UserError(said.format("9" * 6000))

    with pytest.raises(SystemExit, match="2"):
        entrypoint.guard(main)
    line = capsys.readouterr().err
    assert "99... (6,000 characters)" in line and said[:12] in line and len(line) < 120
    path = "/a" * 400
    assert shortened(path) == path
