"""Texts that were rendered before, and placeholders of images, are tokens, letters or refused, as the user says."""

import json

import pytest

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.data import inspection, reading
from zerofit.data.conversations import IGNORE
from zerofit.data.load import load_datasets

PROMPT = "<|user|>\nName a river.<|end|>\n<|assistant|>\n"
TURNS = [{"role": "user", "content": "Name a river."}, {"role": "assistant", "content": "The Elbe."}]
GEMMA = "<start_of_turn>user\nHi<end_of_turn>"


def load(folder, tokenizer, rows, *flags, recipe="sft"):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = resolve.resolve_settings(recipe, ["--data", str(file), *flags], 1)
    return load_datasets(settings, tokenizer)[0]


def asked(text, answer="The Elbe."):
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]}


REFUSED = {
    "a whole conversation in text": {"text": PROMPT + "The Elbe.<|end|>\n"},
    "a text with a system prompt before the words": {"text": "Be kind.\n<|user|>\nHi<|end|>\n<|assistant|>\nHello"},
    "a text of another family": {"text": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>"},
    "a text of Gemma's": {"text": GEMMA},
    "a prompt": {"prompt": PROMPT, "completion": "The Elbe."},
    "a completion": {"prompt": "Name a river.", "completion": "The Elbe.<|end|>"},
    "an instruction": {"instruction": PROMPT, "output": "The Elbe."},
    "the end token in a turn": asked("Name a river.", "The Elbe.<|end|>"),
    "white space behind the end token": asked("Name a river.", "The Elbe.<|end|>\n"),
    "an image's placeholder": asked("<image>\nWhat is it?"),
    "a placeholder in a sentence": asked("What is in <image> here?"),
    "a video's placeholder": asked("<video>What is it?"),
    "a placeholder in a text": {"text": "<image> A boat."},
    "Qwen's placeholder": asked("<|vision_start|><|image_pad|><|vision_end|>What is it?"),
    "Mistral's placeholder": asked("[IMG]What is it?"),
}
PAIRS = {
    "the prompt of a pair": {"prompt": PROMPT, "chosen": "The Elbe.", "rejected": "No."},
    "an answer of a pair": {"prompt": "Name a river.", "chosen": "The Elbe.", "rejected": "No.<|end|>"},
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", [*REFUSED, *PAIRS])
def test_a_text_that_was_rendered_before_is_not_trained_as_letters_unasked(tmp_path, tokenizer, name):
    row, recipe = (REFUSED | PAIRS)[name], "dpo" if name in PAIRS else "sft"
    with pytest.raises(UserError, match=r"rows.jsonl:1.*--data_format letters"):
        load(tmp_path, tokenizer, [row], recipe=recipe)
    kept = load(tmp_path, tokenizer, [row], "--data_format", "letters", recipe=recipe)
    assert any("encoded as letters" in note for note in kept.statistics["notes"])
    shown = inspection.render(kept.dataset[0]["input_ids"], kept.dataset[0]["labels"], tokenizer, colored=False)
    if "<|end|>" in str(row):
        assert "<|end|>[as letters]" in shown
    assert "<|end|>»" in shown and "»[" not in shown  # the real one is not marked


def test_rendered_rows_have_the_tokens_of_their_template(tmp_path, tokenizer):
    whole = tokenizer.apply_chat_template(TURNS, return_dict=True)["input_ids"]
    messages = load(tmp_path, tokenizer, [{"messages": TURNS}]).dataset[0]
    forms = [
        {"prompt": PROMPT, "completion": "The Elbe.<|end|>\n"},
        {"prompt": PROMPT, "completion": "The Elbe."},  # the end token is added
        {"text": PROMPT + "The Elbe.<|end|>\n"},
        {"text": PROMPT + "The Elbe."},
    ]
    for row in forms:
        ids, labels = load(tmp_path, tokenizer, [row], "--data_format", "rendered").dataset[0].values()
        end = ids.index(tokenizer.eos_token_id, ids.index(tokenizer.eos_token_id) + 1) + 1
        assert ids == whole[: len(ids)] and len(ids) == end  # one end token, and nothing behind it
        assert labels == (messages["labels"][: len(ids)] if "prompt" in row else ids)


def test_a_rendered_text_gets_the_first_token_once(tmp_path, tokenizer):
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.convert_tokens_to_ids("<|user|>")
    tokenizer.bos_token = "<|user|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|user|> $A", special_tokens=[("<|user|>", bos)])
    for text in ("<|user|>hi<|end|>", "hi<|end|>"):
        ids = load(tmp_path, tokenizer, [{"text": text}], "--data_format", "rendered").dataset[0]["input_ids"]
        assert ids.count(bos) == 1 and ids[0] == bos


def test_rendered_pairs_share_their_prompt(tmp_path, tokenizer):
    row = {"prompt": PROMPT, "chosen": "The Elbe.<|end|>", "rejected": "No."}
    pair = load(tmp_path, tokenizer, [row], "--data_format", "rendered", recipe="dpo").dataset[0]
    text = tokenizer.decode(pair["input_ids"])
    assert text == f"{PROMPT}The Elbe.<|end|>{PROMPT}No.<|end|>"
    assert tokenizer.decode([i for i in pair["labels"] if i != IGNORE]) == "The Elbe.<|end|>No.<|end|>"


@pytest.mark.bad_input
@pytest.mark.parametrize("row", [{"messages": TURNS}, {"text": GEMMA}, {"text": "<image> A boat."}])
def test_rendered_does_not_take_what_it_cannot_render(tmp_path, tokenizer, row):
    with pytest.raises(UserError, match=r"rows\.jsonl:1"):
        load(tmp_path, tokenizer, [row], "--data_format", "rendered")


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("What does <|end|> mean?", "<|end|> in a text is encoded as letters, not as a token (1 row)"),
        ("<svg><image>x</image></svg>", ""),
        ("The tag `<image>` of HTML", ""),
        ("[1] a list, <b>bold</b>", ""),
    ],
)
def test_a_text_about_control_words_is_trained_and_counted(tmp_path, tokenizer, text, note):
    for row in (asked(text), {"text": text}):
        assert load(tmp_path, tokenizer, [row]).statistics["notes"] == ([note] if note else [])


def test_rows_whose_question_is_cut_off_are_counted(tmp_path, tokenizer):
    rows = [asked("Name a river.", "word " * 60), asked("Hi", "Hello.")]
    whole = load(tmp_path, tokenizer, rows[:1]).dataset[0]["labels"]
    answer = sum(label != IGNORE for label in whole)
    header = len(tokenizer("<|assistant|>\n")["input_ids"])
    for length, is_lost in (
        (answer - 5, True),
        (answer + 1, True),
        (answer + 1 + header, True),
        (len(whole) - 1, False),
    ):
        cut = load(tmp_path, tokenizer, rows, "--max_length", str(length), "--truncation", "truncate_left")
        assert (f"{reading.LOST_QUESTION} (1 row)" in cut.statistics["notes"]) == is_lost, length
    right = load(tmp_path, tokenizer, rows, "--max_length", str(answer - 5))
    assert not right.statistics["notes"]


def test_reasoning_that_an_own_template_drops_from_earlier_answers_is_counted(tmp_path, tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' and loop.last %}"
        "{{ m.reasoning_content }}{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    turns = [TURNS[0], TURNS[1] | {"reasoning_content": "Germany."}] * 2
    notes = load(tmp_path, tokenizer, [{"messages": turns}]).statistics["notes"]
    assert any("reasoning_content of earlier answers is not in the loss" in note for note in notes)
