"""Several data sets in one YAML file, each with its configuration, split, revision, weight and columns."""

import json
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import yaml

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.data import dataset, inspection, sources
from zerofit.data.batches import DatasetWithFiller, Share, lengths_of, rows_of_epoch, training_sampler
from zerofit.data.load import load_datasets
from zerofit.data.tokens import number_of_steps


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def settings_for(folder, entries, *flags):
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump({"data": entries}, sort_keys=False))
    return resolve.resolve_settings("sft", ["--config", str(config), *flags], 1)


@pytest.fixture
def mixture(tmp_path):
    """A plain file, a file with columns and a weight, and a split of a saved set with a weight."""
    from datasets import Dataset, DatasetDict

    splits = {name: Dataset.from_list([{"text": f"{name} {i}"} for i in range(n)]) for name, n in PARTS.items()}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    return [
        write(tmp_path / "plain.jsonl", [{"question": f"plain {i}", "answer": "a"} for i in range(7)]),
        {
            "path": write(tmp_path / "named.jsonl", [{"a": f"named {i}", "b": "long answer " * 4} for i in range(20)]),
            "weight": 0.5,
            "columns": {"prompt": "a", "completion": "b"},
        },
        {"path": str(tmp_path / "saved"), "split": "extra", "weight": 0.5},
    ]


PARTS = {"train": 3, "extra": 10}


def texts_of(rows, tokenizer):
    return [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows]


def source_of(text):
    return next(name for name in ("plain", "named", "extra", "train") if name in text)


def test_each_set_has_its_own_columns_split_and_share_of_an_epoch(tmp_path, tokenizer, mixture):
    settings = settings_for(tmp_path, mixture)
    assert [json.loads(entry) if entry.startswith("{") else entry for entry in settings.data] == [
        mixture[0], mixture[1] | {"weight": "0.5"}, mixture[2] | {"weight": "0.5"},
    ]  # fmt: skip
    train, held_out = load_datasets(settings, tokenizer)
    assert held_out is None
    counts = Counter(map(source_of, texts_of(train.dataset, tokenizer)))
    assert counts == {"plain": 7, "named": 10, "extra": 5}
    lengths = Counter()
    for row, text in zip(train.dataset, texts_of(train.dataset, tokenizer), strict=True):
        lengths[source_of(text)] += len(row["input_ids"])
    assert train.statistics["sets"] == [
        {"data": mixture[0], "weight": 1.0, "rows": 7, "tokens": lengths["plain"]},
        {"data": mixture[1]["path"], "weight": 0.5, "rows": 10, "tokens": lengths["named"]},
        {"data": mixture[2]["path"], "weight": 0.5, "rows": 5, "tokens": lengths["extra"]},
    ]
    assert train.statistics["tokens_an_epoch"] == sum(lengths.values())


def steps_of(train, sequences, ranks, epochs):
    """Return the rows of each optimizer step of 4 rows, as so many ranks see them."""
    arguments = SimpleNamespace(
        train_sampling_strategy="random", per_device_train_batch_size=4 // ranks, gradient_accumulation_steps=1, seed=3,
        data_seed=None,
    )  # fmt: skip
    sampler = training_sampler(DatasetWithFiller(sequences, 0), arguments, train.weights, ranks)
    steps = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        order = list(sampler)
        shares = [[order[i] for i in range(rank, len(order), ranks)] for rank in range(ranks)]
        size = 4 // ranks
        steps += [
            sorted(row for share in shares for row in share[step * size : step * size + size])
            for step in range(len(order) // 4)
        ]
    return steps


def test_each_epoch_draws_the_same_share_of_every_set_at_any_number_of_ranks(tmp_path, tokenizer, mixture):
    settings = settings_for(tmp_path, mixture)
    train, _ = load_datasets(settings, tokenizer)
    sequences = train.sequences(settings)
    texts = [*texts_of(sequences, tokenizer), "filler"]
    one = steps_of(train, sequences, 1, range(4))
    assert one == steps_of(train, sequences, 2, range(4)) == steps_of(train, sequences, 4, range(4))
    an_epoch = len(one) // 4
    assert steps_of(train, sequences, 2, (2, 3)) == one[2 * an_epoch :]  # a resumed run begins with any epoch
    for epoch in range(4):
        rows = [texts[row] for step in one[epoch * an_epoch : (epoch + 1) * an_epoch] for row in step]
        counts = Counter(source_of(text) for text in rows if text != "filler")
        assert counts == {"plain": 7, "named": 10, "extra": 5}
    twice = Counter(texts[row] for step in one[: 2 * an_epoch] for row in step if texts[row] != "filler")
    assert {source_of(text): count for text, count in twice.items()} == {"plain": 2, "named": 1, "extra": 1}
    assert len(twice) == 7 + 20 + 10


def test_sets_of_equal_weight_are_drawn_apart():
    shares = [Share(0.5, 0)] * 10 + [Share(0.5, 1)] * 30
    for epoch in range(5):
        rows = rows_of_epoch(shares, epoch)
        assert sum(row < 10 for row in rows) == 5 and len(rows) == 20


def test_the_steps_of_packed_sets_count_the_tokens_of_an_epoch(tmp_path, tokenizer):
    """Long rows at a weight of 4: the mean of all rows, once each, would say a third of the steps."""
    short = write(tmp_path / "short.jsonl", [{"text": "a"}] * 40)
    long = write(tmp_path / "long.jsonl", [{"text": "word " * 60}] * 10)
    settings = settings_for(tmp_path, [short, {"path": long, "weight": 4}], "--packing", "--max_length", "128")
    train, _ = load_datasets(settings, tokenizer)
    tokens = int(lengths_of(train.dataset).sum())
    rows = SimpleNamespace(max_steps=-1, packing=True, max_length=128, num_train_epochs=1, effective_batch_size=1)
    assert number_of_steps(rows, train) == -(-tokens // 128)
    once = train.statistics["tokens"] / train.statistics["kept"] * len(train) / 128
    assert number_of_steps(rows, train) > 1.5 * once


def test_what_a_set_is_read_with_is_part_of_the_fingerprint(tmp_path, tokenizer, mixture, monkeypatch):
    train, _ = load_datasets(settings_for(tmp_path, mixture), tokenizer)
    monkeypatch.setattr(dataset, "_write", lambda *_: pytest.fail("tokenized again"))
    again, _ = load_datasets(settings_for(tmp_path, mixture), tokenizer)
    assert again.fingerprint == train.fingerprint and again.statistics["sets"] == train.statistics["sets"]
    monkeypatch.undo()
    for i, change in (
        (1, {"weight": 0.25}),
        (1, {"columns": {"prompt": "b", "completion": "a"}}),
        (2, {"split": "train"}),
    ):
        other = [*mixture[:i], mixture[i] | change, *mixture[i + 1 :]]
        assert load_datasets(settings_for(tmp_path, other), tokenizer)[0].fingerprint != train.fingerprint


def test_a_hub_set_is_loaded_with_its_own_configuration_split_and_revision(tmp_path, tokenizer, monkeypatch):
    import datasets

    folder = tmp_path / "hub"
    folder.mkdir()
    for split in ("train", "train_no_think"):
        write(folder / f"{split}.jsonl", [{"text": f"{split} {i}"} for i in range(3)])
    real, builder, asked = datasets.load_dataset, datasets.load_dataset_builder, []
    files = {split: str(folder / f"{split}.jsonl") for split in ("train", "train_no_think")}

    def load(name, config=None, streaming=False, revision="newest"):
        asked.append((name, config, revision))
        return real("json", data_files=files, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: builder("json", data_files=files))
    monkeypatch.setattr(sources, "check_reachable", lambda asker: None)
    entries = [{"path": "a/b", "config": "SFT", "split": "train_no_think", "revision": "0123"}, "c/d"]
    train, _ = load_datasets(settings_for(tmp_path, entries, "--data_config", "other"), tokenizer)
    assert set(asked) == {("a/b", "SFT", "0123"), ("c/d", "other", "newest")}
    assert [text.split()[0] for text in texts_of(train.dataset, tokenizer)] == ["train_no_think"] * 3 + ["train"] * 3
    entries[0]["revision"] = "4567"
    other, _ = load_datasets(settings_for(tmp_path, entries, "--data_config", "other"), tokenizer)
    assert other.fingerprint != train.fingerprint


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"name": "a.jsonl"}, "unknown key 'name'; known: path, config, split, revision, weight, columns"),
        ({"weight": 2}, "path is missing"),
        ({"path": "FILE", "weight": 0}, "the weight must be a positive number"),
        ({"path": "FILE", "weight": "much"}, "the weight must be a positive number"),
        ({"path": "FILE", "weight": "nan"}, "the weight must be a positive number"),
        ({"path": ["FILE"]}, "path must be a string"),
        ({"path": "FILE", "split": "extra"}, "is local data without a split; remove"),
        ({"path": "FILE", "config": "en"}, "is local data without a config; remove"),
        ({"path": "FILE", "revision": "main"}, "is local data without a revision; remove"),
        ({"path": "FILE", "columns": ["messages"]}, "columns must map zerofit's names"),
        ({"path": "FILE", "columns": {"prompt": "nothing"}}, "--columns maps 'nothing'"),
        ({"path": "gone.jsonl"}, "no such file or folder"),
    ],
)
def test_mistakes_in_an_entry_are_one_sentence(tmp_path, tokenizer, entry, says):
    file = write(tmp_path / "a.jsonl", [{"text": "a"}])
    entry = json.loads(json.dumps(entry).replace("FILE", file))
    with pytest.raises(UserError) as refused:
        load_datasets(settings_for(tmp_path, [entry]), tokenizer)
    assert says in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(UserError, match="not a valid JSON object"):
        sources.find_files(['{"path": '], None, "train")


def test_make_data_shows_the_rows_and_tokens_of_each_set(tmp_path, tokenizer, mixture):
    settings = settings_for(tmp_path, mixture)
    train, _ = load_datasets(settings, tokenizer)
    ends = SimpleNamespace(words=[], ids=[], sentences=[])
    facts = inspection.inspect(settings, train, None, tokenizer, ends)
    shown = inspection.describe(settings, facts).splitlines()
    (start,) = (i for i, line in enumerate(shown) if line.startswith("per epoch, training"))
    sets = train.statistics["sets"]
    tokens = sum(entry["tokens"] for entry in sets)
    for line, entry, rows in zip(shown[start + 1 : start + 4], sets, (7, 10, 5), strict=True):
        wanted = f"{entry['weight']:g} {rows} ({rows / 22:.1%}) {entry['tokens']} ({entry['tokens'] / tokens:.1%})"
        assert re.sub(r"\(\s+", "(", line).split()[-5:] == wanted.split() and entry["data"][:30] in line
    assert facts["training"]["sets"] == sets
