"""The recipes of examples/reproduce: their settings, what they train on, and the table of published and own scores."""

import json
import re
import shlex
import subprocess
import sys
from datetime import datetime

import pytest
import yaml
from conftest import ROOT, slow_but

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.data.batches import documents
from zerofit.data.conversations import IGNORE
from zerofit.data.load import load_datasets
from zerofit.job import data_entry
from zerofit.model.load import load_tokenizer

sys.path.append(str(ROOT / "examples" / "reproduce"))
import plans
import run
import sample

FOLDER = ROOT / "examples" / "reproduce"
RECIPES = sorted(file.parent.name for file in FOLDER.glob("*/published.yaml"))


def published(name):
    return yaml.safe_load((FOLDER / name / "published.yaml").read_text())


def config(name):
    return yaml.safe_load((FOLDER / name / "config.yaml").read_text())


def rows(name, file="sample.jsonl"):
    return [json.loads(line) for line in (FOLDER / name / file).read_text().splitlines()]


def test_there_are_six_with_all_their_files():
    assert RECIPES == ["llama2-70b-lora-mlperf", "openthoughts-sft", "smollm3-sft", "tulu3-8b-sft", "zephyr-dpo",
                       "zephyr-sft"]  # fmt: skip
    for name in RECIPES:
        assert (FOLDER / name / "README.md").is_file() and len(rows(name)) == 6
        config_file = ROOT / "examples" / "models" / published(name)["model_config"] / "config.json"
        assert config_file.is_file() and published(name)["machines"] and published(name)["rows"] > 0
        assert all(score["source"] and score["noise"] >= 0 for score in published(name)["scores"])


@pytest.mark.parametrize("name", RECIPES)
def test_each_setting_names_its_source_and_is_resolved_as_it_stands(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = (FOLDER / name / "config.yaml").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#") and not re.search(r"\S +# \S", line)] == []
    flags = ["--config", str(FOLDER / name / "config.yaml")]
    settings = resolve.resolve_settings(published(name)["recipe"], flags, 8, arguments_only=True)
    for key, value in config(name).items():
        found = getattr(settings, key)
        if key in ("data", "eval_data"):
            assert [*map(data_entry.parse, found)] == [data_entry.parse(json.dumps(entry)) for entry in value]
        elif key != "zero" or value != "auto":  # auto: the launch decides
            assert (json.loads(found) if isinstance(value, dict) else found) == value, key
    # A batch of their GPUs, as the comments say it.
    assert settings.effective_batch_size == {"llama2-70b-lora-mlperf": 8, "openthoughts-sft": 96}.get(name, 128)


def zephyr(row):
    text = "".join(f"<|{m['role']}|>\n{m['content']}<|end|>\n" for m in row["messages"])
    return text, text  # the loss is on everything


def zephyr_pair(row):
    sides = []
    for side in ("chosen", "rejected"):
        question, answer = row[side]
        learned = answer["content"] + "<|end|>"
        sides.append((f"<|user|>\n{question['content']}<|end|>\n<|assistant|>\n{learned}\n", learned))
    return sides


def tulu(row):
    text, learned = "", ""
    for message in row["messages"]:
        end = "<|end|>" if message["role"] == "assistant" else ""
        text += f"<|{message['role']}|>\n{message['content']}{end}\n"
        learned += message["content"] + end if end else ""
    return text.removesuffix("\n"), learned


def openthoughts(row):
    question, answer = row["conversations"]
    learned = answer["value"] + "<|im_end|>"
    head = f"<|im_start|>system\n{row['system']}<|im_end|>\n<|im_start|>user\n{question['value']}<|im_end|>\n"
    return f"{head}<|im_start|>assistant\n{learned}\n", learned


def smollm3(row):
    arguments = row["chat_template_kwargs"]
    thinking = arguments["enable_thinking"]
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face."
    default += " Use the format: <think> Thought section </think> Solution section." if thinking else ""
    text = (
        f"<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: {datetime.now():%d %B %Y}\n"
        f"Reasoning Mode: {'/think' if thinking else '/no_think'}\n\n## Custom Instructions\n\n"
        f"{arguments['custom_instructions'] or default}\n\n## Tools\n\n### XML Tools\n\n"
        f"{arguments['xml_tools'] or None}\n\n### Python Tools\n\n{arguments['python_tools'] or None}\n\n<|im_end|>\n"
    )
    learned = ""
    for message in row["messages"]:
        answer = message["content"] + "<|im_end|>"
        if message["role"] == "assistant":
            text += "<|im_start|>assistant\n" + ("" if thinking else "<think>\n\n</think>\n") + answer + "\n"
            learned += answer
        else:
            text += "<|im_start|>user\n" + answer + "\n"
    return text, learned


RENDERED = {"zephyr-sft": zephyr, "zephyr-dpo": zephyr_pair, "tulu3-8b-sft": tulu, "openthoughts-sft": openthoughts,
            "smollm3-sft": smollm3}  # fmt: skip


def loaded(name, folder, eval_file="sample.jsonl"):
    """The training and evaluation rows of the sample as the kit reads them, and its tokenizer."""
    model = ROOT / "examples" / "models" / published(name)["model_config"] / "config.json"
    sample.tokenizer_for(config(name).get("chat_template", "")).save_pretrained(folder)
    (folder / "config.json").write_text(model.read_text())
    flags = ["--config", str(FOLDER / name / "config.yaml"), "--model", str(folder), "--model_revision", "main",
             "--data", str(FOLDER / name / "sample.jsonl"), "--eval_data", str(FOLDER / name / eval_file)]  # fmt: skip
    settings = resolve.resolve_settings(published(name)["recipe"], flags, 1, arguments_only=True)
    tokenizer = load_tokenizer(settings)
    return *load_datasets(settings, tokenizer), tokenizer


def texts(part, tokenizer):
    learned = [token for token, label in zip(part["input_ids"], part["labels"], strict=True) if label != IGNORE]
    assert all(label in (IGNORE, token) for token, label in zip(part["input_ids"], part["labels"], strict=True))
    return tokenizer.decode(part["input_ids"]), tokenizer.decode(learned)


@pytest.mark.oracle
@pytest.mark.parametrize("name", RENDERED)
def test_the_sample_is_trained_on_what_the_publication_trains_on(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    train_set, _, tokenizer = loaded(name, tmp_path)
    assert len(train_set.dataset) == 6
    for row, encoded in zip(rows(name), train_set.dataset, strict=True):
        wanted = RENDERED[name](row)
        found = [texts(part, tokenizer) for part in documents(encoded)]
        assert found == (wanted if isinstance(wanted, list) else [wanted])


@pytest.mark.oracle
def test_tokens_of_mlperf_keep_their_labels(tmp_path, monkeypatch):
    """All tokens of a training row, of an evaluation row the summary without its end."""
    monkeypatch.chdir(ROOT)
    name = "llama2-70b-lora-mlperf"
    train_set, eval_set, tokenizer = loaded(name, tmp_path, "sample_eval.jsonl")
    for found, row in zip(train_set.dataset, rows(name), strict=True):
        assert found["input_ids"] == found["labels"] == row["input_ids"]
    for found, row in zip(eval_set.dataset, rows(name, "sample_eval.jsonl"), strict=True):
        assert found["labels"] == row["labels"]
        text, learned = texts(found, tokenizer)
        assert text.partition(" ### Summary:\n")[2] == learned + "<|end|>"


def evaluation(value, stderr, **more):
    """As scores.json has one: the base and the tuned model beside each other."""
    metric = {"exact_match (flexible-extract)": {"value": value, "stderr": stderr, "rows": 1319}}
    base = {"exact_match (flexible-extract)": {"value": 0.5, "stderr": 0.1, "rows": 1319}}
    return {
        "weights": "final (step 1090)",
        "limit": None,
        "scores": {"base": {"gsm8k_cot": base}, "tuned": {"gsm8k_cot": metric}},
    } | more


def test_the_table_has_published_ours_and_the_difference_with_the_noise_of_both(tmp_path):
    trials = [evaluation(0.9, 0.2, limit=4), evaluation(0.8, 0.2, weights="checkpoint-2")]
    scores = {"evaluations": [evaluation(0.1, 0.2), evaluation(0.75, 0.012), *trials]}
    (tmp_path / "scores.json").write_text(json.dumps(scores))
    table = run.compare(published("tulu3-8b-sft"), tmp_path, is_sample=False)
    # sqrt(0.0117^2 + 0.012^2) = 0.01676
    assert table[4] == "| gsm8k_cot, exact_match (flexible-extract) | 0.762 | 0.75 | -0.012 | 0.017 |"
    assert table[5] == "| ifeval, prompt_level_loose_acc | 0.728 | not scored |  | 0.019 |"


def test_the_run_s_own_evaluations_are_read_last_best_and_first_below(tmp_path):
    found = [
        {"step": 144, "eval_loss": 0.95},
        {"step": 150, "loss": 1.0},
        {"step": 384, "eval_loss": 0.92},
        {"step": 432, "eval_loss": 0.93},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, found)))
    (tmp_path / "run.json").write_text(json.dumps({"arguments": {"effective_batch_size": {"value": 8}}}))
    table = run.compare(published("llama2-70b-lora-mlperf"), tmp_path, is_sample=True)
    assert "NO REPRODUCTION" in table[0] and "ours, on the sample" in table[2]
    assert table[4] == "| eval_loss | 0.925 | 0.92 | -0.005 | 0 |"
    assert table[5] == "| samples to eval_loss 0.925 | 3187 | 3072 | -115 | 3.1e+02 |"
    assert "| eval_loss | 0.9353 | 0.93 | -0.0053 | 0.0028 |" in run.compare(published("zephyr-sft"), tmp_path, False)


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["zephyr", "../tiny", "."])
def test_an_unknown_recipe_is_refused_with_the_names(name):
    with pytest.raises(UserError, match=r"one of llama2-70b-lora-mlperf, .*zephyr-sft"):
        run.published(name)


def test_dry_prints_the_commands_of_the_chain_and_starts_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "tulu3-8b-sft", "--gpus", "8", "--dry", "--max_steps", "9"])
    monkeypatch.setattr(run, "start", None)
    run.main()
    train, score = map(shlex.split, capsys.readouterr().out.splitlines())
    assert train[:4] == ["zerofit", "launch", "--gpus", "8"] and train[-2:] == ["--max_steps", "9"]
    assert train[4] == str(ROOT / "recipes" / "sft.py") and str(FOLDER / "tulu3-8b-sft" / "config.yaml") in train
    folder = "runs/reproduce/tulu3-8b-sft"  # the table has no column of the base, which takes as long to score
    assert score == ["zerofit", "eval", folder, "--tasks", "gsm8k_cot,ifeval", "--gpus", "8", "--skip_base"]
    monkeypatch.setattr(sys, "argv", ["run.py", "zephyr-dpo", "--dry"])
    run.main()
    train, own = capsys.readouterr().out.splitlines()
    assert train.startswith("zerofit launch")
    assert own == "# the run's own evaluations give eval_loss, eval_rewards/accuracies"


def test_the_tables_have_a_row_for_each_machine_and_score():
    text = plans.README.read_text()
    planned = [f"| [{name}]({name}/) | {machine} |" for name in RECIPES for machine in published(name)["machines"]]
    found = [line for line in text.splitlines() if re.match(r"\| \[[\w.-]+\]\([\w.-]+/\) \| \d", line)]
    assert [any(line.startswith(start) for line in found) for start in planned] == [True] * len(found)
    assert all(line.endswith("| not run by us |") for line in found)
    assert [row for row in plans.score_rows(plans.published()) if row not in text] == []


def test_a_row_says_what_the_plan_says():
    chosen = {"label": "sft ZeRO-3, micro batch 4", "nvidia_smi_bytes": 40 * 2**30}
    price = {"hours": 20.4, "gpu_hours": 163.2, "dollars": 408.0}
    found = {"gpu": {"memory_gib": 79.6}, "chosen": chosen, "cost": price}
    result = {"at_most": True}
    assert plans.row("x", result, "8 x h100-80g", found) == (
        "| [x](x/) | 8 x h100-80g | ZeRO-3, micro batch 4 | 40.0 of 79.6 GiB | at most 20 h | 160 | $410 "
        "| not run by us |"
    )
    found |= {"chosen": None, "nearest": chosen}
    assert plans.row("x", result, "8 x h100-80g", found) == (
        "| [x](x/) | 8 x h100-80g | **nothing fits**; nearest: sft ZeRO-3, micro batch 4 | 40.0 of 79.6 GiB |  |  |  "
        "| not run by us |"
    )


@pytest.mark.slow
def test_the_plan_is_the_row_of_the_table(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert plans.plan("zephyr-sft", published("zephyr-sft"), "8 x h100-80g") in plans.README.read_text().splitlines()


@pytest.mark.parametrize("name", slow_but(RECIPES, []))
def test_the_chain_runs_on_the_sample_and_ends_with_its_table(name, tmp_path):
    words = [sys.executable, str(FOLDER / "run.py"), name, "--sample", "--output_dir", str(tmp_path / "run")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table = (tmp_path / "run" / "reproduction.md").read_text()
    assert table in done.stdout and "NO REPRODUCTION" in table
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    absent = sum(
        "task" in score or "until" in score for score in published(name)["scores"]
    )  # the hub's; too high a loss
    assert result["steps"] == 2 and table.count("| not scored |") == absent
