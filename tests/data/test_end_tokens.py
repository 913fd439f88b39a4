"""The tokens that end trained answers: found in the rows, kept in the cache, decided on and said."""

import json
from types import SimpleNamespace

import pytest

from zerofit.config import resolve
from zerofit.data import encoding, end_tokens, formats, reading
from zerofit.data.chat_templates import built_in
from zerofit.data.load import load_datasets
from zerofit.objective import pairs

CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}

# The last answer ends with another token than earlier ones, tool calls with a third (as gpt-oss writes them).
THREE_ENDS = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m.get('reasoning_content', '') }}{{ m['content'] }}"
    "{% if m.get('tool_calls') %}{{ m['tool_calls'][0]['function']['name'] }}<|call|>"
    "{% elif m['role'] == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def user(text="Hi"):
    return {"role": "user", "content": text}


def says(text="Yes.", **more):
    return {"role": "assistant", "content": text, **more}


def found(tokenizer, *rows, train_on="assistant"):
    """Statistics["ends"] of rows at r:1, r:2 ..., as {(token, what it ends): (count, first place)}."""
    encoder = encoding.Encoder(tokenizer, train_on)
    parsed = []
    for i, row in enumerate(rows, 1):
        row = row if isinstance(row, dict) else {"messages": row}
        parsed.append((f"r:{i}", formats.parse(f"r:{i}", row, formats.recognize("r", row)[0])))
    encoder.encode(parsed)
    return end_tokens.summary(encoder.end_counter.take())


def short(entries):
    return {(e["token"], e["ends"]): (e["count"], e["first"]) for e in entries}


@pytest.fixture
def chatml(tokenizer):
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = built_in.choose("chatml", tokenizer)
    return tokenizer


@pytest.fixture
def three_ends(tokenizer):
    tokenizer.add_tokens(["<|call|>", "<|return|>"])
    tokenizer.chat_template = THREE_ENDS
    return tokenizer


@pytest.mark.parametrize("train_on", ["assistant", "last_turn", "all"])
def test_the_end_of_a_template_that_the_tokenizer_does_not_know_is_found_and_said(chatml, train_on):
    """open-r1#603: a base model's eos_token is another one, so the tuned model never stopped."""
    entries = found(chatml, [user(), says()], [user(), says("No.")], train_on=train_on)
    assert short(entries) == {("<|im_end|>", "answer"): (2, "r:1")}
    ends, end = end_tokens.decide(entries, chatml, [1]), chatml.convert_tokens_to_ids("<|im_end|>")
    assert (ends.words, ends.ids, ends.eos) == (("<|im_end|>",), (end,), "<|im_end|>")
    (sentence,) = ends.sentences
    assert f"<|im_end|> (id {end})" in sentence and "the eos_token of final/ (previously id 1)" in sentence


def test_nothing_is_said_and_changed_where_generation_stops_already(tokenizer, chatml):
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    entries = found(chatml, [user(), says()])
    assert end_tokens.decide(entries, chatml, [1, end]) == end_tokens.Ends(("<|im_end|>",), (end,), "", ())  # Gemma
    chatml.eos_token = "<|im_end|>"
    assert end_tokens.decide(entries, chatml, []) == end_tokens.Ends(("<|im_end|>",), (end,), "", ())


def test_a_template_that_writes_the_eos_token_keeps_it(chatml):
    """With another eos_token it would render another text than was trained."""
    chatml.chat_template += "{{ '' if messages else eos_token }}"
    ends = end_tokens.decide(found(chatml, [user(), says()]), chatml, [1])
    assert ends.words == ("<|im_end|>",) and ends.eos == "" and "generation stops at both" in ends.sentences[0]
    assert "eos_token" not in ends.sentences[0]


def test_two_ends_are_said_with_a_place_of_each(three_ends):
    rows = [user(), says("a"), user(), says("b")], [user(), CALL, {"role": "tool", "content": "1"}, says("c")]
    entries = found(three_ends, *rows)
    assert short(entries) == {
        ("<|return|>", "answer"): (2, "r:1"), ("<|end|>", "answer"): (1, "r:1"), ("<|call|>", "tool call"): (1, "r:2"),
    }  # fmt: skip
    ends = end_tokens.decide(entries, three_ends, [1])
    assert ends.words == ("<|return|>", "<|end|>", "<|call|>") and ends.eos == "<|return|>"
    assert ends.sentences[0].endswith(
        "<|return|> (id 513) after 2 answers, first in r:1, <|end|> (id 1) after 1 answer, first in r:1, <|call|> (id "
        "512) after 1 tool call, first in r:2"
    )


def test_an_end_that_also_stands_inside_answers_does_not_stop_generation(three_ends):
    """gpt-oss's reasoning ends with <|end|>, as earlier answers do: stopping there would cut every answer."""
    three_ends.chat_template = THREE_ENDS.replace(
        "{{ m.get('reasoning_content', '') }}",
        "{% if m.get('reasoning_content') %}{{ m['reasoning_content'] }}<|end|>{% endif %}",
    )
    rows = [user(), says("a", reasoning_content="Hm.")], [user(), says("a"), user(), says("b")]
    entries = found(three_ends, *rows)
    assert short(entries)[("<|end|>", "inside")] == (1, "r:1")
    ends = end_tokens.decide(entries, three_ends, [1])
    assert ends.words == ("<|return|>",)
    assert "<|end|> ends 1 answer, first in r:2, but also occurs inside 1, first in r:1" in ends.sentences[-1]


def test_rows_without_an_end_token_are_said_with_a_place(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    entries = found(tokenizer, [user(), says()], train_on="all")
    ends = end_tokens.decide(entries, tokenizer, [1])
    line = end_tokens.check(ends, [{"labels": [7]}], [1], None)
    assert line.holds is None and line.sentence == ends.sentences[0]
    assert ends.words == () and ends.sentences == (
        "no end token after 1 answer, first in r:1: the model does not learn to stop there",
    )


def test_text_ends_with_the_eos_token_and_token_ids_with_what_they_hold(tokenizer):
    entries = found(tokenizer, {"text": "Ada."}, {"input_ids": [5, 6, 1]})
    assert short(entries) == {("<|end|>", "text"): (1, "r:1")}
    assert end_tokens.decide(entries, tokenizer, []) == end_tokens.Ends(("<|end|>",), (1,), "", ())
    assert found(tokenizer, {"input_ids": [5, 6, 1]}) == []
    assert found(tokenizer, [user(), says()], train_on="prompt") == []  # no answer is trained


def test_both_sides_of_pairs_are_counted(chatml):
    report = reading.ReadingReport()
    settings = SimpleNamespace(
        objective=pairs.Pairs, columns=None, max_length=64, truncation="truncate_right", bad_rows="drop"
    )
    rows = [("f:1", {"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}, reading.RowFormat(pairs.KIND))]
    reading.tokenize_rows(rows, settings, encoding.Encoder(chatml), report)
    assert short(reading.summarize(["f"], report, settings)["ends"]) == {("<|im_end|>", "answer"): (2, "f:1")}


@pytest.mark.parametrize("more", [[], ["--preprocessing_num_workers", "2"], ["--streaming", "--max_steps", "2"]])
def test_the_ends_are_kept_with_the_tokens(tmp_path, chatml, more):
    """In the cache, so that a resumed run knows them; a cache of before that lacks them is made anew."""
    rows = [{"question": f"Who {i} {len(more)}?", "answer": "Ada."} for i in range(1200)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = resolve.resolve_settings("sft", ["--data", str(tmp_path / "train.jsonl"), *more], 1)
    read = 500 if "--streaming" in more else 1200
    for _ in range(2):
        statistics = load_datasets(settings, chatml)[0].statistics
        assert short(statistics["ends"]) == {("<|im_end|>", "answer"): (read, f"{tmp_path / 'train.jsonl'}:1")}
    if not more:
        from zerofit.data import dataset

        (facts,) = (
            f
            for f in dataset.cache_folder().glob("*.json")
            if json.loads(f.read_text())["source"].startswith(str(tmp_path))
        )
        facts.write_text(json.dumps({k: v for k, v in json.loads(facts.read_text()).items() if k != "ends"}))
        assert load_datasets(settings, chatml)[0].statistics["ends"]


def test_the_line_of_the_certificate(chatml):
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    ends = end_tokens.decide(found(chatml, [user(), says()]), chatml, [1])
    rows = [{"labels": [-100, 7, end]}, {"labels": [-100, 7, 8]}]
    good = end_tokens.check(ends, rows, [end, 1], [end, 1])
    assert good.name == "end_token" and good.holds
    assert (
        good.sentence == f"end token: trained answers end with <|im_end|> (id {end}); generation and final/ stop there"
    )
    assert good.numbers == {
        "trained": {"<|im_end|>": end}, "generated": [end, 1], "shipped": [end, 1], "rows": 2, "rows_with_an_end": 1,
    }  # fmt: skip
    for generated, shipped in (([1], [1]), ([end, 1], [1])):
        assert end_tokens.check(ends, rows, generated, shipped).holds is False
    cut = end_tokens.check(ends, rows[1:], [end], [end])
    assert cut.holds is None and "the labels of the first 1 rows contain none" in cut.sentence
    assert end_tokens.check(end_tokens.Ends((), (), "", ()), rows, [1], [1]).holds is None
