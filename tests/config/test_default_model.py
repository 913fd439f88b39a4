"""Rows of a user train the model that is named, the bundled one only by its name."""

import json

import pytest
from conftest import ROOT, TINY

from zerofit.base.errors import UserError
from zerofit.config import early_check, resolve
from zerofit.job import program

RECIPES = ("sft", "lora", "dpo")


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "Hi?", "answer": "Hello."}) + "\n")
    return file


def check(recipe, *flags):
    early_check.check(program.kit()[recipe], [*map(str, flags)], here=True, own_folder=False)


@pytest.mark.bad_input
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_of_a_user_do_not_train_the_bundled_model_unasked(recipe, rows, tmp_path):
    says = r"rows\.jsonl: --model is missing.*MODEL=.*--model tiny for the bundled toy model"
    bundled = program.kit()[recipe].bundled_file.parent / "train.jsonl"
    for data in (["--data", rows], ["--data", f"{rows}:0.5"], ["--data", bundled, rows]):
        with pytest.raises(UserError, match=says):
            check(recipe, *data)
    config = tmp_path / "mine.yaml"
    config.write_text(f"data: [{rows}]\n")
    with pytest.raises(UserError, match=says):
        check(recipe, "--config", config)
    for verb in ("data", "batch-size", "plan"):
        with pytest.raises(UserError, match=says):
            early_check.command(verb, ["--recipe", recipe, "--gpus", "2", "--args", f"--data {rows}"])
        early_check.command(verb, ["--recipe", recipe, "--data", str(rows), "--model", "tiny"])
    early_check.command("plan", ["--data", "not/here.jsonl", "--model", "tiny", "--gpu_type", "h100-80g"])
    with pytest.raises(UserError, match=says):
        early_check.command("launch", [str(ROOT / "recipes" / f"{recipe}.py"), "--data", str(rows)])


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bundled_model_trains_where_it_is_meant(recipe, rows):
    for flags in (
        [],
        ["--data", rows, "--model", "tiny"],
        ["--model", "tiny"],
        ["--data", rows, "--model", TINY / "model"],
    ):
        check(recipe, *flags)
    bundled = program.kit()[recipe].bundled_file.parent
    check(recipe, "--data", bundled / "train.jsonl", f"{bundled / 'train.jsonl'}:0.5")


def test_tiny_is_the_bundled_model():
    named = resolve.resolve_settings("sft", ["--data", "none", "--model", "tiny", "--use_cpu", "true"], 1)
    assert (named.model, named.source["model"], named.data) == (str(TINY / "model"), "bundled task", ["none"])
    plain, alone = (
        resolve.resolve_settings("sft", ["--use_cpu", "true", *more], 1) for more in ([], ["--model", "tiny"])
    )
    assert alone.values == plain.values and alone.bundled
