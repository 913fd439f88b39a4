"""Rows as published data sets spell them become the turns that they stand for, with the loss where it belongs.

Text and loss are compared with a rendering by hand.
"""

import json
import re

import pytest
from published_rows import CASES, TREE

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.data import batches, dataset
from zerofit.data.conversations import IGNORE
from zerofit.data.load import load_datasets

TEMPLATE = (
    "{% for t in tools or [] %}<!-- {{ t.function.name }} -->{% endfor %}"
    "{% for m in messages %}<|{{ m.role if m.role != 'tool' else 'user' }}|>\n{% if m.role == 'assistant' %}"
    "{% generation %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}<|end|>{% endgeneration %}{{ '\\n' }}{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def rendered(turns) -> tuple[str, str]:
    """Return the text of turns and the part of it that is trained, written by hand."""
    text = loss = ""
    for role, content, trained, *more in turns:
        if role == "text":
            return content + "<|end|>", content + "<|end|>"
        reasoning, calls = (more[0].get("reasoning"), more[0].get("calls", [])) if more else (None, [])
        body = f"<think>{reasoning}</think>" if reasoning else ""
        body += content
        body += "".join(f"<call>{name} {json.dumps(arguments)}</call>" for name, arguments in calls)
        text += f"<|{'user' if role == 'tool' else role}|>\n{body}<|end|>\n"
        loss += f"{body}<|end|>" if trained else ""
    return text, loss


def documents(row, tokenizer) -> list[tuple[str, str]]:
    """Return (text, trained text) of a tokenized row, or of both sides of a pair."""
    return [
        (
            re.sub("<!-- .*? -->", "", tokenizer.decode(part["input_ids"])),
            tokenizer.decode([label for label in part["labels"] if label != IGNORE]),
        )
        for part in batches.documents(row)
    ]


@pytest.mark.oracle
@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_rows_are_the_turns_that_they_stand_for(tmp_path, tokenizer, case, marks):
    tokenizer.chat_template = TEMPLATE
    if not marks:
        tokenizer.chat_template = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    file = tmp_path / case.file
    file.write_text(case.text())
    settings = resolve.resolve_settings(case.recipe, ["--data", str(file), "--use_cpu", "true"], 1)
    if isinstance(case.wanted, str):
        with pytest.raises(UserError, match=case.wanted) as refused:
            load_datasets(settings, tokenizer)
        assert str(refused.value).startswith(str(file)) and "\n" not in str(refused.value)
        return
    train, _ = load_datasets(settings, tokenizer)
    wanted = [list(map(rendered, row)) if isinstance(row, tuple) else [rendered(row)] for row in case.wanted]
    assert [documents(row, tokenizer) for row in train.dataset] == wanted
    lines = "\n".join(dataset.notes({"training": train}))
    assert re.search(case.note, lines), lines


def loaded(tmp_path, tokenizer, recipe, rows, *flags):
    tokenizer.chat_template = TEMPLATE
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--data", str(file), "--use_cpu", "true", *flags]
    return load_datasets(resolve.resolve_settings(recipe, flags, 1), tokenizer)[0]


def test_a_counted_reason_keeps_the_numbers_of_its_first_row(tmp_path, tokenizer):
    asked = {"role": "user", "content": "Hi?"}
    wrong = {"messages": [asked, asked, {"role": "assistant", "content": "x"}]}
    rows = [wrong, wrong, {"messages": wrong["messages"][1:]}]
    train = loaded(tmp_path, tokenizer, "sft", rows, "--bad_rows", "drop")
    (line,) = [line for line in dataset.notes({"training": train}) if "unusable" in line and "user turns" in line]
    assert "2 rows unusable: turns 1 and 2 are both user turns" in line


def test_ties_are_dropped_and_counted(tmp_path, tokenizer):
    row = {"context": "Hi?", "response1": "Good.", "response2": "Bad."}
    rows = [row | {"overall_preference": score} for score in (-1, 0, 2)]
    train = loaded(tmp_path, tokenizer, "dpo", rows)
    assert (len(train), train.statistics["dropped_ties"], train.statistics["dropped_bad"]) == (2, 1, 0)
    assert "1 dropped (tie)" in dataset.describe("training", train)
    with pytest.raises(UserError, match="all 1 pairs are ties"):
        loaded(tmp_path, tokenizer, "dpo", rows[1:2])


def test_a_message_whose_parent_is_missing_is_a_bad_row(tmp_path, tokenizer):
    orphan = TREE[-1] | {"message_id": "z", "parent_id": "nobody"}
    with pytest.raises(UserError, match=r"rows.jsonl:6: its parent_id 'nobody' is not in this file"):
        loaded(tmp_path, tokenizer, "sft", [*TREE, orphan])
    train = loaded(tmp_path, tokenizer, "sft", [*TREE, orphan], "--bad_rows", "drop")
    assert len(train) == 1 and train.statistics["dropped_bad"] == 1
    assert any("4 of 6 messages are used" in note for note in train.statistics["notes"])
    with pytest.raises(UserError, match="--streaming: the rows are messages of trees"):
        loaded(tmp_path, tokenizer, "sft", TREE, "--streaming", "true", "--max_steps", "1")


@pytest.mark.bad_input
def test_a_reasoning_or_a_call_of_the_user_is_refused(tmp_path, tokenizer):
    for kind in ("reasoning", "tool_call"):
        turns = [{"role": "user", "content": [{"type": kind, "value": "Hi?"}]}, {"role": "assistant", "content": "a"}]
        with pytest.raises(UserError, match=f"turn 1 has content other than text \\('{kind}'\\)"):
            loaded(tmp_path, tokenizer, "sft", [{"messages": turns}])
