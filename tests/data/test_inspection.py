"""`zerofit data`: every number on rows made by hand, the loss span as shown, and the limits that stop a launch."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, TINY, python, recipe_process
from datasets import Dataset

from zerofit import cli
from zerofit.base.errors import UserError
from zerofit.certificate import data as checks
from zerofit.commands import data as data_command
from zerofit.config import resolve
from zerofit.data import conversations, encoding, formats, inspection
from zerofit.data.load import load_datasets
from zerofit.model.load import load_tokenizer

IGNORE = conversations.IGNORE


def rows_file(folder, name, pairs):
    file = folder / name
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in pairs))
    return file


def settings_for(*flags):
    return resolve.resolve_settings("sft", [str(f) for f in flags], 1)


def loaded(*flags):
    settings = settings_for(*flags)
    tokenizer = load_tokenizer(settings)
    return settings, *load_datasets(settings, tokenizer), tokenizer


def hand_made(rows):
    return Dataset.from_dict({"input_ids": [r[0] for r in rows], "labels": [r[1] for r in rows]})


@pytest.fixture
def zerofit(monkeypatch, capsys):
    """`zerofit words` in this process: (exit code, stdout, stderr)."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["zerofit", *map(str, words)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return call


# --- counting ---


def test_scan_counts_lengths_loss_and_last_token(tokenizer):
    end = tokenizer.eos_token_id
    rows = [
        ([5, 6, 7, end], [IGNORE, IGNORE, 7, end]),
        ([5, 6, 7, end, 9], [IGNORE, 6, 7, IGNORE, IGNORE]),
        ([5, 6, end], [5, 6, end]),  # the first label never counts
        ([5, 6], [5, IGNORE]),
        ([5, 6, 7, end], [IGNORE, IGNORE, 7, end]),
    ]
    found = inspection.scan(hand_made(rows), tokenizer)
    assert found.lengths.tolist() == [4, 5, 3, 2, 4]
    assert found.supervised.tolist() == [2, 2, 2, 0, 2]
    assert found.last.tolist() == [end, 7, end, -1, end]
    assert inspection.repeats(found.exact) == 1


def test_scan_of_many_batches_and_of_a_selection(tokenizer):
    rows = [([1 + i % 50] * (2 + i % 7), [IGNORE] + [1 + i % 50] * (1 + i % 7)) for i in range(2500)]
    order = list(range(2499, -1, -2))
    found = inspection.scan(hand_made(rows).select(order), tokenizer)
    assert found.lengths.tolist() == [len(rows[i][0]) for i in order]
    assert (found.supervised == found.lengths - 1).all()
    assert found.last.tolist() == [rows[i][1][-1] for i in order]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Who is  Ada?", "who is ada", True),
        ("a,b\n\tc", "A b -- c!", True),
        ("«¿Qué?»", "qué", True),
        ("1.5", "15", False),
        ("STRASSE", "straße", False),
        ("Ada", "Bo", False),
    ],
)
def test_normalized(one, other, same):
    assert (inspection.normalize(one) == inspection.normalize(other)) is same


def test_duplicates_and_overlap(tmp_path):
    train = [("Who?", "Bo."), ("Who?", "Bo."), ("who", "bo"), ("Where?", "Oslo."), ("When?", "Now.")]
    held_out = [("Who?", "Bo."), ("WHERE!", "oslo"), ("Why?", "So."), ("Who?", "Ada.")]
    flags = ["--data", rows_file(tmp_path, "a.jsonl", train), "--eval_data", rows_file(tmp_path, "b.jsonl", held_out)]
    settings, train_set, eval_set, tokenizer = loaded(*flags, "--model", TINY / "model")
    facts = inspection.inspect(
        settings, train_set, eval_set, tokenizer, checks.note(settings, train_set, eval_set, tokenizer)
    )
    assert (facts["training"]["repeated_exact"], facts["training"]["repeated_normalized"]) == (1, 2)
    assert (facts["evaluation"]["repeated_exact"], facts["evaluation"]["repeated_normalized"]) == (0, 0)
    assert facts["overlap"] == {"exact": 1, "normalized": 2}
    assert facts["fractions"]["max_duplicate_fraction"] == 2 / 5
    assert facts["fractions"]["max_eval_overlap_fraction"] == 2 / 4
    assert any("2 of 4 eval rows are also training rows" in w for w in facts["warnings"])


def test_rows_repeated_by_weight_are_named_and_are_no_duplicates(tmp_path, zerofit):
    one = rows_file(tmp_path, "one.jsonl", [("Who?", "Bo."), ("who", "bo"), ("Where?", "Oslo."), ("When?", "Now.")])
    half = rows_file(tmp_path, "half.jsonl", [(f"What {i}?", "x") for i in range(4)])
    flags = ["--data", f"{one}:3", f"{half}:0.5", "--model", TINY / "model", "--max_duplicate_fraction"]
    done = zerofit("data", *flags, "0.2", "--output_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "out" / "data.json").read_text())
    train = facts["training"]
    assert (train["rows"], train["kept"]) == (8, 14)
    assert (train["repeated_by_weight"], train["left_out_by_weight"]) == (8, 2)
    assert (train["repeated_exact"], train["repeated_normalized"]) == (0, 1)
    assert facts["fractions"]["max_duplicate_fraction"] == 1 / 6
    assert "repeated by weight" in done.stdout and "in the other set" not in done.stdout and " -8" not in done.stdout
    settings, train_set, eval_set, tokenizer = loaded(*flags, "0.1")
    with pytest.raises(UserError, match=r"16.7% of the training rows are duplicates"):
        checks.check_data(settings, train_set, eval_set, tokenizer)


@pytest.mark.parametrize("more", [[], ["--streaming", "--max_steps", 2]])
def test_rows_longer_than_the_model_was_made_for_are_said(tmp_path, more, capfd):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": "many words " * 500}) + "\n")
    flags = ["--data", file, "--model", TINY / "model", *more]
    settings, train_set, eval_set, tokenizer = loaded(*flags)
    checks.check_data(settings, train_set, eval_set, tokenizer)
    longest = len(train_set.dataset[0]["input_ids"])
    wanted = f"rows have up to {longest:,} tokens, but the model supports 1,024 (max_position_embeddings): "
    wanted += "use --max_length 1024"
    assert longest > 1024 and settings.decisions[-1] == wanted
    assert "indexing errors" not in "".join(capfd.readouterr())
    settings, *sets_and_tokenizer = loaded(*flags, "--max_length", 1024)
    checks.check_data(settings, *sets_and_tokenizer)
    assert "made for" not in "".join(settings.decisions)


def test_histogram_numbers():
    assert inspection.histogram(np.array([3, 4, 4, 9]), 12) == [
        (3, 3, 1), (4, 4, 2), (5, 5, 0), (6, 6, 0), (7, 7, 0), (8, 8, 0), (9, 9, 1),
    ]  # fmt: skip
    assert inspection.histogram(np.array([7, 7, 7])) == [(7, 7, 3)]
    assert inspection.histogram(np.array([0, 99, 100]), 2) == [(0, 99, 2), (100, 199, 1)]
    values = np.random.default_rng(0).integers(1, 30_000, 5000)
    bars = inspection.histogram(values)
    assert len(bars) <= 12 and sum(n for *_, n in bars) == 5000
    for low, high, n in bars:
        assert n == ((values >= low) & (values <= high)).sum()


def test_bars():
    assert inspection.bar(1, 4) == "████" and inspection.bar(0.5, 4) == "██" and inspection.bar(0, 4) == ""
    assert inspection.bar(1e-9, 4) == "▏" and inspection.bar(5 / 32, 4) == "▋"


def test_packing_and_padding_numbers():
    settings = SimpleNamespace(
        max_length=16, seed=1, data_seed=None, train_sampling_strategy="random", per_device_train_batch_size=2
    )
    found = inspection.packing(np.array([16, 10, 6]), settings)
    assert (found["packs"], found["efficiency"]) == (2, 1.0)
    # 16 in any batch makes it 16 wide; the row that is alone is 16, or 10 -> 16, or 6 -> 8 wide (multiples of 8)
    assert 1 - found["unpacked_padding_fraction"] in (32 / 48, 32 / 40)
    assert inspection.packing(np.array([8] * 6), settings)["unpacked_padding_fraction"] == 0


# --- the loss span ---


def encode(tokenizer, turns):
    return encoding.Encoder(tokenizer).encode([("here", formats.parse("here", {"messages": turns}, "messages"))])[0]


def test_brackets_stand_exactly_around_the_answers(tokenizer):
    turns = [
        {"role": "user", "content": "One? é 🙂"},
        {"role": "assistant", "content": "First:\nünï 🙂"},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Second."},
    ]
    ids, labels = encode(tokenizer, turns)
    shown = inspection.render(ids, labels, tokenizer, colored=False)
    assert shown.replace("«", "").replace("»", "") == tokenizer.decode(ids)
    assert [part.split("»")[0] for part in shown.split("«")[1:]] == ["First:\nünï 🙂<|end|>", "Second.<|end|>"]
    green = inspection.render(ids, labels, tokenizer, colored=True)
    assert "\033[32mFirst:\033[0m\n\033[32münï 🙂<|end|>\033[0m" in green and "«" not in green
    assert green.replace("\033[32m", "").replace("\033[0m", "") == tokenizer.decode(ids)


def test_long_and_hostile_text_is_tamed(tokenizer):
    ask = {"role": "user", "content": "x" * 5000 + "\033[2J"}
    ids, labels = encode(tokenizer, [ask, {"role": "assistant", "content": "Yes"}])
    shown = inspection.render(ids, labels, tokenizer, colored=False)
    assert len(shown) < 1000 and "\033" not in shown and "\\x1b[2J" in shown and "«Yes<|end|>»" in shown


def test_plain_text_shows_why_its_first_token_stands_outside(tokenizer):
    rows = hand_made([([5, 6, 7], [5, 6, 7])] * 3)
    assert (
        sum("first token of a row is never in the loss" in t for t in inspection.render_rows(rows, tokenizer, False))
        == 1
    )
    answers = hand_made([([5, 6, 7], [IGNORE, 6, 7])] * 3)
    assert not any("first token" in text for text in inspection.render_rows(answers, tokenizer, False))


@pytest.mark.injection
def test_what_comes_from_the_data_cannot_steer_the_terminal(tmp_path, zerofit):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "aa", "\\u001b[2J": 1}\n{"text": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}\n')
    done = zerofit("data", "--data", file, "--model", TINY / "model", "--output_dir", tmp_path / "out")
    assert done.returncode == 0 and "columns not used: \\x1b[2J" in done.stdout and "\033" not in done.stdout
    bars = done.stdout.split("tokens per row, training")[1].split("packed")[0]
    assert "  0\n" not in bars  # empty bins are left out


# --- the end token ---


def test_rows_without_a_supervised_end_are_shouted_about(tmp_path, zerofit):
    file = rows_file(tmp_path, "a.jsonl", [("Who?", "Bo."), ("Who?", "word " * 40), ("Where?", "Oslo.")])
    settings, train_set, eval_set, tokenizer = loaded("--data", file, "--model", TINY / "model", "--max_length", 24)
    facts = inspection.inspect(
        settings, train_set, eval_set, tokenizer, checks.note(settings, train_set, eval_set, tokenizer)
    )
    assert (facts["training"]["end_supervised"], facts["training"]["truncated"]) == (2, 1)
    assert len(facts["warnings"]) == 1 and facts["warnings"][0].startswith("1 of 3 training rows do not end")
    done = zerofit(
        "data", "--data", file, "--model", TINY / "model", "--max_length", "24", "--output_dir", tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING: 1 of 3 training rows do not end with a supervised end token '<|end|>'" in done.stdout


# --- limits ---

DUPLICATES = [("Who?", "Bo."), ("who", "bo"), ("Where?", "Oslo."), ("When?", "word " * 40)]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("flag", "good", "bad", "says"),
    [
        ("min_supervised_fraction", 0.1, 0.99, "of the training tokens are in the loss"),
        ("max_truncated_fraction", 0.25, 0.24, "25% of the training rows are longer than --max_length"),
        ("max_duplicate_fraction", 0.25, 0.2, "25% of the training rows are duplicates"),
        ("max_eval_overlap_fraction", 0.5, 0, "50% of the eval rows are also training rows"),
    ],
)
def test_limits(tmp_path, flag, good, bad, says):
    flags = ["--model", TINY / "model", "--max_length", 24, "--data", rows_file(tmp_path, "a.jsonl", DUPLICATES)]
    flags += ["--eval_data", rows_file(tmp_path, "b.jsonl", [("WHO", "Bo"), ("Why?", "So.")])]
    settings, *rest = loaded(*flags, f"--{flag}", good)
    checks.check_data(settings, *rest)
    with pytest.raises(UserError, match=f"--{flag} {bad:g}: .*{says}") as caught:
        checks.check_data(settings_for(*flags, f"--{flag}", bad), *rest)
    assert "\n" not in str(caught.value)


@pytest.mark.injection
def test_evaluation_on_training_rows_is_said_by_default(tmp_path):
    """A file with repeats and --eval_fraction, or one file for both: eval_loss measured memory, and no line said so."""
    rows = [(f"Who is {i}?", f"No. {i}.") for i in range(10)]
    data, repeats = rows_file(tmp_path, "a.jsonl", rows), rows_file(tmp_path, "twice.jsonl", rows * 2)
    some = rows_file(tmp_path, "b.jsonl", [*rows[:1], ("Why?", "So."), ("When?", "Now."), ("How?", "So.")])
    for more, share in (
        (["--data", data, "--eval_data", data], "10 of 10 eval rows (100.0%)"),
        (["--data", data, "--eval_data", some], "1 of 4 eval rows (25.0%)"),
        (["--data", repeats, "--eval_fraction", "0.3"], "eval rows ("),
        (["--data", json.dumps({"path": str(data), "weight": 0.5}), "--eval_data", data], "10 of 10 eval rows"),
        (["--data", data, "--eval_fraction", "0.3"], None),
    ):
        settings, *rest = loaded("--model", TINY / "model", *more)
        checks.check_data(settings, *rest)
        said = [line for line in settings.decisions if "are also training rows" in line]
        assert bool(said) == bool(share) and (not share or share in said[0]), (more, said)


def test_the_costly_limits_are_off_by_default_and_the_idle_one_says_so(monkeypatch):
    settings, train_set, _, tokenizer = loaded("--data", TINY / "train.jsonl", "--model", TINY / "model")
    with monkeypatch.context() as patched:
        patched.setattr(inspection, "scan", None)  # a call would fail
        checks.check_data(settings, train_set, None, tokenizer)
    settings = settings.replace(max_eval_overlap_fraction=0.0)
    checks.check_data(settings, train_set, None, tokenizer)
    assert settings.decisions[-1] == "max_eval_overlap_fraction is not checked without eval rows"


@pytest.mark.bad_input
def test_a_limit_stops_recipe_and_launch_before_a_folder_is_made(tmp_path, zerofit):
    flags = ["--data", str(TINY / "train.jsonl"), "--model", str(TINY / "model"), "--min_supervised_fraction", "0.5"]
    out = tmp_path / "run"
    direct = recipe_process("sft", *flags, "--output_dir", str(out))
    launched = zerofit("launch", ROOT / "recipes" / "lora.py", *flags, "--output_dir", out)
    for done in (direct, launched):
        assert done.returncode == 2, done.stdout + done.stderr
        assert "--min_supervised_fraction 0.5: 27.8% of the training tokens are in the loss" in done.stderr
    assert not out.exists()


# --- the verb ---


def test_the_report_of_the_bundled_task(tmp_path, zerofit):
    done = zerofit("data", "--output_dir", tmp_path / "out", "--args", "--max_samples 100 --max_length 64")
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "out" / "data.json").read_text())
    train, lengths = facts["training"], facts["training"]["length"]
    assert (train["rows"], train["kept"], facts["evaluation"]["kept"], facts["max_length"]) == (100, 100, 200, 64)
    assert train["format"] == "messages" and train["end_supervised"] == 100 and facts["warnings"] == []
    assert lengths["min"] <= lengths["median"] <= lengths["p95"] <= lengths["max"] <= 64
    assert sum(n for *_, n in train["histogram"]) == 100
    assert facts["packing"]["efficiency"] == train["tokens"] / (facts["packing"]["packs"] * 64)
    assert train["supervised_mean"] * 100 == pytest.approx(train["supervised_tokens"])
    assert "«Hana has a parrot.<|end|>»" in done.stdout and "\033" not in done.stdout
    assert "█" in done.stdout and "WARNING" not in done.stdout
    assert not (tmp_path / "out" / "run.json").exists()


def test_force_color_and_an_eval_fraction(tmp_path, zerofit, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    flags = ["--data", TINY / "train.jsonl", "--model", TINY / "model", "--eval_fraction", "0.1"]
    done = zerofit("data", *flags, "--output_dir", tmp_path / "out", "--recipe", "lora")
    assert done.returncode == 0, done.stderr
    assert "\033[32m" in done.stdout and "«" not in done.stdout
    facts = json.loads((tmp_path / "out" / "data.json").read_text())
    assert (facts["training"]["kept"], facts["evaluation"]["kept"], facts["recipe"]) == (810, 90, "lora")


@pytest.mark.bad_input
def test_a_limit_ends_the_verb_with_2_after_the_report(tmp_path, zerofit):
    file = rows_file(tmp_path, "a.jsonl", DUPLICATES)
    out = tmp_path / "out"
    flags = ["--data", file, "--model", TINY / "model", "--max_duplicate_fraction", "0"]
    done = zerofit("data", *flags, "--output_dir", out)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("zerofit: error: --max_duplicate_fraction 0: 25% of the")
    assert "repeated rows, normalized" in done.stdout and (out / "data.json").exists()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--recipe", "kto"], "kto: no such recipe; use dpo, lora, pipeline, sft"),
        (["--data", "nowhere.jsonl", "--model", str(TINY / "model")], "nowhere.jsonl"),
        (["--max_lenght", "8"], "did you mean --max_length"),
        (["--args", "'open"], "cannot be split into words"),
        (["--output_dir", __file__], "is a file; use a folder"),
        (["--max_truncated_fraction", "2"], "it must be from 0 to 1"),
    ],
)
def test_mistakes_are_one_sentence(words, says, zerofit):
    done = zerofit("data", *words)
    assert done.returncode == 2 and says in done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("zerofit: error: ")


@pytest.mark.bad_input
def test_bad_rows_are_all_counted_before_the_end(tmp_path, zerofit):
    file = rows_file(tmp_path, "a.jsonl", [("Who?", "Bo."), ("Who?", 3), ("Who?", "Ann."), ("Who?", None)])
    flags = ["data", "--data", file, "--model", TINY / "model", "--output_dir"]
    done = zerofit(*flags, tmp_path / "out")
    assert done.returncode == 2 and "2 of 4 training rows are invalid (see above)" in done.stderr
    assert f"1 row unusable: column 'answer' must be a string, found a number (first: {file}:2)" in done.stdout
    assert f"(first: {file}:4)" in done.stdout and "dropped, bad" in done.stdout
    assert json.loads((tmp_path / "out" / "data.json").read_text())["training"]["dropped_bad"] == 2
    assert zerofit(*flags, tmp_path / "other", "--bad_rows", "drop").returncode == 0


@pytest.mark.bad_input
def test_an_odd_file_in_a_folder_is_named_and_the_others_are_counted(tmp_path, zerofit):
    rows_file(tmp_path, "b.jsonl", [("Who?", "Bo."), ("Who?", "Ann.")])
    odd = tmp_path / "a.json"
    odd.write_text('{\n "lr": 1\n}')
    done = zerofit("data", "--data", tmp_path, "--model", TINY / "model", "--output_dir", tmp_path / "out")
    assert done.returncode == 2 and "1 of 3 training rows are invalid (see above)" in done.stderr
    assert "1 row unusable: is a single JSON object over several lines" in done.stdout
    assert f"(first: {odd})" in done.stdout


def test_make_data(tmp_path):
    file = rows_file(tmp_path, "two words.jsonl", DUPLICATES)
    words = ["make", "-C", str(ROOT), "ENV=active", f"PYTHON={python()}", "data", f"DATA={file}"]
    words += [f"MODEL={TINY / 'model'}", f"OUT={tmp_path / 'out'}", "ARGS=--max_length 24 --max_truncated_fraction 0.2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Error 2" in done.stderr  # make's own code, and the verb's
    assert "zerofit: error: --max_truncated_fraction 0.2: 25% of the training rows are longer" in done.stderr
    assert json.loads((tmp_path / "out" / "data.json").read_text())["max_length"] == 24


def test_pairs_are_counted_by_side_and_shown_with_their_loss_spans(tmp_path, capsys):
    pairs = [
        {"prompt": "Hi?", "chosen": "Hello hello hello.", "rejected": "No."},
        {"prompt": "Who?", "chosen": "Me.", "rejected": "Go away now."},
        {"prompt": "Why?", "chosen": "Yes.", "rejected": "Yes."},
        {"prompt": "Why?", "chosen": "Yes.", "rejected": ""},
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, pairs)))
    data_command.main(["--recipe", "dpo", "--data", str(file), "--model", str(TINY / "model"), "--use_cpu", "true",
              "--max_length", "64", "--output_dir", str(tmp_path / "out")])  # fmt: skip
    facts, text = json.loads((tmp_path / "out" / "data.json").read_text())["training"], capsys.readouterr().out
    settings = resolve.resolve_settings(
        "dpo", ["--data", str(file), "--model", str(TINY / "model"), "--max_length", "64"], 1
    )
    tokenizer = load_tokenizer(settings)
    lengths = [
        [len(tokenizer(f"{pair[side]}<|end|>")["input_ids"]) for side in ("chosen", "rejected")] for pair in pairs[:2]
    ]
    margins = [chosen - rejected for chosen, rejected in lengths]
    answers = facts["answers"]
    assert (facts["rows"], facts["kept"]) == (4, 2)
    assert (facts["dropped_identical_sides"], facts["dropped_empty_side"]) == (1, 1)
    assert (answers["chosen_longer"], answers["rejected_longer"], answers["ties"]) == (1, 1, 0)
    assert answers["margin_mean"] == sum(margins) / 2
    assert answers["chosen"]["p95"] == max(chosen for chosen, _ in lengths)
    assert facts["supervised_tokens"] == sum(map(sum, lengths))
    assert "pair 1, chosen" in text and "«Hello hello hello.<|end|>»" in text and "«No.<|end|>»" in text
    assert (
        "chosen is longer" in text
        and "dropped, identical sides" in text
        and "packed" not in text.replace("unpacked", "")
    )


# --- text that the chat template writes itself ---

TEMPLATE = """{%- for m in messages %}{{- '<|' + m.role + '|>\n' }}
{%- if m.role == 'assistant' %}{{- '<think></think>' }}{%- endif %}{{- m.content + '<|end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"""


def test_the_share_of_template_tokens_is_shown_and_can_be_left_out(tmp_path, zerofit):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    file = rows_file(tmp_path, "a.jsonl", [(f"Who {i}?", "Bo") for i in range(40)])
    flags = ["--data", file, "--model", TINY / "model", "--chat_template", tmp_path / "t.jinja"]
    masks = {}
    for mask in ("false", "true"):
        settings, train_set, eval_set, tokenizer = loaded(*flags, "--mask_generation_prompt", mask)
        checks.check_data(settings, train_set, eval_set, tokenizer)
        (check,) = (c for c in settings.checks if c.name == "template_tokens")
        row = train_set.dataset[0]
        kept = [i for i, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORE]
        masks[mask] = tokenizer.decode(kept)
        block = len(tokenizer.encode("<think></think>", add_special_tokens=False))
        answer = len(tokenizer.encode("Bo", add_special_tokens=False))
        inside = block if mask == "false" else 0
        numbers = check.numbers
        assert check.holds is True and numbers["rows"] == 32  # of 40
        assert numbers["supervised_tokens"] == 32 * (inside + answer + 1) and numbers["end_tokens"] == 32
        assert numbers["template_tokens"] == numbers["maskable_tokens"] == 32 * inside
        assert numbers["share"] == inside / (inside + answer + 1)
        said = [d for d in settings.decisions if "--mask_generation_prompt true excludes them" in d]
        assert len(said) == (mask == "false") and all("'<think></think>'" in d for d in said)
        done = zerofit("data", *flags, "--mask_generation_prompt", mask, "--output_dir", tmp_path / mask)
        share = f"{32 * inside:,} ({inside / (inside + answer + 1):6.1%})"
        assert f"  {'template tokens, first rows':<30}{share:>18}\n" in done.stdout
        assert ("excludes them" in done.stdout) == (mask == "false")
    assert masks == {"false": "<think></think>Bo<|end|>", "true": "Bo<|end|>"}


@pytest.mark.parametrize(("row", "flags"), [({"text": "Bo"}, []), ({"question": "a", "answer": "b"}, ["all"])])
def test_template_tokens_are_not_counted_where_all_text_is_trained_on(tmp_path, row, flags):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    flags = ["--train_on", *flags] if flags else []
    settings, *sets, tokenizer = loaded("--data", tmp_path / "a.jsonl", "--model", TINY / "model", *flags)
    checks.check_data(settings, *sets, tokenizer)
    assert [(c.name, c.holds, c.numbers) for c in settings.checks] == [("template_tokens", None, {})]


@pytest.mark.parametrize("recipe", ["dpo", "sft"])
def test_pairs_and_streams_are_counted_too(tmp_path, recipe):
    row = {"prompt": "Hi", "chosen": "Yes.", "rejected": "No."} if recipe == "dpo" else {"question": "a", "answer": "b"}
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 3)
    more = ["--streaming", "true", "--max_steps", "1"] if recipe == "sft" else []
    flags = ["--data", str(tmp_path / "a.jsonl"), "--model", str(TINY / "model"), *more]
    settings = resolve.resolve_settings(recipe, flags, 1)
    train_set, _ = load_datasets(settings, load_tokenizer(settings))
    counted = train_set.statistics["template_text"]
    assert counted["rows"] == counted["end"] == (6 if recipe == "dpo" else 3) and counted["template"] == 0


@pytest.mark.bad_input
@pytest.mark.parametrize("train_on", ["all", "prompt"])
def test_a_mask_of_answers_that_are_not_what_is_trained_is_refused(train_on):
    with pytest.raises(UserError, match=f"--mask_generation_prompt with --train_on {train_on}: "):
        settings_for("--mask_generation_prompt", "true", "--train_on", train_on)
