"""report.html: what a run was, its plots and how to go on; several runs side by side."""

import base64
import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from conftest import TINY, recipe_process
from everything import BROWSER

from zerofit.base.errors import UserError
from zerofit.checkpoint import integrity, resumable
from zerofit.checkpoint.facts import FACTS
from zerofit.commands import status
from zerofit.job import memory_figure
from zerofit.report import plots, run_page
from zerofit.report.plots import Series
from zerofit.report.run_page import Run

VOID = {"meta", "br", "img"}
SHORT = ["--data", str(TINY / "train.jsonl"), "--eval_data", str(TINY / "eval.jsonl"), "--max_samples", "48",
         "--effective_batch_size", "8", "--max_steps", "4", "--logging_steps", "1", "--num_samples", "1",
         "--max_tokens_per_sample", "4", "--eval_strategy", "steps", "--eval_steps", "2"]  # fmt: skip


class Page(HTMLParser):
    """The text of a page by tag and what it loads; an element that is not closed is an error."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.texts, self.loads, self.labels = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.open += [] if tag in VOID else [tag]
        self.labels += [attributes["alt"]] if tag == "img" else []
        links = [attributes.get(name) for name in ("src", "href", "xlink:href")]
        self.loads += [link for link in links if link and not link.startswith("data:")]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts += [data.strip()] if data.strip() else []
        assert "script" not in self.open

    def has(self, *texts):
        return all(any(text in own for own in self.texts) for text in texts)


def argument(value, source="flag"):
    return {"value": value, "source": source}


def make_run(folder, rate=1e-4, **result):
    """A run folder without weights, as a recipe leaves it."""
    folder.mkdir()
    arguments = {"model": argument("m/tiny"), "learning_rate": argument(rate), "zero": argument("2"),
                 "offload": argument("none"), "seed": argument(42, "transformers default"),
                 "output_dir": argument(str(folder))}  # fmt: skip
    facts = {"recipe": "sft", "started": "2026-01-01T10:00:00+0000", "command": "python recipes/sft.py",
             "world_size": 2, "device": "H100", "decisions": ["zero 2: 2 processes"], "arguments": arguments,
             "data": {"training": {"source": "a.jsonl", "rows": 9, "kept": 8, "fingerprint": "f00"}},
             "plan": {"peak": {"backward": {"parameters": 2**30, "activations": 2**31}}, "limit_bytes": 4 * 2**30},
             "versions": {"torch": "2.13.0"}}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(facts))
    lines = [{"step": i, "loss": 3 - i / 10, "learning_rate": rate, "grad_norm": 1.0, "tokens_per_second": 100.0 * i,
              "peak_memory_bytes": 3 * 2**30} for i in range(1, 9)]  # fmt: skip
    lines.append({"step": 8, "eval_loss": 2.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if result:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_a_finished_run(tmp_path):
    sample = {"prompt": "asked this", "before": "no", "after": "yes", "wanted": "yes"}
    folder = make_run(tmp_path / "a", status="finished", steps=8, train_seconds=90, samples=[sample],
                      exact_match_before=0.0, exact_match_after=0.5, parameters=2_000_000,
                      trainable_parameters=500_000)  # fmt: skip
    (folder / "checkpoint-8").mkdir()
    (folder / "checkpoint-8" / "weights").write_bytes(b"0" * 2**20)
    page = Page(run_page.render_run(Run(folder)))
    assert page.has("sft of m/tiny", "finished", "2.2000", "2.5000", "0.0% → 50.0%", "3.00 GiB", "1 min 30 s")
    assert page.has("2026-01-01 10:00:00 UTC", "2, ZeRO-2, none", "0.50 M of 2.00 M")
    assert page.has("asked this", "no", "checkpoint-8", "1.0 MiB", f"make chat RUN={folder}", "zero 2: 2 processes")
    assert page.has("python recipes/sft.py", "0.0001", "torch 2.13.0") and not page.has("transformers default")
    assert page.labels == [
        "Loss", "Learning rate", "Gradient norm", "Speed", "Peak memory per rank, planned",
    ]  # fmt: skip
    assert page.loads == []


def test_a_failed_run_says_why_and_how_to_go_on(tmp_path):
    folder = make_run(tmp_path / "a", status="failed", error="OutOfMemory: full", steps=3)
    assert Page(run_page.render_run(Run(folder))).has("failed", "OutOfMemory: full", f"make resume RUN={folder}")
    (folder / "report.json").write_text(json.dumps({"cause": "rank 1 ended", "try": "--zero 3"}))
    (folder / "metrics.jsonl").open("a").write('{"step": 9, "lo')  # killed while it wrote
    assert Page(run_page.render_run(Run(folder))).has("rank 1 ended", "Try: --zero 3")


def test_a_run_that_was_killed_before_its_first_step(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "metrics.jsonl").unlink()
    page = Page(run_page.render_run(Run(folder)))
    assert page.has("not finished", f"make resume RUN={folder}") and "Loss" not in page.labels


@pytest.mark.parametrize("told", [False, True])
def test_the_next_command_after_a_failure(told, tmp_path, capsys):
    run_page.write(make_run(tmp_path / "a", status="failed"), told)
    following = "" if told else f"next: make resume RUN={tmp_path / 'a'}    # from the start\n"
    assert capsys.readouterr().out == f"report: {tmp_path / 'a' / 'report.html'}\n{following}"


def test_no_file_is_hashed_for_the_next_command(tmp_path, monkeypatch, capsys):
    """Exit code 75 waits for the page: hashing a large checkpoint would outlast the time that SLURM leaves a job."""
    folder = make_run(tmp_path / "a", status="stopped")
    saved = folder / "checkpoint-7"
    saved.mkdir()
    for name, text in {"trainer_state.json": '{"global_step": 7}', "latest": "global_step7"}.items():
        (saved / name).write_text(text)
    (saved / "global_step7").mkdir()
    files = {f.name: [f.stat().st_size, "0"] for f in saved.iterdir() if f.is_file()}
    facts = {"recipe": "sft", "zero": "2", "world_size": 2, "offload": "none", "fingerprints": {}, "files": files}
    (saved / FACTS).write_text(json.dumps(facts))
    monkeypatch.setattr(integrity, "hash_file", lambda *_, **__: pytest.fail("a file is hashed"))
    run_page.write(folder)
    assert f"next: make resume RUN={folder}    # from step 7" in capsys.readouterr().out
    assert "saved up to step 7" in resumable.how_to_continue("interrupted", folder, 7)


def test_a_diverged_run_is_looked_into(tmp_path):
    """A resume would repeat the step: the checkpoint's learning rate goes on."""
    folder = make_run(tmp_path / "a", status="failed", error="Diverged: step 11: the gradient is nan")
    for step in (9, 10, 11):
        (folder / "nan" / f"step-{step}").mkdir(parents=True)
    (following,) = run_page.next_steps(folder)
    assert following.startswith(f"zerofit replay {folder}/nan/step-11    #")
    assert Page(run_page.render_run(Run(folder))).has(following)


def test_runs_side_by_side(tmp_path, capsys, monkeypatch):
    runs = [make_run(tmp_path / "a", 1e-4, status="finished"), make_run(tmp_path / "b c", 2e-4, status="failed")]
    monkeypatch.chdir(tmp_path)
    run_page.main(["a 'b c'"])  # as make passes them
    file = tmp_path / "report-a-b c.html"
    assert capsys.readouterr().out == f"report: {file.name}\n"
    page = Page(file.read_text())
    assert page.has("a and b c", "learning_rate", "0.0001", "0.0002", "finished", "failed")
    assert b"b c, training" in drawn(run_page._charts([Run(run) for run in runs])["Loss"])
    assert not page.has("output_dir") and not page.has("offload none")
    assert [row[0] for row in run_page.differences([Run(run) for run in runs])] == ["learning_rate"]


def test_an_integer_and_a_float_of_the_same_value_are_no_difference(tmp_path):
    runs = [Run(make_run(tmp_path / "a", 1)), Run(make_run(tmp_path / "b", 1.0))]
    assert run_page.differences(runs) == []


def test_charts_follow_dark_mode(tmp_path):
    """The page draws their background, and inverts text, grid and lines."""
    page = run_page.render_run(Run(make_run(tmp_path / "a")))
    _, dark, rules = page.partition("@media (prefers-color-scheme: dark)")
    assert dark and "figure img { filter: invert(1)" in rules.partition("} }")[0]
    assert "figure { margin: 0; background: var(--card)" in page
    for picture in re.findall(r'src="(data:[^"]+)"', page):
        assert b"<svg" in drawn(picture) and b'id="patch_1"' in drawn(picture)
        assert b"fill: none" in drawn(picture).partition(b'id="patch_1"')[2].partition(b"</g>")[0]


def test_one_logged_step_is_no_chart(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "metrics.jsonl").write_text('{"step": 6, "loss": 1.5}\n')
    page = Page(run_page.render_run(Run(folder)))
    assert page.has("1.5000") and "Loss" not in page.labels


@pytest.mark.injection
def test_texts_of_data_and_flags_are_no_markup(tmp_path):
    bad = "<script>alert(1)</script><img src=x onerror=y>"
    folder = make_run(tmp_path / "a<b>&", status="failed", error=bad,
                      samples=[{"prompt": bad + "\x1b[2J", "before": bad, "after": bad, "wanted": bad}])  # fmt: skip
    facts = json.loads((folder / "run.json").read_text())
    facts |= {"command": bad, "decisions": [bad], "recipe": bad, "device": bad, "started": bad}
    facts["arguments"]["model"] = argument(bad)
    (folder / "run.json").write_text(json.dumps(facts))
    for page in (run_page.render_run(Run(folder)), run_page.render_runs([Run(folder), Run(make_run(tmp_path / "b"))])):
        assert Page(page).has("<script>alert(1)") and "<script" not in page and "<img src=x" not in page
        assert "\x1b" not in page


ODD = (None, 10**30, -1e308, "\ud800\x1b[2J", [[]], {"a": None}, {"a": {"b": 1}})


@pytest.mark.bad_input
@pytest.mark.parametrize("file", ["run.json", "result.json", "report.json", "memory.json", "metrics.jsonl"])
def test_odd_values_in_a_folder_from_elsewhere_are_named_or_shown(tmp_path, monkeypatch, file):
    """Each value of each file in turn, and each value inside of one: a page and a status, or one sentence."""
    sample = {"prompt": "asked this", "before": "no", "after": "yes", "wanted": "yes"}
    whole = {"status": "finished", "steps": 8, "train_seconds": 90, "samples": [sample], "eval_loss": 2.0,
             "exact_match_before": 0.0, "exact_match_after": 0.5, "parameters": 2_000, "trainable_parameters": 500,
             "peak_memory_bytes": 7, "tokens_per_second": 1.0}  # fmt: skip
    folder, other = make_run(tmp_path / "a", **whole), make_run(tmp_path / "b")
    (folder / "report.json").write_text(json.dumps({"status": "failed", "cause": "rank 1 ended", "try": "--zero 3"}))
    (folder / "memory.json").write_text(json.dumps({"peak": {"step": {"parameters": 5}}}))
    lines = (folder / file).read_text().splitlines()
    right = json.loads(lines[0] if file == "metrics.jsonl" else "".join(lines))
    cases = [odd for odd in ODD if not isinstance(odd, dict)]
    for name, value in right.items():
        cases += [right | {name: odd} for odd in ODD]
        if isinstance(value, dict) and value:
            cases += [right | {name: {next(iter(value)): odd}} for odd in ODD]
        if isinstance(value, list):
            cases += [right | {name: [odd]} for odd in ODD]
    if file != "memory.json":
        monkeypatch.setattr(plots, "picture", lambda *_: "")  # takes a while
    monkeypatch.setattr(plots, "chart", lambda *_: "")  # so does this: the next test
    refused = 0
    for case in cases:
        (folder / file).write_text("\n".join([json.dumps(case), *(lines[1:] if file == "metrics.jsonl" else [])]))
        for ask in (
            lambda: status.progress(folder),
            lambda: run_page.render_run(Run(folder)),
            lambda: run_page.render_runs([Run(folder), Run(other)]),
        ):
            try:
                ask()
            except UserError as error:
                assert str(folder) in str(error) and "must be" in str(error), case
                refused += 1
    assert refused > 5


def drawn(picture: str) -> bytes:
    return base64.b64decode(picture.removeprefix("data:image/svg+xml;base64,"), validate=True)


def test_odd_numbers_have_charts():
    odd = [math.nan, math.inf, -math.inf, 1e308, -1e308, 2**62, 0]
    for value in odd:
        lines = [Series("a", [(1, value), (2**62, 1.0), (3, value)], 0), Series("b", [(1, 1.0)], 1)]
        assert b"<svg" in drawn(plots.chart("", lines, from_zero=True))
    peak = {"a$5_$6%": {"buffers": 2**62, "c": -1.5}, "": {}}
    assert b"<svg" in drawn(plots.picture(memory_figure.figure(peak, "", None)))
    assert b"<svg" in drawn(plots.picture(memory_figure.figure({"a": {}}, "", None)))


def test_names_are_no_formulas(tmp_path):
    """matplotlib takes what is between two `$` for TeX: `cost_100%_$5_$6.jsonl` made a finished run a failed one."""
    runs = [make_run(tmp_path / name, status="finished") for name in ("a$5_$6%", "\udcff_b")]
    page = run_page.render_runs([Run(run) for run in runs])
    assert b"a$5_$6%, training" in drawn(run_page._charts([Run(run) for run in runs])["Loss"])
    assert "a$5_$6%" in page
    run_page.main([str(run) for run in runs])


def test_odd_names_beside_kept_steps_are_no_steps(tmp_path):
    folder = make_run(tmp_path / "a", status="failed", error="Diverged: step 11: the gradient is nan")
    for name in ("nan/step-x", "nan/step-²", "nan/step-7", "checkpoint-²", "checkpoint-x"):
        (folder / name).mkdir(parents=True)
    (following,) = run_page.next_steps(folder)
    assert "nan/step-7 " in following


def test_long_runs_are_thinned_and_gaps_kept(tmp_path):
    folder = make_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 50_001):
            file.write(json.dumps({"step": step, "loss": float("nan") if step == 7 else 1.0}) + "\n")
    text = run_page.render_run(Run(folder))
    assert Page(text).has("50,000") and len(text) < 200_000


@pytest.mark.bad_input
def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a run folder"):
        run_page.main([str(tmp_path)])


def test_a_run_never_fails_for_its_report(tmp_path, capsys):
    folder = make_run(tmp_path / "a")
    (folder / run_page.FILE).mkdir()
    run_page.write(folder)
    assert "note: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_recipe_writes_it_at_the_end_and_on_failure(tmp_path):
    done = recipe_process("sft", *SHORT, "--output_dir", str(tmp_path / "a"))
    assert done.returncode == 0, done.stderr
    assert f"report: {tmp_path / 'a' / 'report.html'}" in done.stdout
    page = Page((tmp_path / "a" / "report.html").read_text())
    assert page.has("finished", "before", "evaluation loss") and {"Loss", "Speed"} <= set(page.labels)
    nan = ["--max_grad_norm", "1", "--learning_rate", "1e30", "--max_nan_steps", "1", "--max_steps", "20"]
    failed = recipe_process("sft", *SHORT, *nan, "--output_dir", str(tmp_path / "b"))
    assert failed.returncode != 0
    assert Page((tmp_path / "b" / "report.html").read_text()).has("failed", "zerofit replay")


@pytest.mark.slow
def test_the_supervisor_writes_it_too(tmp_path):
    words = [sys.executable, "-m", "zerofit", "sft", *SHORT, "--output_dir", str(tmp_path / "a")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.count("report: ") == 1, done.stdout + done.stderr
    assert Page((tmp_path / "a" / "report.html").read_text()).has("finished")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it(tmp_path, width, training):
    """Nothing is wider than the window, every chart has a size, and nothing is loaded."""
    folder = make_run(tmp_path / "a", status="finished", error="")
    text = run_page.render([Run(folder, training)], 15)
    probe = (
        "<script>addEventListener('load', () => { const sizes = [...document.querySelectorAll('img')].map("
        "s => s.getBoundingClientRect()); document.title = JSON.stringify([document.documentElement.scrollWidth, "
        "innerWidth, sizes.filter(s => s.width > 200 && s.height > 80).length, "
        "performance.getEntriesByType('resource').length]); });</script></body>"
    )
    (tmp_path / "page.html").write_text(text.replace("</body>", probe))
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}",
             f"--window-size={width},900", "--dump-dom", (tmp_path / "page.html").as_uri()]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=os.environ | {"HOME": str(tmp_path)})
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    scroll, inner, charts, loaded = json.loads(title)
    assert scroll <= inner and charts == 5 and loaded == 0, title
