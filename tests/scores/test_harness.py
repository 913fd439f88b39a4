"""lm-evaluation-harness itself: its scores of the bundled task are the kit's own, to the row.

Answers are compared with those of transformers' `generate` on the same prompts, and with the harness's own way to load
an adapter. All of it is marked slow: the harness takes 10 seconds to be imported.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY, Run, recipe_process, run_world

from zerofit.base.errors import Unavailable, UserError
from zerofit.export import source
from zerofit.job import scores
from zerofit.tools.scores import evaluate, tasks

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'zerofit[eval]'")
pytestmark = pytest.mark.slow

TASKS = TINY / "tasks"
ROWS = [json.loads(line)["messages"] for line in (TINY / "eval.jsonl").read_text().splitlines()]
# A part of the bundled task's epochs: some rows are answered right, others not.
STEPS = {"sft": "60", "lora": "60"}


@pytest.fixture(scope="module", params=STEPS)
def trained(request, tmp_path_factory):
    """A run of the bundled task with its own score."""
    folder = tmp_path_factory.mktemp("eval") / request.param
    flags = ["--max_steps", STEPS[request.param], "--save_steps", STEPS[request.param], "--output_dir", str(folder)]
    done = recipe_process(request.param, *flags, "--save_strategy", "steps")
    assert done.returncode == 0, done.stderr[-3000:]
    return Run(folder)


def command(*words, **more):
    """Run `zerofit eval` as a user does, in a process of its own; return what it printed."""
    words = [sys.executable, "-m", "zerofit", "eval", *map(str, words)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, **more)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def answers(run, weights="final", title="tuned", task="bundled_answers"):
    """Return the answers of --log_samples in the order of the rows, and whether each is right."""
    file = run.folder / "scores" / f"{weights}-{title}-{task}.jsonl"
    rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"])
    assert [row["doc_id"] for row in rows] == list(range(len(rows)))
    return [row["filtered_resps"][0] for row in rows], [row["exact_match"] for row in rows]


def own_answers(folder):
    """Return the greedy answers of transformers' generate to the bundled questions."""
    saved = source.find(str(folder))
    model, tokenizer = source.load(saved), source.tokenizer(saved)
    texts = []
    for batch in (ROWS[:100], ROWS[100:]):
        inputs = tokenizer.apply_chat_template(
            [[question] for question, _ in batch], add_generation_prompt=True, return_tensors="pt", return_dict=True,
            padding=True, tokenizer_kwargs={"padding_side": "left"},
        )  # fmt: skip
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
        new = output[:, inputs["input_ids"].shape[1] :]
        texts += [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
    return texts


@pytest.mark.oracle
def test_the_score_is_the_kits_own_to_the_row(trained):
    evaluate.main([str(trained.folder), "--tasks", str(TASKS), "--log_samples", "--batch_size", "64"])
    result = trained.json("result.json")
    (kept,) = scores.read_evaluations(trained.folder)
    for title, when in {"base": "before", "tuned": "after"}.items():
        score = kept["scores"][title]["bundled_answers"]["exact_match"]
        assert (score["value"], score["rows"]) == (result[f"exact_match_{when}"], len(ROWS))
    assert 0.05 < result["exact_match_after"] < 0.98, "all rows right, or all wrong, would prove little"
    texts, right = answers(trained)
    assert texts == own_answers(trained.folder / "final")
    assert right == [float(text == wanted["content"]) for text, (_, wanted) in zip(texts, ROWS, strict=True)]
    assert sum(right) / len(right) == result["exact_match_after"]
    for sample in result["samples"]:
        assert sample["after"] in texts
    assert f"{result['exact_match_after']:.4f} ±" in (trained.folder / "report.html").read_text()
    assert f"{result['exact_match_after']:.4f} ±" in (trained.folder / "final" / "README.md").read_text()


def test_two_processes_give_the_same_answers_from_another_folder(trained, tmp_path):
    """From a folder without the data: its path in the YAML file counts from there. 41 rows do not divide evenly."""
    given = [trained.folder, "--tasks", TASKS, "--log_samples", "--limit", "41"]
    printed = command(*given, "--gpus", "2", cwd=tmp_path)
    assert "first 41" in printed
    kept = scores.read_evaluations(trained.folder)[-1]
    assert (kept["processes"], kept["limit"]) == (2, 41)
    shared = answers(trained)
    evaluate.main(list(map(str, given)))
    alone = scores.read_evaluations(trained.folder)[-1]
    assert alone["processes"] == 1
    for title in ("base", "tuned"):  # the standard error is summed in another order
        both = [one["scores"][title]["bundled_answers"]["exact_match"] for one in (alone, kept)]
        assert both[0] == pytest.approx(both[1], rel=1e-12)
    assert shared == answers(trained)  # not of the base: in bfloat16, other batches decide its ties differently


@pytest.mark.oracle
def test_an_adapter_is_scored_as_the_harness_loads_it(trained):
    """By the harness's own `hf` model with its `peft=`: the same answers, without our loading."""
    if "lora" not in trained.folder.name:
        pytest.skip("no adapter")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    evaluate.main([str(trained.folder), "--tasks", str(TASKS), "--log_samples", "--batch_size", "64", "--skip_base"])
    final = trained.folder / "final"
    theirs = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(TINY / "model"), "peft": str(final), "tokenizer": str(final)},
        tasks=tasks.build(tasks.find([str(TASKS)]), unsafe=False),
        task_manager=TaskManager(include_defaults=False),
        device="cpu",
        batch_size=64,
        apply_chat_template=True,
    )
    rows = sorted(theirs["samples"]["bundled_answers"], key=lambda row: row["doc_id"])
    assert answers(trained)[0] == [row["filtered_resps"][0] for row in rows]


def test_a_checkpoint_of_a_run_that_still_trains(trained, tmp_path):
    """Its folder has neither final/ nor result.json; the last checkpoint has the weights of final/."""
    running = Run(tmp_path / "running")
    shutil.copytree(trained.folder, running.folder, ignore=shutil.ignore_patterns("final", "scores*", "re*"))
    step = STEPS["lora" if "lora" in trained.folder.name else "sft"]
    checkpoint = running.folder / f"checkpoint-{step}"
    evaluate.main([str(checkpoint), "--tasks", str(TASKS), "--log_samples", "--skip_base", "--batch_size", "64"])
    (kept,) = scores.read_evaluations(running.folder)
    assert (kept["weights"], list(kept["scores"])) == (checkpoint.name, ["tuned"])
    assert answers(running, checkpoint.name)[0] == own_answers(trained.folder / "final")
    assert not (running.folder / "report.html").exists()


def test_a_checkpoint_that_is_only_shards(tmp_path):
    """Of stage 3 on two ranks, without 16-bit weights: the harness could not load it."""
    flags = ["--zero", "3", "--max_steps", "4", "--num_samples", "0", "--save_strategy", "steps", "--save_steps", "4"]
    run = run_world(2, {"shards": ("sft", flags)}, tmp_path)["shards"]
    checkpoint = run.folder / "checkpoint-4"
    assert not list(checkpoint.glob("*.safetensors"))
    for weights in (checkpoint, run.folder):
        evaluate.main(
            [str(weights), "--tasks", str(TASKS), "--log_samples", "--skip_base", "--limit", "20", "--batch_size", "20"]
        )
    assert answers(run, "checkpoint-4") == answers(run, "final")


def own_task(folder, name="mine.yaml", **changed):
    """Write a YAML file of a task on the bundled questions, with other values of some keys."""
    import yaml

    folder.mkdir(exist_ok=True)
    task = yaml.safe_load((TASKS / "bundled_answers.yaml").read_text())
    task["dataset_kwargs"] = {"data_files": {"test": str(TINY / "eval.jsonl")}}
    (folder / name).write_text(yaml.safe_dump(task | changed))
    return str(folder)


@pytest.mark.bad_input
def test_folders_of_tasks_that_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "x.yaml").write_text("task: [a")
    missing = {"dataset_kwargs": {"data_files": {"test": "nowhere.jsonl"}}}
    cases = {
        str(tmp_path / "empty"): r"empty: does not contain a task, which is a file \*.yaml with `task:` in it\.",
        str(tmp_path / "broken"): r"broken/x.yaml: cannot be read: .*line 1, column 7",
        own_task(
            tmp_path / "missing", **missing
        ): r"mine.yaml: its data is missing: .*nowhere.jsonl'; paths are relative",
        own_task(tmp_path / "field", doc_to_text="{{question}}"): r"mine.yaml: .* UndefinedError: 'question' is undef",
        str(tmp_path / "nothing/here"): r"nothing/here: no such folder or file\.",
    }
    own_task(tmp_path / "twice", "a.yaml")
    cases[own_task(tmp_path / "twice", "b.yaml")] = r"twice: Duplicate task name 'bundled_answers' found.*rename one\."
    for words, says in cases.items():
        with pytest.raises(UserError, match=says):
            tasks.build(tasks.find([words]), unsafe=False)
    both = [own_task(tmp_path / "one"), own_task(tmp_path / "other")]
    with pytest.raises(UserError, match=r"one/mine.yaml and .*other/mine.yaml both have a task bundled_answers"):
        tasks.find(both)


@pytest.mark.bad_input
def test_a_task_that_needs_the_hub(tmp_path):
    """In a process of its own: the libraries read HF_HUB_OFFLINE when they are imported."""
    folder = own_task(tmp_path / "hub", dataset_path="openai/gsm8k", dataset_name="main", dataset_kwargs={})
    words = [sys.executable, "-m", "zerofit", "eval", str(TINY / "model"), "--tasks", folder]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == Unavailable.exit_code
    assert "mine.yaml: its data set is not cached and the Hub is unreachable" in done.stderr
    assert "or name a folder of custom tasks with local data." in done.stderr


def test_a_group_and_a_path_from_where_the_command_was_typed(tmp_path, monkeypatch):
    """A group stands for its tasks; paths that are not beside the YAML file count from the current folder."""
    here = {"dataset_kwargs": {"data_files": {"test": "examples/tiny/eval.jsonl"}}}
    folder = own_task(tmp_path / "mine", "a.yaml", task="a", **here)
    own_task(tmp_path / "mine", "b.yaml", task="b", **here)
    mean = {"metric": "exact_match", "weight_by_size": True}
    group = {"group": "both", "task": ["a", "b"], "aggregate_metric_list": [mean]}
    (tmp_path / "mine" / "group.yaml").write_text(json.dumps(group))
    monkeypatch.chdir(ROOT)
    found = tasks.find([folder])
    assert [one.name for one in found] == ["both"]
    assert tasks.rows_of(tasks.build(found, unsafe=False)) == {"a": 200, "b": 200}


@pytest.mark.bad_input
def test_names_of_the_harness():
    """Its list of 14,000 tasks is read once, which takes half a minute."""
    with pytest.raises(UserError, match=r"unknown task .*; did you mean gsm8k\?"):
        tasks.find(["gsm8kk"])
    assert [one.name for one in tasks.find(["gsm8k", "gsm8k"])] == ["gsm8k"]
    assert len(tasks.find(["mmlu_*"])) > 50


def test_make_eval(trained):
    """As a user types it, one word of names and folders."""
    words = ["make", "--no-print-directory", "ENV=active", f"PYTHON={sys.executable}", "eval", f"RUN={trained.folder}"]
    more = [f"TASKS={TASKS},", "GPUS=1", "ARGS=--limit 4 --skip_base"]
    done = subprocess.run([*words, *more], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "first 4" in done.stdout and f"scores: {trained.folder / scores.FILE}" in done.stdout
