"""Rows of an answer with a label (KTO): every form, the loss spans, pairs that are taken apart, what is refused."""

import json

import pytest
from conftest import TINY

from zerofit.base.errors import UserError
from zerofit.certificate import data as checks
from zerofit.config import resolve
from zerofit.data import formats
from zerofit.data.conversations import IGNORE
from zerofit.data.load import load_datasets
from zerofit.objective import labeled

USER, ANSWER = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}

FORMS = {
    "prompt and completion": {"prompt": "Hi?", "completion": "Hello."},
    "both as turns": {"prompt": [USER], "completion": [ANSWER]},
    "messages": {"messages": [USER, ANSWER]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."}]},
    "alpaca": {"instruction": "Hi?", "input": "", "output": "Hello."},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("label", "wanted"), [(True, True), (0, False), ("False", False), (1.0, True)])
def test_every_form_is_the_same_answer(form, label, wanted):
    _, answers, not_used, _ = labeled.parse("a:1", FORMS[form] | {"label": label}, formats.FORMATS)
    ((place, (conversation,), found),) = answers
    assert (place, found, not_used) == ("a:1", wanted, [])
    assert conversation.turns == [USER, ANSWER] and conversation.trained == [False, True]


def test_only_the_turns_behind_the_last_question_are_trained():
    row = {"messages": [USER, ANSWER, {"role": "user", "content": "And?"}, ANSWER], "label": False}
    ((_, (conversation,), _),) = labeled.parse("a:1", row, formats.FORMATS)[1]
    assert conversation.trained == [False, False, False, True]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"prompt": "Hi?", "completion": "Hello."}, "column 'label' is missing or null"),
        ({"prompt": "Hi?", "completion": "Hello.", "label": "good"}, "must be true or false (1 or 0), found 'good'"),
        ({"text": "Hi? Hello.", "label": True}, "format text does not mark the start of the answer"),
        ({"prompt": "Hi?", "chosen": "Hello.", "label": True}, "no known format has the columns prompt, chosen"),
    ],
)
def test_what_has_no_label_or_no_prompt_is_refused_with_its_place(row, cause):
    with pytest.raises(UserError) as refused:
        labeled.parse("a:1", row, formats.FORMATS)
    assert str(refused.value).startswith("a:1: ") and cause in str(refused.value)


def load(tmp_path, tokenizer, data, *more):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, data)))
    words = ["--model", str(TINY / "preference" / "model"), "--data", str(file), "--use_cpu", "true", *more]
    settings = resolve.resolve_settings("dpo", [*words, "--loss_type", "kto"], 1)
    return settings, load_datasets(settings, tokenizer)[0]


def test_a_pair_is_taken_apart_with_a_line(tmp_path, tokenizer):
    pair = {"prompt": "Hi?", "chosen": "Hello.", "rejected": "Go away."}
    settings, train = load(tmp_path, tokenizer, [pair, {"prompt": "Hi?", "completion": "No.", "label": False}])
    answers = [tokenizer.decode([t for t in row["labels"] if t != IGNORE]) for row in train.dataset]
    assert answers == ["Hello.<|end|>", "Go away.<|end|>", "No.<|end|>"]
    assert [row["labeled"] for row in train.dataset] == [[1], [0], [0]]
    assert {name: train.statistics[name] for name in ("rows", "kept", "wanted")} == {"rows": 3, "kept": 3, "wanted": 1}
    said = labeled.check(settings, train)
    assert said[0].startswith("labels: 1 wanted and 2 unwanted answers; each pair is split")
    assert "--desirable_weight 2 to 2.67" in said[1]  # 2 x 1 = 1 x 2, and 4/3 of it


@pytest.mark.bad_input
@pytest.mark.parametrize(("label", "mend"), [(True, "recipes/sft.py"), (False, "add wanted answers")])
def test_labels_of_one_kind_are_refused(tmp_path, tokenizer, label, mend):
    settings, train = load(tmp_path, tokenizer, [FORMS["messages"] | {"label": label}] * 3)
    with pytest.raises(UserError, match="all 3 training answers are") as refused:
        checks.check_data(settings, train, None, tokenizer)
    assert mend in str(refused.value)


@pytest.mark.bad_input
def test_two_labels_that_contradict_each_other_are_refused():
    row = {"prompt": "a", "completion": "b", "label": True, "kto_tag": "false"}
    with pytest.raises(UserError, match="'label' is True and 'kto_tag' is 'false', which contradict each other"):
        labeled.parse("here", row, formats.FORMATS)
    assert labeled.parse("here", row | {"kto_tag": "true"}, formats.FORMATS)[1][0][2]


@pytest.mark.bad_input
def test_a_kto_run_in_which_no_answer_counts_is_refused():
    flags = ["--loss_type", "kto", "--desirable_weight", "0", "--undesirable_weight", "0", "--use_cpu", "true"]
    with pytest.raises(UserError, match="the loss would always be 0; raise one"):
        resolve.resolve_settings("dpo", flags, 1)
