"""What a terminal shows: step lines, and one live progress line below them."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest
from conftest import TINY
from tqdm import tqdm

from zerofit.base import paths
from zerofit.config import defaults, parse
from zerofit.job import run_folder
from zerofit.train import progress


def screen(text):
    """The lines that a terminal shows after this output."""
    lines, column = [""], 0
    for piece in re.split(r"(\r|\n)", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)):
        if piece == "\n":
            lines.append("")
        if piece in ("\r", "\n"):
            column = 0
            continue
        lines[-1] = lines[-1][:column] + piece + lines[-1][column + len(piece) :]
        column += len(piece)
    return [line.rstrip() for line in lines]


def test_lines_stand_above_the_progress_line(monkeypatch):
    terminal, log = io.StringIO(), io.StringIO()
    out, err = run_folder._Tee(terminal, log), run_folder._Tee(terminal, log)
    bar = tqdm(total=3, file=terminal, leave=False, mininterval=0, bar_format="step {n}/{total}, and more words")
    monkeypatch.setattr(run_folder._Tee, "bar", None)
    run_folder.keep_below(bar)
    for step in (1, 2, 3):
        print(f"a{step}", file=out)
        bar.update()
        print("note:", step, file=err)
    assert screen(terminal.getvalue())[:7] == ["a1", "note: 1", "a2", "note: 2", "a3", "note: 3",
                                               "step 3/3, and more words"]  # fmt: skip
    run_folder.keep_below(None)
    bar.close()
    print("end", file=out)
    assert screen(terminal.getvalue())[6:] == ["end", ""]
    assert log.getvalue() == "a1\nnote: 1\na2\nnote: 2\na3\nnote: 3\nend\n"


def test_the_model_is_named_and_how_much_of_it_trains(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    named = parse.settings_of(parse.request("sft", ["--model", f"{tmp_path}/m", "--data", "d.jsonl"]), 1)
    assert progress.model_sentence(named, 5_000, 5_000) == "model: m; 5,000 parameters, all trainable"
    unnamed = parse.settings_of(parse.request("lora", ["--data", "d.jsonl"]), 1)
    defaults.fill_defaults(unnamed)
    assert "(the bundled model: --model is not set); " in progress.model_sentence(unnamed, 5, 1_000)
    assert progress.model_sentence(named, 5, 1_000).endswith("; 1,000 parameters, 5 trainable (0.50%)")


def test_paths_into_the_current_folder_are_shortened(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert paths.from_here(f"rows from {tmp_path}/a.jsonl, /mnt{tmp_path}/b") == f"rows from a.jsonl, /mnt{tmp_path}/b"


@pytest.mark.parametrize(("ranks", "shown"), [(1, "2,000 tok/s  peak"), (2, "2,000 tok/s (1,000 per rank)  peak")])
def test_the_speed_of_a_rank_is_shown_where_there_are_several(ranks, shown):
    trainer = SimpleNamespace(
        settings=SimpleNamespace(world_size=ranks, save_every_minutes=0, early_stopping_patience=None)
    )
    logs = {"loss": 1.0, "learning_rate": 0.1, "tokens_per_second": 2000, "tokens_per_second_per_gpu": 2000 / ranks,
            "peak_memory_bytes": 2**30}  # fmt: skip
    assert shown in progress.Reporter(trainer)._line(SimpleNamespace(global_step=1, max_steps=2), logs)


def on_a_terminal(words, cwd):
    """Run a command on a terminal of its own; return what it shows and its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 150, 0, 0))
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, start_new_session=True)
    os.close(theirs)
    text = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # Linux's end of a terminal
            break
        if not piece:
            break
        text += piece
    os.close(ours)
    return text.decode(), process.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", "lora", "dpo"])
def test_a_terminal_shows_our_lines_only_and_ends_with_the_next_command(tmp_path, recipe):
    rows = TINY / "preference" if recipe == "dpo" else TINY
    words = [sys.executable, "-m", "zerofit", recipe, "--gpus", "2" if recipe == "sft" else "1",
             "--data", str(rows / "train.jsonl"), "--eval_data", str(rows / "eval.jsonl"), "--max_samples", "64",
             "--max_steps", "6", "--logging_steps", "2", "--eval_strategy", "steps", "--eval_steps", "3",
             "--save_strategy", "steps", "--save_steps", "3", "--output_dir", "run"]  # fmt: skip
    text, code = on_a_terminal(words, tmp_path)
    assert code == 0, text
    lines = [line for line in screen(text) if line]
    assert re.search(r"\|\s+step \d/6  .* left", text), text  # the live line was there, and is gone:
    known = (
        r"zerofit |  - |    |note: |step \d|  (prompt|before|after|expected) |exact match|preference|model: |adapter: "
    )
    known += r"|certificate: |report: |next: |plan: |rows: |reference log"
    assert [line for line in lines if not re.match(known, line)] == []
    assert lines[-2:] == ["report: run/report.html", "next: make chat RUN=run or make export RUN=run"]
