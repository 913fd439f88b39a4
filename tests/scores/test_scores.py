"""`zerofit eval`: the table, scores.json, the card and the page, from a harness whose answers are made up here.

tests/scores/test_harness.py runs lm-evaluation-harness itself.
"""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import TINY

from zerofit.base.errors import UserError
from zerofit.export import card, source
from zerofit.job import scores
from zerofit.report import run_page
from zerofit.tools.scores import evaluate, models, rank, tasks
from zerofit.train import model_card

HARNESS = {  # as simple_evaluate returns it
    "results": {
        "gsm8k": {
            "alias": "gsm8k", "sample_len": 1319, "exact_match,strict-match": 0.25,
            "exact_match_stderr,strict-match": 0.012, "exact_match,flexible-extract": 0.5,
            "exact_match_stderr,flexible-extract": 0.0137,
        },
        "wiki": {
            "alias": "wiki", "sample_len": 62, "word_perplexity,none": 11.5, "word_perplexity_stderr,none": "N/A",
            "bypass,none": None,
        },
    },
}  # fmt: skip


def one(value, stderr=0.03, rows=100):
    return {"value": value, "stderr": stderr, "rows": rows}


def evaluation(base, tuned, weights="final", limit=None, task="mine", **more):
    each = {"base": base, "tuned": tuned}
    found = {title: {task: {"acc": score}} for title, score in each.items() if score}
    return {"weights": weights, "limit": limit, "harness": "0.4.13", "scores": found} | more


@pytest.fixture
def run(tmp_path):
    """A finished run, of which the kit knows the base."""
    folder = tmp_path / "run"
    shutil.copytree(TINY / "model", folder / "final")
    facts = {"recipe": "sft", "arguments": {"model": {"value": str(TINY / "model"), "source": "command line"}}}
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "result.json").write_text(json.dumps({"status": "finished", "steps": 3}))
    made = model_card.Card(facts, "run", "LlamaForCausalLM", None, 3, "", "float32")
    (folder / "final" / "README.md").write_text(model_card.text(made))
    (folder / run_page.FILE).write_text("an older page")
    return folder


@pytest.fixture
def answered(monkeypatch):
    """What the harness was asked; base and tuned get made-up scores."""
    asked = []

    def score(question):
        asked.append(question)
        titles = [model["title"] for model in question["models"]]
        found = {title: {"mine": {"acc": one(0.2 if title == "base" else 0.5)}} for title in titles}
        answers = {title: {"mine": [{"doc_id": 0, "resps": [[title]]}]} for title in titles}
        return {"scores": found, "chat_template": dict.fromkeys(titles, True), "harness": "0.4.13", "processes": 1,
                "samples": answers if question["log_samples"] else {}}  # fmt: skip

    monkeypatch.setattr(rank, "score", score)
    monkeypatch.setattr(evaluate, "find_spec", lambda name: True)
    return asked


def test_the_numbers_of_the_harness():
    assert rank.numbers(HARNESS) == {
        "gsm8k": {
            "exact_match (strict-match)": one(0.25, 0.012, 1319),
            "exact_match (flexible-extract)": one(0.5, 0.0137, 1319),
        },
        "wiki": {"word_perplexity": one(11.5, None, 62)},
    }


def test_the_difference_is_in_standard_errors():
    head, rows = scores.table([evaluation(one(0.2, 0.03), one(0.5, 0.04))])
    assert head == ["weights", "task", "metric", "rows", "base", "tuned", "difference"]
    # sqrt(0.03^2 + 0.04^2) = 0.05, and 0.3 is six of it
    assert rows == [
        ["final", "mine", "acc", "100", "0.2000 ± 0.0300", "0.5000 ± 0.0400", "+0.3000 (6.0 standard errors)"]
    ]
    assert scores.table([evaluation(one(11.5, None), one(10.25, None))])[1][0][4:] == ["11.5000", "10.2500", "-1.2500"]


def test_the_newest_score_counts_and_a_trial_does_not_hide_one():
    file = [
        evaluation(one(0.1), one(0.2)),
        evaluation(None, one(0.3), weights="checkpoint-5"),
        evaluation(one(0.1), one(0.4)),
        evaluation(one(0.9), one(0.9), limit=8),
        evaluation(one(0.9, rows=8), one(0.7, rows=8), limit=8, task="other"),
    ]
    head, rows = scores.table(file)
    assert [(row[0], row[1], row[3], row[5][:6]) for row in rows] == [
        ("final", "mine", "100", "0.4000"),
        ("checkpoint-5", "mine", "100", "0.3000"),
        ("final", "other", "first 8", "0.7000"),
    ]
    assert rows[1][4] == rows[1][6] == ""  # its base was not scored
    assert scores.table(file, "checkpoint-5") == ([*head[1:4], "tuned"], [["mine", "acc", "100", "0.3000 ± 0.0300"]])
    assert scores.table([]) == ([], [])


# A later evaluation, and what it must not take away from the earlier one of base 0.1 and tuned 0.2 on 100 rows.
LATER = {
    "without the base": (evaluation(None, one(0.4)), [("mine", "100", 0.1, 0.4)]),
    "without the base, a trial": (evaluation(None, one(0.4, rows=8), limit=8), [("mine", "100", 0.1, 0.2)]),
    "without the base, other rows": (evaluation(None, one(0.4, rows=50)), [("mine", "50", None, 0.4)]),
    "of another task": (
        evaluation(None, one(0.4), task="other"), [("mine", "100", 0.1, 0.2), ("other", "100", None, 0.4)]
    ),
    **{
        name: (evaluation(None, one(0.4), **{key: value}), [("mine", "100", 0.1, 0.2), (shown, "100", None, 0.4)])
        for name, key, value, shown in (
            ("with examples", "num_fewshot", 5, "mine, 5 shots"),
            ("with no example", "num_fewshot", 0, "mine, 0 shots"),
            ("with a system message", "system_instruction", "Be kind", "mine, system message 'Be kind'"),
            ("of other answers", "gen_kwargs", "max_gen_toks=8", "mine, max_gen_toks=8"),
            ("of another template", "chat_template_kwargs", {"a": 1}, "mine, template arguments {'a': 1}"),
            ("without a template", "plain_text", "asked for", "mine, as plain text"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_a_later_evaluation_takes_no_score_away(name):
    later, expected = LATER[name]
    first = evaluation(one(0.1), one(0.2), num_fewshot=None, gen_kwargs="", system_instruction="")
    head, rows = scores.table([first, later], "final")
    shown = [dict(zip(head, row, strict=True)) for row in rows]
    values = [tuple(float(row[title][:6]) if row.get(title) else None for title in ("base", "tuned")) for row in shown]
    assert [(row["task"], row["rows"], *value) for row, value in zip(shown, values, strict=True)] == expected
    assert all(bool(row.get("difference")) == (None not in value) for row, value in zip(shown, values, strict=True))


def test_evaluations_that_end_at_once_are_all_kept(run):
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: scores.add(run, evaluation(None, one(0.5), task=f"task{i}")), range(12)))
    assert {task for each in scores.read_evaluations(run) for task in each["scores"]["tuned"]} == {
        f"task{i}" for i in range(12)
    }
    assert not [*run.glob("*.lock")]


def test_the_scores_are_in_the_run_folder_its_page_and_its_card(run, answered, capsys):
    evaluate.main([str(run), "--tasks", "mine", "--log_samples"])
    said = capsys.readouterr().out
    assert "0.2000 ± 0.0300  0.5000 ± 0.0300  +0.3000 (7.1 standard errors)" in said
    (request,) = answered
    base, tuned = (models.Model.from_json(json.loads(json.dumps(model, default=str))) for model in request["models"])
    assert (base.saved.folder, tuned.saved.folder) == (TINY / "model", run / "final")
    assert tuned.saved == source.find(str(run))
    (kept,) = scores.read_evaluations(run)
    assert kept["scores"]["tuned"]["mine"]["acc"] == one(0.5)
    assert (kept["weights"], kept["harness"], kept["processes"]) == ("final (step 3)", "0.4.13", 1)
    assert json.loads((run / "scores" / "final-tuned-mine.jsonl").read_text())["resps"] == [["tuned"]]
    page = (run / run_page.FILE).read_text()
    assert "<h2>Scores</h2>" in page and "<td>0.5000 ± 0.0300</td>" in page
    text = (run / "final" / "README.md").read_text()
    row = "| mine | acc | 100 | 0.2000 ± 0.0300 | 0.5000 ± 0.0300 | +0.3000 (7.1 standard errors) |"
    assert row in text and text.index(row) < text.index("## Use")
    report = {"dtype": "float32", "masters": False, "merged": False, "ends": False, "agreement": None, "notes": []}
    assert row in card.text(tuned.saved, report)  # of a later export
    (run / "result.json").write_text(json.dumps({"status": "finished", "steps": 6}))
    assert "## Scores" not in card.text(tuned.saved, report)  # after a resume: the weights are others


@pytest.mark.fault
def test_a_checkpoint_that_is_removed_meanwhile_is_not_called_one_without_a_tokenizer(run):
    checkpoint = shutil.copytree(run / "final", run / "checkpoint-2")
    model = models.Model("tuned", source.Saved(checkpoint, run))
    assert model.tokenizer() is not None
    shutil.rmtree(checkpoint)
    with pytest.raises(UserError, match=r"checkpoint-2: was removed .*--save_total_limit 0"):
        model.tokenizer()


@pytest.mark.fault
@pytest.mark.parametrize("what", ["steps", "weights"])
def test_scores_are_not_those_of_weights_written_meanwhile(run, answered, monkeypatch, capsys, what):
    score = rank.score

    def resumed(question):
        if what == "steps":
            (run / "result.json").write_text(json.dumps({"status": "finished", "steps": 6}))
        else:
            os.utime(run / "final" / "model.safetensors")
        return score(question)

    monkeypatch.setattr(rank, "score", resumed)
    with pytest.raises(UserError, match=r"final: was overwritten during scoring, .* discarded; score it again"):
        evaluate.main([str(run), "--tasks", "mine"])
    assert "0.5000" in capsys.readouterr().out and scores.read_evaluations(run) == []
    assert "## Scores" not in (run / "final" / "README.md").read_text()


@pytest.mark.fault
def test_scores_of_a_checkpoint_that_is_removed_meanwhile_are_kept(run, answered, monkeypatch):
    checkpoint, score = shutil.copytree(run / "final", run / "checkpoint-2"), rank.score
    monkeypatch.setattr(rank, "score", lambda question: (shutil.rmtree(checkpoint), score(question))[1])
    evaluate.main([str(checkpoint), "--tasks", "mine"])
    assert [one["weights"] for one in scores.read_evaluations(run)] == ["checkpoint-2"]


def test_a_card_has_the_newest_scores_once(run, answered):
    file = run / "final" / "README.md"
    before = file.read_text()
    for _ in range(2):
        evaluate.main([str(run), "--tasks", "mine"])
    assert file.read_text().count("## Scores") == 1
    start, end = (file.read_text().index(mark) for mark in (model_card.SCORES, model_card.END_OF_SCORES))
    after = file.read_text()[:start] + file.read_text()[end + len(model_card.END_OF_SCORES) :].lstrip("\n")
    assert after == before  # what else stands in it is as it was
    own = model_card.with_scores("# Mine\n", scores.read_evaluations(run), "final (step 3)")
    assert own.startswith(f"# Mine\n\n{model_card.SCORES}\n## Scores")
    assert model_card.with_scores("# Mine\n", scores.read_evaluations(run), "checkpoint-5") == "# Mine\n"


def test_a_trial_on_the_first_rows_is_not_in_the_card(run, answered, capsys):
    """± 0.0000 on 20 rows reads as certainty there."""
    before = (run / "final" / "README.md").read_text()
    evaluate.main([str(run), "--tasks", "mine", "--limit", "20"])
    assert (run / "final" / "README.md").read_text() == before and "model card" not in capsys.readouterr().out
    assert model_card.with_scores(before, scores.read_evaluations(run), "final (step 3)") == before
    assert "<td>first 100</td>" in (run / run_page.FILE).read_text()


def test_two_runs_side_by_side(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    scores.add(run, evaluation(one(0.2), one(0.5), weights="final (step 3)"))
    scores.add(other, evaluation(one(0.2), one(0.6), weights="final (step 3)"))
    page = run_page.render_runs([run_page.Run(run), run_page.Run(other)])
    assert "<td>mine, acc</td><td>0.5000 ± 0.0300</td><td>0.6000 ± 0.0300</td>" in page


def test_names_of_tasks_stay_text(run):
    scores.add(run, evaluation(one(0.2), one(0.5), task="<script>|\x1b[2J"))
    page = run_page.render_run(run_page.Run(run))
    assert "<script>" not in page and "&lt;script&gt;" in page and "\x1b" not in page
    assert "\\|" in scores.as_markdown(*scores.table(scores.read_evaluations(run)))


@pytest.mark.bad_input
def test_a_file_that_no_evaluation_writes_is_refused(run, answered):
    (run / scores.FILE).write_text('{"evaluations": [{"scores": {"tuned": {"mine": {"acc": {"value": "high"}}}}}]}')
    with pytest.raises(
        UserError, match=r"scores.json: evaluations\[0\]: scores: tuned: mine: acc: value: must be a num"
    ):
        run_page.render_run(run_page.Run(run))
    with pytest.raises(UserError, match=r"scores.json: evaluations"):
        evaluate.main([str(run), "--tasks", "mine"])
    assert answered == []  # refused before anything is scored


def test_the_base_can_be_left_out_or_be_elsewhere(run, answered, tmp_path, capsys):
    evaluate.main([str(run), "--tasks", "mine", "--skip_base"])
    assert [model["title"] for model in answered[-1]["models"]] == ["tuned"]
    moved = shutil.copytree(TINY / "model", tmp_path / "moved")
    evaluate.main([str(run), "--tasks", "mine", "--base", str(moved)])
    assert str(answered[-1]["models"][0]["saved"]["folder"]) == str(moved)
    evaluate.main([str(moved), "--tasks", "mine"])  # of another program: nothing is written
    assert "base: not scored (" in capsys.readouterr().out and not (moved / scores.FILE).exists()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tasks", " , "], "--tasks: name tasks of lm-evaluation-harness, or a folder of custom tasks."),
        (["--tasks", "a", "--gpus", "0"], "--gpus 0: must be 1 or more."),
        (["--tasks", "a", "--batch_size", "many"], "--batch_size many: must be a positive integer or auto."),
        (["--tasks", "a", "--limit", "0"], "--limit 0: must be 1 or more."),
        (["--tasks", "a", "--base", "/nowhere"], "--base /nowhere: no such folder; set its path with --base"),
    ],
)
def test_a_mistake_is_refused(run, answered, words, says):
    with pytest.raises(UserError) as error:
        evaluate.main([str(run), *words])
    assert str(error.value).startswith(says) and answered == []


@pytest.mark.bad_input
def test_a_missing_harness_is_said(run, monkeypatch):
    monkeypatch.setattr(evaluate, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'zerofit\[eval\]', or make install EXTRAS=eval"):
        evaluate.main([str(run), "--tasks", "mine"])


def test_the_words_of_tasks(tmp_path, monkeypatch):
    """As make passes them, in one word; a folder may have spaces and commas in its name."""
    (tmp_path / "my, tasks").mkdir()
    monkeypatch.chdir(tmp_path)
    assert tasks.words(["gsm8k,ifeval", "my, tasks", "a b"]) == ["gsm8k", "ifeval", "my, tasks", "a", "b"]


@pytest.mark.bad_input
def test_more_processes_than_rows_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    rank._check_rows({"mine": 200}, None)
    with pytest.raises(UserError, match=r"--gpus 4: mine has only 3 rows; use fewer processes\."):
        rank._check_rows({"mine": 200}, 3)


@pytest.mark.bad_input
def test_a_process_that_fails_says_why(run, answered, monkeypatch):
    """Its sentence and its exit code arrive; for anything else its code does, below its traceback."""

    def ended(words, env, check):
        said = {"error": "--tasks x: no such folder or file.", "exit_code": 69}
        Path(words[-1]).with_name("error-1.json").write_text(json.dumps(said))
        return SimpleNamespace(returncode=69)

    monkeypatch.setattr(evaluate.subprocess, "run", ended)
    with pytest.raises(UserError, match=r"--tasks x: no such folder or file\.") as error:
        evaluate.main([str(run), "--tasks", "mine", "--gpus", "2"])
    assert error.value.exit_code == 69
    monkeypatch.setattr(evaluate.subprocess, "run", lambda *words, **more: SimpleNamespace(returncode=7))
    with pytest.raises(
        UserError, match=r"a process of lm-evaluation-harness ended with code 7; see its output above\."
    ):
        evaluate.main([str(run), "--tasks", "mine", "--gpus", "2"])
