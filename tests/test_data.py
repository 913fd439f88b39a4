"""Rows to tokens: formats, loss mask, order, cache, packing, and a sentence with file:line for what is broken."""

import json

import pytest
import torch
from conftest import TINY

from zerofit import args, chat, data, rows
from zerofit.errors import UserError


def settings_for(path, *flags, recipe="sft"):
    return args.parse(recipe, ["--data", str(path), *flags], 1)


def supervised_text(tokenizer, ids, labels):
    return tokenizer.decode([i for i, label in zip(ids, labels, strict=True) if label != chat.IGNORE])


QA = [{"question": "Where does Ada live?", "answer": "In Oslo."}, {"question": "Who?", "answer": "Bo"}]
EQUAL_ROWS = {
    "messages": {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
    "prompt/completion": {"prompt": "Hi", "completion": "Hello."},
    "question/answer": {"question": "Hi", "answer": "Hello."},
    "instruction": {"instruction": "Hi", "input": "", "output": "Hello."},
}


@pytest.mark.parametrize("kind", EQUAL_ROWS)
def test_formats_are_detected_and_give_the_same_tokens(tokenizer, kind):
    row = EQUAL_ROWS[kind]
    assert chat.detect("here", row) == kind
    ids, labels = chat.tokenize("here", chat.to_messages("here", row, kind), tokenizer)
    wanted = tokenizer.apply_chat_template(EQUAL_ROWS["messages"]["messages"], return_dict=True)["input_ids"]
    assert ids == wanted
    assert supervised_text(tokenizer, ids, labels) == "Hello.<|end|>"


def test_alpaca_input_is_part_of_the_prompt(tokenizer):
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    ids, labels = chat.tokenize("here", chat.to_messages("here", row, "instruction"), tokenizer)
    assert "Add.\n\n1 2" in tokenizer.decode(ids)
    assert supervised_text(tokenizer, ids, labels) == "3<|end|>"


def test_every_assistant_turn_and_nothing_else_is_trained(tokenizer):
    turns = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One? é 🙂"},
        {"role": "assistant", "content": "First: ünï 🙂"},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Second."},
    ]
    ids, labels = chat.tokenize("here", turns, tokenizer)
    assert supervised_text(tokenizer, ids, labels) == "First: ünï 🙂<|end|>Second.<|end|>"
    assert labels[-1] == chat.IGNORE or tokenizer.decode(labels[-1]) == "<|end|>"


def test_plain_text_trains_everything_and_the_end(tokenizer):
    ids, labels = chat.tokenize("here", "Ada lives in Oslo.", tokenizer)
    assert ids == labels and ids[-1] == tokenizer.eos_token_id


def test_a_tokenizer_without_template_gets_the_plain_one(tokenizer):
    tokenizer.chat_template = chat.PLAIN_TEMPLATE
    ids, labels = chat.tokenize("here", EQUAL_ROWS["messages"]["messages"], tokenizer)
    assert tokenizer.decode(ids).startswith("### User:\nHi")
    assert supervised_text(tokenizer, ids, labels) == "Hello.<|end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(UserError, match="rewrites earlier text"):
        chat.tokenize("here", EQUAL_ROWS["messages"]["messages"], tokenizer)


def write(folder, name, content):
    file = folder / name
    file.write_text(content if isinstance(content, str) else "".join(json.dumps(r) + "\n" for r in content))
    return file


def test_all_file_kinds_give_the_same_rows(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write(tmp_path, "a.jsonl", QA)
    write(tmp_path, "b.json", json.dumps(QA, indent=1))
    write(tmp_path, "c.csv", "question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in QA))
    pq.write_table(pa.Table.from_pylist(QA), tmp_path / "d.parquet")
    (tmp_path / "e.jsonl").write_bytes(b"\xef\xbb\xbf\n" + "\n".join(map(json.dumps, QA)).encode())  # BOM, blank line
    for file in sorted(tmp_path.iterdir()):
        assert [row for _, row in rows.read(file)] == QA, file.name


def test_a_folder_is_split_by_file_name(tmp_path):
    for name in ("train-00.jsonl", "train-01.jsonl", "validation.jsonl"):
        write(tmp_path, name, QA)
    train, held_out = rows.find_files(str(tmp_path))
    assert [f.name for f in train] == ["train-00.jsonl", "train-01.jsonl"]
    assert [f.name for f in held_out] == ["validation.jsonl"]


def test_hub_ids_load_through_datasets(monkeypatch, tmp_path, tokenizer):
    """The real loading code, pointed at a local folder in hub layout."""
    import datasets

    folder = tmp_path / "hub"
    folder.mkdir()
    write(folder, "train.jsonl", QA * 4)
    write(folder, "test.jsonl", QA)
    real, builder = datasets.load_dataset, datasets.load_dataset_builder
    monkeypatch.setattr(datasets, "load_dataset", lambda name: real(str(folder)))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda name: builder(str(folder)))
    monkeypatch.setattr("zerofit.hub.check", lambda asker: None)
    train, held_out = data.load(settings_for("someone/set"), tokenizer)
    assert (len(train), len(held_out)) == (8, 2)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", "", "holds no rows"),
        ("a.jsonl", "\n\n", "holds no rows"),
        ("a.json", "[]", "holds no rows"),
        ("a.jsonl", '{"question": "a", "answer": "b"}\n{"question": "a"}\n', "a.jsonl:2: column 'answer' is missing"),
        ("a.jsonl", '{"question": "a", "answer": null}\n', "a.jsonl:1: column 'answer' is missing or null"),
        ("a.jsonl", '{"question": "a", "answer": 3}\n', "a.jsonl:1: column 'answer' must be a string, found a int"),
        ("a.jsonl", '{"question": "a"\n', "a.jsonl:1: not valid JSON at column"),
        ("a.jsonl", "3\n", "a.jsonl:1: each line must be an object"),
        ("a.jsonl", '{"foo": "a"}\n', "no known format in the columns foo"),
        ("a.jsonl", '{"messages": []}\n', "must be a list of turns"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}\n', "no assistant turn"),
        ("a.jsonl", '{"messages": [{"role": "bot", "content": "x"}]}\n', "turn 1 has the role 'bot'"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}\n', "turn 1 must be an object"),
        ("a.json", '[{"text": "a"},\n {"text" }]', "a.json:2:"),
        ("a.json", '[{"text": "a"}, 4]', "element 2 must be an object"),
        ("a.csv", "question,answer\na\n", "a.csv:2: has another number of fields"),
        ("a.parquet", "no parquet", "not a Parquet file"),
        ("a.txt", "x", ".txt ending"),
    ],
)
def test_broken_files(tmp_path, tokenizer, name, content, says):
    file = write(tmp_path, name, content)
    with pytest.raises(UserError, match=says) as caught:
        data.load(settings_for(file), tokenizer)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_missing_binary_and_empty_places(tmp_path, tokenizer):
    for path, says in (("none.jsonl", "no such file"), ("./none", "no such file"), (str(tmp_path), "holds no .jsonl")):
        with pytest.raises(UserError, match=says):
            data.load(settings_for(path), tokenizer)
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "\xff\xfe"}\n')
    with pytest.raises(UserError, match="not UTF-8"):
        data.load(settings_for(tmp_path / "b.jsonl"), tokenizer)


def test_long_rows_are_cut_and_rows_without_answer_are_counted(tmp_path, tokenizer):
    long_question = {"question": "why " * 200, "answer": "x"}
    file = write(tmp_path, "a.jsonl", [*QA, long_question])
    train, _ = data.load(settings_for(file, "--max_length", "32"), tokenizer)
    assert len(train) == 2
    assert train.statistics["dropped_no_answer_left"] == 1 and train.statistics["truncated"] == 1
    assert "1 dropped" in data.describe("training", train)
    with pytest.raises(UserError, match="in none of the 1 rows"):
        data.load(settings_for(write(tmp_path, "b.jsonl", [long_question]), "--max_length", "32"), tokenizer)


def test_cache_is_reused_and_a_half_written_one_rebuilt(tmp_path, tokenizer, monkeypatch):
    file = write(tmp_path, "a.jsonl", QA)
    first, _ = data.load(settings_for(file), tokenizer)
    monkeypatch.setattr(data, "_write", lambda *a: pytest.fail("tokenised twice"))
    row = dict(first.dataset[1])
    again, _ = data.load(settings_for(file), tokenizer)
    assert again.fingerprint == first.fingerprint
    monkeypatch.undo()
    (data.cache_folder() / f"{first.fingerprint}.json").unlink()  # as after a kill before the last rename
    (data.cache_folder() / f"{first.fingerprint}.arrow").unlink()
    (data.cache_folder() / f"{first.fingerprint}.arrow").write_bytes(b"half")
    rebuilt, _ = data.load(settings_for(file), tokenizer)
    assert rebuilt.dataset[1] == row
    write(tmp_path, "a.jsonl", QA[:1])
    assert len(data.load(settings_for(file), tokenizer)[0]) == 1


def test_eval_fraction_is_disjoint_and_repeatable(tokenizer):
    flags = ("--eval_fraction", "0.1", "--seed", "3")
    train, held_out = data.load(settings_for(TINY / "train.jsonl", *flags), tokenizer)
    assert (len(train), len(held_out)) == (810, 90)
    again = data.load(settings_for(TINY / "train.jsonl", *flags), tokenizer)[1]
    assert [r["input_ids"] for r in again.dataset] == [r["input_ids"] for r in held_out.dataset]
    questions = {tuple(r["input_ids"]) for r in held_out.dataset}
    assert not questions & {tuple(r["input_ids"]) for r in train.dataset}
    assert train.statistics["tokens"] == sum(len(r["input_ids"]) for r in train.dataset)


def test_sampler_order_ignores_ranks_and_splits():
    sampler = data.EpochSampler(10, 4, seed=1)
    first = list(sampler)
    assert len(sampler) == 12 and sorted(first[:10]) == list(range(10)) and first[10:] == [10, 10]
    assert list(data.EpochSampler(10, 4, seed=1)) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(data.EpochSampler(3, 2, seed=None)) == [0, 1, 2, 3]


def test_best_fit_decreasing_loses_nothing_and_overfills_nothing():
    lengths = torch.randint(1, 65, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    packs = data.best_fit_decreasing(lengths, 64)
    assert sorted(i for pack in packs for i in pack) == list(range(500))
    assert all(sum(lengths[i] for i in pack) <= 64 for pack in packs)
    assert len(packs) <= 1.05 * sum(lengths) / 64 + 1


def test_collator_masks_padding_by_position_not_by_id():
    batch = data.Collator(pad_token_id=1)(
        [{"input_ids": [5, 1], "labels": [-100, 1]}, {"input_ids": [7], "labels": [7]}]
    )
    assert batch["input_ids"].shape == (2, 8)
    assert batch["labels"][0].tolist()[:3] == [-100, 1, -100]  # an end token that is also the pad token is trained
    assert batch["attention_mask"].sum(-1).tolist() == [2, 1]
