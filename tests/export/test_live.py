"""The page and the terminal's view of a run while it trains: written again, never waited for, ended with the run."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from conftest import ROOT
from test_report import SHORT, Page, make_run

from zerofit.base.errors import UserError
from zerofit.job import run_lock
from zerofit.launch import postmortem, supervisor
from zerofit.report import live, run, run_page, watch
from zerofit.report.run import Run

RELOADS = '<meta http-equiv="refresh"'

# The process that live.Page starts, with shorter pauses; its parent is the test.
WRITER = """
import os, sys
from pathlib import Path
from zerofit.report import live
live.MIN_SECONDS, live.POLL_SECONDS, live.IDLE_FACTOR = 0.1, 0.05, 0
live.main(Path(sys.argv[1]), os.getppid() if len(sys.argv) < 3 else int(sys.argv[2]))
"""


def until(condition, seconds=300.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


@contextlib.contextmanager
def trained(folder):
    """Hold a run folder as the process does that trains into it."""
    run_lock.take(folder)
    try:
        yield folder
    finally:
        run_lock.release()


@contextlib.contextmanager
def writer(folder, *words):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder), *words])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def log(folder, **entry):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def test_the_page_is_written_when_the_logs_have_changed_and_only_then(tmp_path):
    folder = make_run(tmp_path / "a")
    page = folder / live.FILE
    with writer(folder) as process:
        until(page.exists)
        text = page.read_text()
        assert Page(text).has("training", "2.2000") and text.count(RELOADS) == 1
        before = page.stat().st_mtime_ns
        time.sleep(0.5)
        assert page.stat().st_mtime_ns == before
        log(folder, step=9, loss=0.625)
        until(lambda: page.stat().st_mtime_ns != before)
        until(lambda: Page(page.read_text()).has("0.6250"))
        assert psutil.Process(process.pid).nice() >= min(19, os.nice(0) + live.NICE)
    assert not (folder / "report.tmp").exists()


@pytest.mark.slow
def test_when_the_one_that_trains_has_ended_a_last_page_does_not_reload(tmp_path):
    """As under torchrun, where rank 0 starts it and nobody is left to write the page."""
    folder = make_run(tmp_path / "a", status="finished", steps=8)
    with writer(folder, "1" if os.getpid() != 1 else "0") as process:  # not its parent
        assert process.wait(60) == 0
    text = (folder / live.FILE).read_text()
    assert RELOADS not in text and Page(text).has("finished")


@pytest.mark.slow
@pytest.mark.fault
def test_a_page_that_cannot_be_written_ends_nothing(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / live.FILE).mkdir()
    with writer(folder) as process:
        time.sleep(2)
        assert process.poll() is None
        (folder / live.FILE).rmdir()
        until((folder / live.FILE).exists)


RANK = """
import os, sys, time
from pathlib import Path
time.sleep(1)
sys.exit(int(sys.argv[1]))
"""


def job(folder, code, monkeypatch):
    monkeypatch.setenv(live.OFF, "1")
    settings = SimpleNamespace(
        use_cpu=True, on_oom="fail", max_restarts=0, hang_timeout=0, save_only_model=False, resume_from_checkpoint=None
    )
    command = [sys.executable, "-c", RANK, str(code)]
    return supervisor.Supervised(lambda *_: command, None, settings, folder, {}, 1)


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.slow), 7])
def test_the_supervisor_starts_the_writer_and_ends_it_before_the_last_page(tmp_path, monkeypatch, code, capfd):
    folder, seen = make_run(tmp_path / "a", status="finished" if not code else "failed"), []
    own = supervisor._run_attempt

    def attempt(*words):
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.ZombieProcess):  # of an earlier test
                seen.extend([process.pid] if "zerofit.report.live" in process.cmdline() else [])
        return own(*words)

    monkeypatch.setattr(supervisor, "_run_attempt", attempt)
    assert supervisor.run(job(folder, code, monkeypatch)) == code
    assert len(seen) == 1 and not psutil.pid_exists(seen[0])
    assert RELOADS not in (folder / live.FILE).read_text()
    assert f"page: {folder / live.FILE}, updated while the run trains" in capfd.readouterr().out


def test_the_writer_can_be_turned_off(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(live.OFF, "0")
    page = live.Page(tmp_path)
    assert page._process is None and capsys.readouterr().out == ""
    page.stop()


def test_what_broke_is_told_while_the_next_attempt_trains(tmp_path):
    """report.json says between two attempts what it says at the end; an earlier start's is told as resumed."""
    folder = make_run(tmp_path / "a", status="failed", error="of an earlier attempt")
    first = postmortem.Outcome("out of memory", 3, 1, "OutOfMemory: rank 1 is full", step=4, what_next="half the batch")
    postmortem.write(folder, [first], "", continues=True)
    text = run_page.render([Run(folder, training=True)], 15)
    assert Page(text).has("Attempt 1: out of memory: rank 1 ended after step 4: rank 1 is full → half the batch")
    assert not Page(text).has("of an earlier attempt")
    assert json.loads((folder / "report.json").read_text())["status"] == "restarted"
    first.what_next = ""
    postmortem.write(folder, [first], "--zero 3")
    assert "→ resumed" in run.failures(Run(folder, training=True))[0] and run.failures(Run(folder)) == []


def test_memory_by_owner_stands_beside_the_plan(tmp_path):
    """Every column is complete: its parts add up to its last row, by numbers counted here."""
    folder = make_run(tmp_path / "a")
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(facts | {"owners": {"parameters": 2**30, "optimizer": 2**29}}))
    rows = run.memory_rows(Run(folder, True))
    assert rows == [
        ["", "planned, backward", "measured"], ["parameters", "1.00 GiB", "1.00 GiB"],
        ["optimizer", "0.00 MiB", "512.00 MiB"], ["other", "2.00 GiB", "1.50 GiB"],
        ["total", "3.00 GiB", "3.00 GiB"],
    ]  # fmt: skip
    peak = {"peak": {"forward": {"parameters": 5}, "step": {"parameters": 2**30, "activations": 2**31}}}
    (folder / "memory.json").write_text(json.dumps(peak))
    head, *rows = run.memory_rows(Run(folder, True))
    assert head == ["", "planned, backward", "measured, step"] and rows[-1] == ["total", "3.00 GiB", "3.00 GiB"]


def test_the_time_that_is_left_is_that_of_the_present_stretch(tmp_path):
    """Resumed at step 4 an hour ago, 4 steps since: an hour for each four of the 16 steps that are left."""
    folder = make_run(tmp_path / "a")
    facts = json.loads((folder / "run.json").read_text())
    begun = time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime((folder / "metrics.jsonl").stat().st_mtime - 3600))
    facts |= {"started": begun, "total_steps": 24, "stretches": [{"from_step": 0, "to_step": 4}]}
    (folder / "run.json").write_text(json.dumps(facts))
    assert run.position(Run(folder, True)) == (8, 24)
    assert run.seconds_left(Run(folder, True)) == pytest.approx(4 * 3600, abs=8)
    assert run.seconds_left(Run(make_run(tmp_path / "b"), True)) is None


def test_two_runs_are_laid_side_by_side_until_both_have_ended(tmp_path, monkeypatch, capsys):
    folders, pages, locks = [make_run(tmp_path / name) for name in ("a", "b")], [], contextlib.ExitStack()
    locks.enter_context(trained(folders[0]))

    def sleep(seconds):
        pages.append((tmp_path / "report-a-b.html").read_text())
        (folders[0] / "result.json").write_text('{"status": "finished"}') if len(pages) == 2 else None
        log(folders[0], step=8 + len(pages), loss=0.5)
        locks.close() if len(pages) == 2 else None

    monkeypatch.setattr(run_page.time, "sleep", sleep)
    run_page.main([*map(str, folders), "--every", "30"])
    assert [f'{RELOADS} content="30"' in page for page in pages] == [True, True]
    last = (tmp_path / "report-a-b.html").read_text()
    assert RELOADS not in last and "training" not in Page(last).texts
    assert Page(pages[1]).has("training", "not finished") and Page(last).has("finished", "0.5000")
    assert capsys.readouterr().out.count("report: ") == 3


@pytest.mark.bad_input
@pytest.mark.parametrize(("main", "words"), [(run_page.main, ["1"]), (run_page.main, ["nan"]), (watch.main, ["0"])])
def test_pauses_out_of_range_are_refused(tmp_path, main, words):
    with pytest.raises(UserError, match=r"--every \S+: must be between"):
        main([str(make_run(tmp_path / "a")), "--every", *words])


BAD = "<script>alert(1)</script>\x1b[2J\r\n\u202e\x9b31m" + "全" * 60


@pytest.mark.injection
def test_texts_stay_text_in_the_live_page_and_in_the_terminal(tmp_path):
    folder = make_run(tmp_path / "a<b>", status="failed", error=BAD)
    facts = json.loads((folder / "run.json").read_text())
    facts |= dict.fromkeys(("command", "recipe", "device", "started"), BAD) | {"decisions": [BAD], "slow_ranks": [BAD]}
    facts |= {"owners": {BAD: 5}, "arguments": {"model": {"value": BAD, "source": BAD}}}
    (folder / "run.json").write_text(json.dumps(facts))
    attempt = {"kind": BAD, "sentence": BAD, "what_next": BAD}
    (folder / "report.json").write_text(json.dumps({"cause": BAD, "try": BAD, "attempts": [attempt]}))
    for training in (True, False):
        page = run_page.render([Run(folder, training)], 15)
        assert Page(page).has("<script>alert(1)") and "<script" not in page
        for width in (20, 70, 100):
            for line in watch.frame(Run(folder, training), width):
                assert watch.columns_of(line) <= width and not re.search(r"[\x00-\x1f\x7f-\x9f\u202e]", line)


def test_without_a_terminal_watch_prints_one_frame(tmp_path, capsys):
    with trained(make_run(tmp_path / "a")) as folder:
        watch.main([str(folder)])
    out = capsys.readouterr().out
    assert "training" in out and "2.2" in out and "decisions" in out and "\x1b" not in out
    assert max(map(watch.columns_of, out.splitlines())) <= 100


def test_an_encoding_without_blocks_has_a_chart_too(tmp_path):
    levels = watch._levels("ascii")
    assert "\n".join(watch.frame(Run(make_run(tmp_path / "a")), 80, levels)).isascii()
    assert watch._levels("utf-8") == watch.BLOCKS and watch._levels(None) == watch.ASCII


@pytest.mark.slow
def test_in_a_terminal_watch_ends_with_the_run(tmp_path):
    """Frames over each other, none of them higher than the terminal, and the last one stays."""
    folder = make_run(tmp_path / "a")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "zerofit", "watch", str(folder), "--every", "0.5"]
    env = os.environ | {"COLUMNS": "100", "LINES": "20", "TERM": "xterm"}
    with trained(folder):
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        out = b""
        while out.count(watch.HOME.encode()) < 2:
            out += os.read(ours, 65536)
        (folder / "result.json").write_text('{"status": "finished", "steps": 8}')
    with contextlib.suppress(OSError):  # EIO: the terminal's other end is closed
        while more := os.read(ours, 65536):
            out += more
    assert process.wait(60) == 0
    frames = out.decode().split(watch.HOME)[1:]
    assert "training" in frames[0] and "finished" in frames[-1]
    assert all(frame.count("\n") < 20 for frame in frames)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["zerofit", "python"])
def test_a_real_run_has_a_live_page_and_then_its_last(tmp_path, launcher):
    """Under the supervisor and without one, where rank 0 starts the writer and nothing waits for it."""
    folder = tmp_path / "a"
    words = ["zerofit", "sft"] if launcher == "zerofit" else [str(ROOT / "recipes" / "sft.py")]
    words = [sys.executable, *(["-m"] if launcher == "zerofit" else []), *words, *SHORT, "--max_steps", "600",
             "--memory_limit", "2", "--output_dir", str(folder)]  # fmt: skip
    process = subprocess.Popen(words, env=os.environ | {live.OFF: "1"}, stdout=subprocess.PIPE, text=True)
    page, shown = folder / live.FILE, ("training", "planned, ", "measured")
    until(lambda: process.poll() is not None or (page.exists() and Page(page.read_text()).has(*shown)), 500)
    assert process.poll() is None, f"the run ended before a page showed {shown}; more steps are needed"
    assert RELOADS in page.read_text()
    process.terminate()
    out = process.communicate(timeout=300)[0]
    assert process.returncode == 75 and out.count("updated while the run trains") == 1, out
    until(lambda: RELOADS not in page.read_text(), 60)
    assert Page(page.read_text()).has("stopped", f"resume RUN={folder}")
    owners = json.loads((folder / "run.json").read_text())["owners"]
    assert 4 * 853_120 <= owners["parameters"] < 4.1 * 853_120  # fp32, and the rotary embedding's buffers
    assert 8 * 853_120 <= owners["optimizer"] < 8.1 * 853_120  # Adam's two states
    until(lambda: not any(str(folder) in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])))
