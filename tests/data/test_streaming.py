"""--streaming: the same samples in the same order for every rank count, micro batch and resume; nothing read twice."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, Run, recipe_process, run_world, runs_slow, two_layers

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.data import conversations, encoding, reading
from zerofit.data import sources as data_sources
from zerofit.data import streaming as data_streaming
from zerofit.job import program
from zerofit.job.data_entry import DataEntry
from zerofit.objective.causal_lm import CausalLM

FLAGS = [
    "--model", two_layers(),
    "--data", str(TINY / "train.jsonl"), "--streaming", "--max_steps", "8", "--max_samples", "40",
    "--effective_batch_size", "8", "--shuffle_buffer_size", "16", "--logging_steps", "1", "--learning_rate", "1e-4",
    "--num_samples", "0", "--lr_scheduler_type", "constant", "--save_strategy", "no",
]  # fmt: skip
IN_ORDER = ["--train_sampling_strategy", "sequential"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("stream")
    micro = "--per_device_train_batch_size"
    # eight steps of eight rows are more than the 40 rows of an epoch: the second epoch starts within a run
    whole = ["--save_strategy", "steps", "--save_steps", "3", "--save_total_limit", "9"]
    one = {
        "one-8": ("sft", [*FLAGS, micro, "8"]),
        "one-worker": ("sft", [*FLAGS, micro, "8", "--dataloader_num_workers", "1"]),
        "in-order": ("sft", [*FLAGS, *IN_ORDER]),
        "from-file": ("sft", [*[f for f in FLAGS if f != "--streaming"], *IN_ORDER]),
        "packed": ("sft", [*FLAGS, "--packing", "--max_length", "64", *whole]),
    }
    more = {"whole": ("lora", [*FLAGS, "--lora_dropout", "0.1", *whole])}
    more["resumed"] = (
        "lora", [*more["whole"][1], "--resume_from_checkpoint", str(folder / "whole" / "checkpoint-3")],
    )  # fmt: skip
    one |= (more if runs_slow(request) else {}) | {
        "packed-resumed": (
            "sft", [*one["packed"][1], "--resume_from_checkpoint", str(folder / "packed" / "checkpoint-6")],
        ),
    }  # fmt: skip
    two = {
        "two-4": ("sft", [*FLAGS, micro, "4"]),
        "two-2": ("sft", [*FLAGS, micro, "2", "--zero", "3"]),
        "two-packed": ("sft", [*FLAGS, "--packing", "--max_length", "64", micro, "2"]),
    }
    return run_world(1, one, folder) | run_world(2, two, folder)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("one-8", "one-worker"),
        ("one-8", "two-4"),
        ("one-8", "two-2"),
        ("packed", "two-packed"),
    ],
)
def test_the_samples_do_not_depend_on_ranks_micro_batch_or_workers(runs, one, other):
    assert len(runs[one].losses) == 8
    torch.testing.assert_close(torch.tensor(runs[other].losses), torch.tensor(runs[one].losses), rtol=1e-4, atol=0)


def test_a_stream_in_order_equals_the_prepared_file(runs):
    losses = runs["in-order"].losses
    assert losses == runs["from-file"].losses
    assert losses != runs["one-8"].losses


@pytest.mark.parametrize(
    ("whole", "rest", "step"),
    [pytest.param("whole", "resumed", 3, marks=pytest.mark.slow), ("packed", "packed-resumed", 6)],
)
def test_resume_goes_on_at_the_next_sample(runs, whole, rest, step):
    assert len(runs[rest].losses) == 8 - step
    assert runs[rest].losses == runs[whole].losses[step:]


def test_every_row_once_an_epoch(tokenizer):
    settings = SimpleNamespace(
        shuffle_buffer_size=100,
        packing=False,
        recipe=program.recipe_of("sft"),
        columns=None,
        data_format="auto",
        max_samples=None,
        objective=CausalLM,
    )
    source = data_sources.Source(TINY / "train.jsonl")
    found = data_streaming.Stream([source], settings, encoding.Encoder(tokenizer), seed=3, effective=8)
    places = [place for place, _, _ in itertools.islice(found, 1800)]
    assert len(set(places[:900])) == len(set(places[900:])) == 900
    assert places[:900] != places[900:]
    assert sorted(places[:100]) == sorted(f"{TINY / 'train.jsonl'}:{n}" for n in range(1, 101))
    found.resume(step=113)
    assert [place for place, _, _ in itertools.islice(found, 100)] == places[904:1004]


def test_sources_advance_side_by_side_and_weights_repeat_rows(tmp_path, tokenizer):
    for name, count in (("long", 300), ("short", 30)):
        lines = [json.dumps({"prompt": f"{i:03}", "completion": name}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources = [
        data_sources.Source(tmp_path / "long.jsonl"),
        data_sources.Source(tmp_path / "short.jsonl", entry=DataEntry("", weight=2)),
    ]
    settings = SimpleNamespace(
        recipe=program.recipe_of("sft"),
        columns=None,
        data_format="auto",
        max_samples=None,
        objective=CausalLM,
    )
    found = data_streaming.Stream(sources, settings, encoding.Encoder(tokenizer), None, 8)
    places = [place for place, _, _ in found.rows()]
    short = [i for i, place in enumerate(places) if "short" in place]
    assert len(places) == 360 and len(short) == 60
    assert all(places.count(places[i]) == 2 for i in short)
    assert short[0] < 15 and abs(short[30] - 180) < 20 and short[-1] > 330  # spread over the epoch
    settings.max_samples = 50
    assert len(list(found.rows())) == 50


def test_a_weight_below_one_takes_other_rows_in_each_epoch_also_after_a_resume(tmp_path, tokenizer):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"text": f"row {i}"}) for i in range(41)))
    settings = SimpleNamespace(
        recipe=program.recipe_of("sft"),
        columns=None,
        data_format="auto",
        max_samples=None,
        shuffle_buffer_size=16,
        packing=False,
        bad_rows="error",
        objective=CausalLM,
    )
    found = data_streaming.Stream(
        [data_sources.Source(file, entry=DataEntry("", weight=0.5))], settings, encoding.Encoder(tokenizer), 3, 4
    )
    places = [place for place, _, _ in itertools.islice(found, 82)]
    assert len(set(places[:41])) == 41 and len(set(places[41:])) == 41
    assert not set(places[:20]) & set(places[20:41])
    found.resume(step=7)
    assert [place for place, _, _ in itertools.islice(found, 54)] == places[28:]


@pytest.mark.parametrize(
    "change",
    [
        ["--train_on", "all"], ["--truncation", "drop"], ["--data_format", "messages"], ["--max_length", "99"],
        ["--columns", "messages=turns"], "template", "tokenizer",
    ],
    ids=str,
)  # fmt: skip
def test_what_the_tokens_depend_on_changes_the_fingerprint(tokenizer, change):
    source = [data_sources.Source(TINY / "train.jsonl")]

    def fingerprint(*flags):
        return data_streaming._fingerprint(source, resolve.resolve_settings("sft", [*FLAGS, *flags], 1), tokenizer)

    before = fingerprint()
    assert before == fingerprint("--learning_rate", "1")
    if change == "template":
        tokenizer.chat_template += " "
    elif change == "tokenizer":
        tokenizer.add_tokens(["<new>"])
    assert fingerprint(*(change if isinstance(change, list) else ())) != before


def test_hub_sets_are_not_downloaded(monkeypatch, tokenizer):
    import datasets

    asked = []

    def load_dataset(name, config, streaming):
        asked.append(streaming)
        made = datasets.Dataset.from_dict({"prompt": ["a", "b"], "completion": ["c", "d"]})
        return datasets.IterableDatasetDict(train=made.to_iterable_dataset(), test=made.to_iterable_dataset())

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(data_sources, "check_reachable", lambda name: None)
    train, held_out = data_sources.find_files(["someone/something"], None, "train", streaming=True)
    settings = SimpleNamespace(
        recipe=program.recipe_of("sft"),
        columns=None,
        data_format="auto",
        max_samples=None,
        objective=CausalLM,
    )
    found = list(data_streaming.Stream(train, settings, encoding.Encoder(tokenizer), None, 8).rows())
    assert len(found) == 2 and found[1][0] == "someone/something (train): row 2"
    assert asked == [True, True] and held_out[0].hub[2] == "test" and not held_out[0].streaming


def test_rows_without_an_answer_keep_their_place(tokenizer, capsys):
    settings = SimpleNamespace(
        recipe=program.recipe_of("sft"),
        packing=False,
        max_length=16,
        truncation="truncate_right",
        columns=None,
        objective=CausalLM,
    )
    batches = []
    found = data_streaming.Stream([], settings, encoding.Encoder(tokenizer), None, 8)
    collate = data_streaming.TokenizingCollator(found, batches.append)
    lines = [json.dumps({"prompt": "word " * n, "completion": "yes"}) for n in (1, 90, 1)]
    collate([(f"x.jsonl:{i + 1}", line, reading.RowFormat("prompt/completion")) for i, line in enumerate(lines)])
    lengths = [sum(t != conversations.IGNORE for t in row["labels"]) for row in batches[0]]
    assert lengths[0] == lengths[2] > 0 == lengths[1]
    assert "x.jsonl:2: dropped, no answer within --max_length" in capsys.readouterr().out


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max_steps", "-1"], "--streaming needs --max_steps"),
        (["--eval_fraction", "0.1"], "--streaming with --eval_fraction"),
        (["--max_duplicate_fraction", "0.1"], "--streaming with --max_duplicate_fraction"),
        (["--train_sampling_strategy", "group_by_length"], "group_by_length: .*use random or sequential"),
        (["--dataloader_num_workers", "2"], "--dataloader_num_workers 2: use at most 1"),
    ],
)
def test_what_needs_all_rows_is_refused(flags, says):
    with pytest.raises(UserError, match=says):
        resolve.resolve_settings("sft", [*FLAGS, *flags], 1)


@pytest.mark.bad_input
@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_a_broken_row_met_while_training_is_one_sentence(tmp_path, workers):
    file = tmp_path / "rows.jsonl"
    lines = (TINY / "train.jsonl").read_text().splitlines()[:600]
    file.write_text("\n".join([*lines, "{broken"]))
    flags = [*FLAGS, "--model", "tiny", "--data", str(file), "--max_samples", "900", "--max_steps", "90",
             "--shuffle_buffer_size", "400",
             "--effective_batch_size", "30", "--per_device_train_batch_size", "30",
             "--dataloader_num_workers", workers, "--output_dir", str(tmp_path / "run")]  # fmt: skip
    done = recipe_process("sft", *flags)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("zerofit:")]
    assert line.startswith(f"zerofit: error: {file}:601: not valid JSON")
    assert "Traceback" not in done.stderr
    assert Run(tmp_path / "run").json("result.json")["status"] == "failed"
    facts = Run(tmp_path / "run").json("run.json")["data"]["training"]
    assert facts["streaming"] and facts["rows"] == data_streaming.PREVIEW


@pytest.mark.bad_input
def test_bad_rows_of_a_stream_keep_their_place_and_train_on_nothing(tmp_path, tokenizer):
    settings = SimpleNamespace(
        recipe=program.recipe_of("sft"),
        packing=False,
        max_length=64,
        truncation="truncate_right",
        columns=None,
        data_format="auto",
        bad_rows="drop",
        objective=CausalLM,
    )
    found = data_streaming.Stream([], settings, encoding.Encoder(tokenizer), None, 8)
    raw = [
        ("a:1", '{"text": "a"}', reading.RowFormat("text")),
        ("a:2", '{"text": 3}', reading.RowFormat("text")),
        ("a:3", '{"text": "b"}', reading.RowFormat("text")),
    ]
    assert [row is None for row in found.encode(raw)] == [False, True, False]
    settings.bad_rows = "error"
    with pytest.raises(UserError, match="a:2: column 'text' must be a string"):
        found.encode(raw)
