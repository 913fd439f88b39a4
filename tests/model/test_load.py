"""Loading the tokenizer of a model."""

import shutil

import pytest
from conftest import TINY

from zerofit.config import parse
from zerofit.errors import UserError
from zerofit.model.load import load_tokenizer


@pytest.mark.bad_input
def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    """transformers makes one of the model's class instead, which knows no word."""
    shutil.copy(TINY / "model" / "config.json", tmp_path)
    settings = parse.read("sft", ["--model", str(tmp_path), "--data", "rows.jsonl"], 1)
    with pytest.raises(UserError, match="the folder has no tokenizer; copy"):
        load_tokenizer(settings)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / "model" / name, tmp_path)
    assert load_tokenizer(settings).eos_token_id is not None
