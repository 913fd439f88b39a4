"""Preference pairs: every published form, the loss spans, and what is dropped."""

import json
from types import SimpleNamespace

import pytest

from zerofit.base.errors import UserError
from zerofit.data import batches, encoding, reading
from zerofit.data.conversations import IGNORE
from zerofit.objective import pairs

USER, GOOD, BAD = {"role": "user", "content": "Hi?"}, "Hello.", "Go away."


def answer(text):
    return {"role": "assistant", "content": text}


FORMS = {
    "prompt as a string": {"prompt": "Hi?", "chosen": GOOD, "rejected": BAD},
    "prompt as turns": {"prompt": [USER], "chosen": [answer(GOOD)], "rejected": [answer(BAD)]},
    "implicit prompt": {"chosen": [USER, answer(GOOD)], "rejected": [USER, answer(BAD)]},
    "prompt repeated in the sides": {"prompt": "Hi?", "chosen": [USER, answer(GOOD)], "rejected": [USER, answer(BAD)]},
    "LLaMA-Factory, alpaca": {"instruction": "Hi?", "input": "", "chosen": GOOD, "rejected": BAD},
    "LLaMA-Factory, ShareGPT": {
        "conversations": [{"from": "human", "value": "Hi?"}],
        "chosen": {"from": "gpt", "value": GOOD},
        "rejected": {"from": "gpt", "value": BAD},
    },
    "question": {"question": "Hi?", "chosen": GOOD, "rejected": BAD},
    "hh-rlhf": {"chosen": f"\n\nHuman: Hi?\n\nAssistant: {GOOD}", "rejected": f"\n\nHuman: Hi?\n\nAssistant: {BAD}"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_pair(form):
    chosen, rejected = pairs.parse("a:1", FORMS[form])
    assert [chosen.turns, rejected.turns] == [[USER, answer(GOOD)], [USER, answer(BAD)]]
    assert chosen.trained == rejected.trained == [False, True]


def test_only_the_turns_after_the_shared_ones_are_trained():
    prompt = [USER, answer("Earlier."), {"role": "user", "content": "And?"}]
    row = {"system": "Be kind.", "prompt": prompt, "chosen": [answer(GOOD)], "rejected": [answer(BAD)]}
    chosen, _ = pairs.parse("a:1", row)
    assert chosen.turns[0] == {"role": "system", "content": "Be kind."}
    assert chosen.trained == [False, False, False, False, True]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"prompt": "Hi?", "chosen": GOOD}, "column 'rejected' is missing"),
        ({"chosen": GOOD, "rejected": BAD}, "column 'prompt' is missing"),
        ({"prompt": "Hi?", "chosen": 3, "rejected": BAD}, "'chosen' must be a string"),
        ({"prompt": "Hi?", "chosen": [], "rejected": BAD}, "'chosen' must be a string, a turn or a list"),
        ({"chosen": [USER, answer(GOOD)], "rejected": [USER | {"content": "Who?"}, answer(BAD)]}, "different prompts"),
        (
            {"prompt": [USER], "chosen": [USER], "rejected": [answer(BAD)]},
            "a: 1, chosen: the last turn is not an assistant turn",
        ),
    ],
)
def test_what_is_no_pair_is_refused_with_its_place(row, cause):
    with pytest.raises(UserError) as refused:
        pairs.parse("a: 1", row)
    assert str(refused.value).startswith("a: 1") and cause in str(refused.value)


def settings(**more):
    values = {
        "objective": pairs.Pairs,
        "columns": None,
        "max_length": 64,
        "truncation": "truncate_right",
        "bad_rows": "drop",
    }
    return SimpleNamespace(**values | more)


def tokenized(tokenizer, rows, **more):
    report = reading.ReadingReport()
    raw = [(f"f:{i}", row, reading.RowFormat(pairs.KIND)) for i, row in enumerate(rows)]
    return reading.tokenize_rows(raw, settings(**more), encoding.Encoder(tokenizer), report), report


def test_a_pair_is_one_row_of_two_documents_with_its_answers_labeled(tokenizer):
    (row,), report = tokenized(tokenizer, [FORMS["prompt as a string"]])
    row = dict(zip(("input_ids", "labels", "lengths"), row, strict=True))
    sides = batches.documents(row)
    for side, text in zip(sides, (GOOD, BAD), strict=True):
        assert tokenizer.decode(side["input_ids"]) == f"<|user|>\nHi?<|end|>\n<|assistant|>\n{text}<|end|>\n"
        assert tokenizer.decode([t for t in side["labels"] if t != IGNORE]) == f"{text}<|end|>"
    assert report.kept == 1 and report.tokens == len(row["input_ids"]) == sum(row["lengths"])
    assert report.supervised_tokens == sum(t != IGNORE for t in row["labels"])


def test_identical_and_empty_sides_and_bad_rows_are_dropped_and_counted_once(tokenizer):
    good = FORMS["prompt as a string"]
    rows = [
        good,
        good | {"chosen": BAD},
        good | {"rejected": " "},
        good | {"rejected": None},
        good | {"chosen": GOOD * 40},
    ]
    kept, report = tokenized(tokenizer, rows, truncation="drop")
    assert [row is not None for row in kept] == [True, False, False, False, False]
    names = ("rows", "kept", "dropped_identical_sides", "dropped_empty_side", "dropped_bad", "dropped_too_long")
    assert [getattr(report, name) for name in names] == [5, 1, 1, 1, 1, 1]
    # sides that differ only behind the cut teach nothing
    _, report = tokenized(tokenizer, [good | {"chosen": GOOD * 40 + "a", "rejected": GOOD * 40 + "b"}])
    assert report.dropped_identical_sides == 1 and report.kept == 0


def test_marks_and_empty_parts_are_read_as_in_sft():
    row = {"prompt": [USER], "chosen": [answer(GOOD) | {"weight": 0}], "rejected": [answer(BAD)]}
    chosen, rejected = pairs.parse("a:1", row)
    assert (chosen.trained, rejected.trained) == ([False, False], [False, True])
    chosen, _ = pairs.parse("a:1", {"instruction": "", "input": "Hi?", "chosen": GOOD, "rejected": BAD})
    assert chosen.turns == [USER, answer(GOOD)]


def test_a_mistake_in_a_side_names_its_place_once(tokenizer):
    bad = FORMS["prompt as a string"] | {"chosen": [{"role": "nobody", "content": "a"}]}
    _, report = tokenized(tokenizer, [FORMS["prompt as a string"], bad])
    (reason,) = report.bad_rows
    assert reason.startswith("chosen: turn N has the role 'nobody'")
    with pytest.raises(UserError, match=r"^f:0, chosen: turn 2 has the role"):
        tokenized(tokenizer, [bad], bad_rows="error")


def test_padded_and_concatenated_batches_hold_the_same_documents(tokenizer):
    rows, _ = tokenized(
        tokenizer, [FORMS["prompt as a string"], {"prompt": "Who?", "chosen": "Me.", "rejected": "Not you."}]
    )
    rows = [dict(zip(("input_ids", "labels", "lengths"), row, strict=True)) for row in rows]
    rows.append(batches.filler(0, documents=2))
    padded, packed = batches.Collator(0)(rows), batches.PackedCollator()(rows)
    for batch in (padded, packed):
        numbers, count = batches.document_of_each_token(batch)
        assert count == 6
        for i, document in enumerate(d for row in rows for d in batches.documents(row)):
            inside = numbers == i
            if "attention_mask" in batch:
                inside = inside & (batch["attention_mask"].flatten() == 1)
            assert batch["input_ids"].flatten()[inside].tolist() == document["input_ids"]


def test_a_cached_set_holds_lengths_and_is_not_that_of_sft(tmp_path, tokenizer):
    from zerofit.config import resolve
    from zerofit.data.load import load_datasets

    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(FORMS[name]) for name in FORMS if "question" not in name))
    flags = ["--data", str(tmp_path / "p.jsonl"), "--use_cpu", "true", "--max_length", "64"]
    train, _ = load_datasets(resolve.resolve_settings("dpo", flags, 1), tokenizer)
    assert train.dataset.column_names == ["input_ids", "labels", "lengths"] and len(train) == 7
    assert train.statistics["longest"] == max(map(max, train.dataset["lengths"]))
    with pytest.raises(UserError, match=r"train on it with recipes/dpo.py"):
        load_datasets(resolve.resolve_settings("sft", flags, 1), tokenizer)
