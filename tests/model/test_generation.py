"""Generation stops where trained answers end, and what is saved says so."""

import json

import pytest
from conftest import TINY

from zerofit.base import log_filters
from zerofit.data.chat_templates import built_in
from zerofit.model import generation

FOUND = [{"token": "<|im_end|>", "ends": "answer", "count": 3, "first": "a:1"}]


@pytest.fixture
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY / "model")


@pytest.fixture
def chatml(tokenizer):
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = built_in.choose("chatml", tokenizer)
    return tokenizer


def shipped(model, folder):
    model.generation_config.save_pretrained(folder)
    return json.loads((folder / "generation_config.json").read_text())


def test_trained_ends_come_before_the_bases_own(model, chatml, tmp_path):
    model.generation_config.eos_token_id = [1, 4]
    ends, changed = generation.stop_at_ends(model, chatml, FOUND)
    end = ends.ids[0]
    assert shipped(model, tmp_path)["eos_token_id"] == generation.stop_ids(model) == [end, 1, 4]
    assert model.config.eos_token_id == end
    # The tokenizer that goes on encoding rows is as it was; the saved one takes the end as special.
    assert (chatml.eos_token, changed.eos_token, changed.pad_token) == ("<|end|>", "<|im_end|>", chatml.pad_token)
    changed.save_pretrained(tmp_path)
    from transformers import AutoTokenizer

    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.eos_token_id == end and again.decode([end], skip_special_tokens=True) == ""
    text = "<|im_start|>user\nHi<|im_end|>\n"
    assert again(text)["input_ids"] == changed(text)["input_ids"] == chatml(text)["input_ids"]


def test_a_base_that_stops_there_is_left_as_it_is(model, chatml):
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    model.generation_config.eos_token_id, before = [1, end], model.config.eos_token_id
    ends, same = generation.stop_at_ends(model, chatml, FOUND)
    assert same is chatml and not ends.eos
    assert generation.stop_ids(model) == [1, end] and model.config.eos_token_id == before


def test_settings_of_the_base_that_contradict_each_other_do_not_end_the_save(model, chatml, tmp_path):
    """Llama-2's: a temperature without sampling. transformers refuses to save it once it was changed."""
    model.generation_config.temperature, model.generation_config.do_sample = 0.6, False
    generation.stop_at_ends(model, chatml, FOUND)
    kept = shipped(model, tmp_path)
    assert kept["temperature"] == 0.6 and kept["eos_token_id"][1:] == [1]


def test_the_trainer_has_nothing_left_to_align(model, tokenizer, caplog):
    """A model without a padding token drew "The tokenizer has new PAD/BOS/EOS tokens" from transformers."""
    from transformers.trainer_utils import align_special_tokens

    log_filters.libraries()
    model.config.pad_token_id = model.generation_config.pad_token_id = None
    generation.stop_at_ends(model, tokenizer, [])
    before = model.generation_config.to_dict(), model.config.to_dict()
    align_special_tokens(model, tokenizer)
    assert (model.generation_config.to_dict(), model.config.to_dict()) == before
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert not [record for record in caplog.records if "PAD/BOS/EOS" in record.getMessage()]
