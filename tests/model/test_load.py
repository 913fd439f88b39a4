"""Loading the tokenizer and the configuration of a model."""

import json
import shutil

import pytest
from conftest import TINY

from zerofit.config import parse
from zerofit.errors import UserError
from zerofit.model.load import load_config, load_tokenizer


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


@pytest.mark.bad_input
@pytest.mark.parametrize("method", ["bitsandbytes", "fp8"])
def test_weights_that_are_quantized_already_are_refused(tmp_path, method):
    """Else full tuning ends in a traceback after loading, and an adapter of them is refused at its export."""
    config = json.loads((TINY / "model" / "config.json").read_text())
    quantized = config | {"quantization_config": {"quant_method": method, "load_in_4bit": method == "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    settings = parse.read("lora", ["--model", str(tmp_path), "--data", "rows.jsonl"], 1)
    with pytest.raises(UserError, match=rf"its weights are quantized already \({method}\).* name the original"):
        load_config(settings)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(settings).model_type == config["model_type"]
