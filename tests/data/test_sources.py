"""The data code at its edges: launches at once on one cache, odd paths, TRL's token rows, the same order elsewhere."""

import hashlib
import json
import multiprocessing
import os
import signal
import time

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.data import dataset, encoding, formats, sources
from zerofit.data.batches import EpochSampler
from zerofit.data.chat_templates import built_in
from zerofit.data.load import load_datasets
from zerofit.job import data_entry

FORK = multiprocessing.get_context("fork")


def settings_for(*flags):
    return resolve.resolve_settings("sft", ["--data", *map(str, flags)], 1)


def write(file, content):
    file.write_text(content if isinstance(content, str) else "".join(json.dumps(r) + "\n" for r in content))
    return file


# --- launches at once ---


def hash_of(tokens) -> str:
    rows_ = [(row["input_ids"], row["labels"]) for row in tokens.dataset]
    return hashlib.sha256(repr(rows_).encode()).hexdigest()


def _launch(settings, tokenizer, barrier, answers):
    built, write_table = [], dataset._write

    def counted(*arguments):
        built.append(1)
        return write_table(*arguments)

    dataset._write = counted
    barrier.wait()
    train, _ = load_datasets(settings, tokenizer)
    answers.put((hash_of(train), len(built)))


def launch(settings, tokenizer, count):
    """`count` processes that load the same data at the same time, and the queue of their answers."""
    barrier, answers = FORK.Barrier(count), FORK.Queue()
    processes = [FORK.Process(target=_launch, args=(settings, tokenizer, barrier, answers)) for _ in range(count)]
    for process in processes:
        process.start()
    return processes, answers


@pytest.fixture
def big_set(tmp_path, monkeypatch):
    """Settings for 120 rows with a cache of their own, encoded slowly in chunks of ten."""
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dataset, "CHUNK", 10)
    encode = dataset._encode
    monkeypatch.setattr(dataset, "_encode", lambda chunk, kind: (time.sleep(0.05), encode(chunk, kind))[1])
    file = write(tmp_path / "a.jsonl", [{"question": f"q{i}", "answer": f"a{i}"} for i in range(120)])
    return settings_for(file)


def wanted(big_set, tokenizer) -> str:
    encoder = encoding.Encoder(tokenizer)
    parsed = [
        (p, formats.parse(p, row, "question/answer")) for p, row in sources.read_rows(sources.Source(_path(big_set)))
    ]
    return hashlib.sha256(repr(encoder.encode(parsed)).encode()).hexdigest()


def _path(settings):
    return sources.Path(settings.data[0])


def test_launches_at_once_build_the_table_once(big_set, tokenizer):
    _, answers = launch(big_set, tokenizer, 3)
    found = [answers.get(timeout=60) for _ in range(3)]
    assert {tokens for tokens, _ in found} == {wanted(big_set, tokenizer)}
    assert sorted(built for _, built in found) == [0, 0, 1]


@pytest.mark.fault
def test_a_launch_killed_half_way_leaves_the_others_a_whole_table(big_set, tokenizer):
    processes, answers = launch(big_set, tokenizer, 1)
    deadline = time.time() + 30
    while not any(f.stat().st_size for f in dataset.cache_folder().glob("*.tmp")):
        assert time.time() < deadline and processes[0].is_alive()
        time.sleep(0.01)
    _, answers = launch(big_set, tokenizer, 2)  # they wait for the lock
    time.sleep(0.1)
    assert processes[0].is_alive()
    os.kill(processes[0].pid, signal.SIGKILL)
    processes[0].join()
    found = [answers.get(timeout=60) for _ in range(2)]
    assert {tokens for tokens, _ in found} == {wanted(big_set, tokenizer)}
    assert sorted(built for _, built in found) == [0, 1]


@pytest.mark.fault
@pytest.mark.parametrize("damage", ["none", "truncated", "flipped", "removed", "no facts"])
def test_a_damaged_table_is_built_again_by_one_launch(big_set, tokenizer, damage):
    first, _ = load_datasets(big_set, tokenizer)
    right = hash_of(first)
    table = dataset.cache_folder() / f"{first.fingerprint}.arrow"
    content, times = bytearray(table.read_bytes()), table.stat()
    table.unlink()
    if damage == "flipped":  # same size, same time: only the checksum can tell
        content[len(content) // 2] ^= 1
    if damage == "truncated":
        content = content[: len(content) // 2]
    if damage == "no facts":
        table.with_suffix(".json").unlink()
    if damage != "removed":
        table.write_bytes(content)
        os.utime(table, ns=(times.st_atime_ns, times.st_mtime_ns))
    _, answers = launch(big_set, tokenizer, 3)
    found = [answers.get(timeout=60) for _ in range(3)]
    assert {tokens for tokens, _ in found} == {right}
    assert sum(built for _, built in found) == (damage != "none")


# --- paths ---


@pytest.mark.bad_input
def test_odd_paths_are_one_sentence(tmp_path, tokenizer, record_property):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "gone.jsonl").symlink_to(tmp_path / "nothing.jsonl")
    (tmp_path / "broken").mkdir()
    write(tmp_path / "broken" / "dataset_dict.json", "{")
    (tmp_path / "half").mkdir()
    write(tmp_path / "half" / "dataset_dict.json", '{"splits": ["train"]}')
    wrong = (
        ("~nouser/x.jsonl", "home directory"),
        ("x" * 300 + ".jsonl", "File name too long"),
        (str(tmp_path / ("y" * 300)), "File name too long"),
        (str(tmp_path / "a\0b.jsonl"), "NUL byte"),
        (f"{tmp_path}/*", "is a folder"),
        (f"{tmp_path}/links", "is a broken link to"),
        (f"{tmp_path}/links/*.jsonl", "is a broken link to"),
        (f"{tmp_path}/links/gone.jsonl", "no such file"),
        (f"{tmp_path}/broken", "does not list the splits"),
        (f"{tmp_path}/half", "the folder of the split 'train' is missing"),
    )
    record_property("cases", 2 * len(wrong) + 2)
    for value, says in wrong:
        for flags in (["--data", value], ["--data", str(tmp_path / "a.jsonl"), "--eval_data", value]):
            with pytest.raises(UserError) as caught:
                load_datasets(resolve.resolve_settings("sft", flags, 1), tokenizer)
            assert says in str(caught.value) and "\n" not in str(caught.value), value
    assert len(load_datasets(settings_for(f"{tmp_path}/**/a.jsonl"), tokenizer)[0]) == 1
    with pytest.raises(UserError, match="--chat_template"):
        built_in.choose("{% for m in messages %}" * 50, tokenizer)
    with pytest.raises(UserError, match="--config ~nouser"):
        resolve.resolve_settings("sft", ["--config", "~nouser/a.yaml"], 1)


@pytest.mark.bad_input
@pytest.mark.skipif(os.geteuid() == 0, reason="root reads files of every mode")
def test_files_without_permission(tmp_path, tokenizer):
    (tmp_path / "sub").mkdir()
    file = write(tmp_path / "sub" / "a.jsonl", [{"text": "a"}])
    for locked, named in ((file, file), (file, tmp_path), (tmp_path / "sub", tmp_path), (tmp_path / "sub", file)):
        mode = locked.stat().st_mode
        locked.chmod(0)
        try:
            with pytest.raises(UserError, match="Permission denied"):
                load_datasets(settings_for(named), tokenizer)
        finally:
            locked.chmod(mode)


@pytest.mark.bad_input
def test_a_file_that_fails_while_it_is_read_for_the_fingerprint(tmp_path, tokenizer, monkeypatch):
    file = write(tmp_path / "a.jsonl", [{"text": "a"}])
    real = sources.Path.open

    def refuse(path, *arguments, **named):
        if path == file:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **named)

    monkeypatch.setattr(sources.Path, "open", refuse)
    with pytest.raises(UserError, match=r"a.jsonl: cannot be read: Permission denied\."):
        load_datasets(settings_for(file), tokenizer)


def test_a_saved_dataset_dict_brings_its_splits(tmp_path, tokenizer):
    from datasets import Dataset, DatasetDict

    parts = {"train": 5, "test": 2, "extra": 3}
    made = {n: Dataset.from_list([{"text": f"{n} {i}"} for i in range(k)]) for n, k in parts.items()}
    DatasetDict(made).save_to_disk(tmp_path / "saved")
    train, held_out = load_datasets(settings_for(tmp_path / "saved"), tokenizer)
    assert (len(train), len(held_out)) == (5, 2)
    train, held_out = load_datasets(settings_for(tmp_path / "saved", "--data_split", "extra"), tokenizer)
    assert (len(train), len(held_out)) == (3, 2)
    with pytest.raises(UserError, match="unknown split 'trian'; choose train, test, extra with --data_split"):
        load_datasets(settings_for(tmp_path / "saved", "--data_split", "trian"), tokenizer)
    DatasetDict({"test": made["test"]}).save_to_disk(tmp_path / "only")
    _, held_out = load_datasets(settings_for(tmp_path / "saved", "--eval_data", tmp_path / "only"), tokenizer)
    assert len(held_out) == 2


@pytest.mark.bad_input
def test_names_that_a_local_file_cannot_have_are_refused(tmp_path, tokenizer, monkeypatch):
    """A mistyped --data_split trained on the file all the same."""
    from datasets import Dataset, DatasetDict

    file = write(tmp_path / "a.jsonl", [{"text": "a"}])
    for flag, what in (("--data_split", "splits"), ("--data_config", "configurations")):
        with pytest.raises(UserError, match=rf"{flag} trian: .*a\.jsonl is a local file without {what}; remove"):
            load_datasets(settings_for(file, flag, "trian"), tokenizer)
    made = Dataset.from_list([{"text": f"{i}"} for i in range(3)])
    made.save_to_disk(tmp_path / "one")
    with pytest.raises(UserError, match=r"--data_split trian: .*without splits"):
        load_datasets(settings_for(tmp_path / "one", "--data_split", "trian"), tokenizer)
    DatasetDict({"extra": made}).save_to_disk(tmp_path / "saved")
    named = ["--data", str(tmp_path / "saved"), str(file), "--data_split", "extra"]  # for one of the two
    assert len(load_datasets(resolve.resolve_settings("sft", named, 1), tokenizer)[0]) == 4


@pytest.mark.bad_input
@pytest.mark.parametrize("kind", ["parquet", "saved", "hub", "hub, streamed"])
def test_a_set_with_audio_is_one_sentence_without_the_library_for_it(tmp_path, tokenizer, monkeypatch, kind):
    import datasets

    held = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    columns = {"text": datasets.Value("string"), "picture": held, "audio": held, "n": datasets.Json()}
    media = {"bytes": b"x", "path": None}
    made = datasets.Dataset.from_list(
        [{"text": "a", "picture": media, "audio": None, "n": [1]}, {"text": "b", "picture": None, "audio": media}],
        features=datasets.Features(columns),
    )
    made = made.cast_column("audio", datasets.Audio()).cast_column("picture", datasets.Image())
    found = tmp_path / ("a.parquet" if kind == "parquet" else "saved")
    made.to_parquet(found) if kind == "parquet" else made.save_to_disk(found)
    if kind.startswith("hub"):
        hub = {"train": made.to_iterable_dataset() if "streamed" in kind else made}
        monkeypatch.setattr(sources, "_load_hub", lambda *_: hub)
        assert next(sources.read_rows(sources.Source(None, ("a/b", None, "train"))))[1]["n"] == [1]
        found = "a/b"
        monkeypatch.setattr(dataset, "_fingerprint", lambda *_: "none")
    with pytest.raises(UserError, match=r"row 2: column 'audio' is not empty, but training uses text only"):
        load_datasets(settings_for(found), tokenizer)


@pytest.mark.bad_input
def test_a_real_line_of_100_megabytes(tmp_path, tokenizer):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a"}\n{"text": "' + b"x" * 100_000_000 + b'"}\n')
    with pytest.raises(UserError, match=r"a.jsonl:2: the line is longer than 64 M characters"):
        load_datasets(settings_for(file), tokenizer)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"messages": null}', "column 'messages' is missing or null"),
        ('{"messages": [{"role": null, "content": null}]}', "turn 1 has the role None"),
        ('{"messages": [{"role": "user", "content": [null]}]}', "content other than text"),
        ('{"messages": [{"role": "user", "content": [{"type": "text", "text": null}]}]}', "must be a string"),
        ('{"instruction": "a", "output": "b", "history": [null]}', "must be a list of [instruction, response]"),
        ('{"instruction": "a", "output": "b", "history": [["x", null]]}', "must be a string, found null"),
        ('{"input_ids": [1, null]}', "must be a non-empty list of integers"),
        ('{"input_ids": [[1, 2]]}', "must be a non-empty list of integers"),
        ('{"input_ids": [1, -2]}', "input_ids must be from 0 to"),
        ('{"input_ids": [1, 2], "completion_mask": [1]}', "input_ids has 2 entries, completion_mask 1"),
        ('{"input_ids": [1, 2], "assistant_masks": [0, 1, 1]}', "input_ids has 2 entries, assistant_masks 3"),
        ('{"input_ids": [1, 2], "assistant_masks": [0, 2]}', "'assistant_masks' must be a list of 0 and 1"),
        ('{"input_ids": [1, 2], "completion_mask": "01"}', "'completion_mask' must be a list of 0 and 1"),
    ],
)
def test_nulls_and_masks_that_do_not_fit(tmp_path, tokenizer, line, says):
    with pytest.raises(UserError) as caught:
        load_datasets(settings_for(write(tmp_path / "a.jsonl", line + "\n")), tokenizer)
    assert str(caught.value).startswith(f"{tmp_path}/a.jsonl:1: ") and says in str(caught.value)


# --- TRL's token rows ---


@pytest.mark.parametrize(
    ("columns", "labels"),
    [
        ({"completion_mask": [0, 0, 1, 1]}, [-100, -100, 7, 1]),
        ({"assistant_masks": [0, 1, 0, 1]}, [-100, 6, -100, 1]),
        ({"completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 0, 1]}, [-100, -100, -100, 1]),
        ({"labels": [5, -100, 7, 1], "completion_mask": [0, 1, 1, 1]}, [-100, -100, 7, 1]),
        ({"completion_mask": None, "assistant_masks": None}, [5, 6, 7, 1]),
        ({"completion_mask": [False, True, True, True]}, [-100, 6, 7, 1]),
    ],
)
def test_trl_masks_become_labels(tmp_path, tokenizer, columns, labels):
    """As TRL's collator does: labels (else the ids), without what either mask takes out."""
    file = write(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7, 1], **columns}])
    train, _ = load_datasets(settings_for(file), tokenizer)
    assert train.statistics["format"] == "tokens" and train.dataset[0]["input_ids"] == [5, 6, 7, 1]
    assert train.dataset[0]["labels"] == labels


# --- order ---


def test_shuffle_seed_and_data_seed_are_one():
    for name in ("shuffle_seed", "data_seed"):
        found = settings_for("a.jsonl", f"--{name}", "7")
        assert (found.shuffle_seed, found.data_seed, found.training_values()["data_seed"]) == (7, 7, 7)
        assert found.source["shuffle_seed"] == found.source["data_seed"] == "flag"
    assert settings_for("a.jsonl").data_seed is None
    assert settings_for("a.jsonl", "--shuffle_seed", "7", "--data_seed", "7").data_seed == 7
    with pytest.raises(UserError, match=r"--shuffle_seed 7 \(flag\) and --data_seed 8 \(flag\) name the same argument"):
        settings_for("a.jsonl", "--shuffle_seed", "7", "--data_seed", "8")


def steps(ranks: int, micro: int, effective: int, epoch: int, skip: int = 0) -> list[list[int]]:
    """The row numbers of each optimizer step, as accelerate hands them to the ranks; `skip` steps left out."""
    accumulation, per_rank = effective // micro // ranks, []
    for rank in range(ranks):
        loader = torch.utils.data.DataLoader(
            list(range(101)), batch_size=micro, sampler=EpochSampler(100, effective, seed=3), collate_fn=list
        )
        loader = prepare_data_loader(loader, num_processes=ranks, process_index=rank, dispatch_batches=False)
        loader.set_epoch(epoch)
        per_rank.append(list(skip_first_batches(loader, skip * accumulation) if skip else loader))
    turns = [[row for batch in batches for row in batch] for batches in zip(*per_rank, strict=True)]
    groups = [turns[i : i + accumulation] for i in range(0, len(turns), accumulation)]
    return [[row for turn in group for row in turn] for group in groups]


@pytest.mark.parametrize("epoch", [0, 1])
def test_the_order_and_where_it_resumes_ignore_ranks_and_micro_batch(epoch):
    effective, sampler = 16, EpochSampler(100, 16, seed=3)
    sampler.set_epoch(epoch)
    order = list(sampler)
    whole = [order[i : i + effective] for i in range(0, len(order), effective)]
    assert len(whole) == 7 and sorted(order)[:100] == list(range(100))
    for ranks, micro in ((1, 8), (2, 4), (2, 2), (4, 2)):
        assert steps(ranks, micro, effective, epoch) == whole, (ranks, micro)
        for step in (1, 3, 6):  # the next row is number step * effective
            assert steps(ranks, micro, effective, epoch, step) == whole[step:], (ranks, micro, step)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"question": "a", "answer": "RIGHT", "answer": "WRONG"}\n', "rows.jsonl:1: "),
        (
            '{"question": "a", "answer": "b"}\n{"messages": [{"role": "user", "role": "user", "content": "c"}]}\n',
            "rows.jsonl:2: ",
        ),
        ('[{"question": "a", "question": "b", "answer": "c"}]', "rows.json: "),
    ],
)
def test_a_key_that_stands_twice_is_not_lost(tmp_path, tokenizer, text, place):
    file = tmp_path / place.partition(":")[0]
    file.write_text(text)
    settings = resolve.resolve_settings("sft", ["--data", str(file)], 1)
    with pytest.raises(UserError, match=r"the key '(answer|role|question)' is repeated") as refused:
        load_datasets(settings, tokenizer)
    assert place in str(refused.value)
    entry = json.dumps({"path": str(file)})[:-1] + ', "weight": 1, "weight": 2}'
    with pytest.raises(UserError, match="the key 'weight' is repeated"):
        data_entry.parse(entry)


@pytest.mark.bad_input
def test_a_number_of_many_digits_is_refused_without_pythons_advice(tmp_path, tokenizer):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "a", "answer": ' + "9" * 5000 + "}\n")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: not valid JSON: Exceeds the limit") as refused:
        load_datasets(resolve.resolve_settings("sft", ["--data", str(file)], 1), tokenizer)
    assert "set_int_max_str_digits" not in str(refused.value)
