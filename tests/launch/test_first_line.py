"""A command says what it starts before the libraries load, which takes seconds."""

import subprocess
import sys

import pytest
from conftest import ROOT

from zerofit import cli

WORDS = {
    "launch recipes/lora.py": "zerofit lora: starting",
    "lora": "zerofit lora: starting",
    "data": "zerofit data: starting",
    "chat runs/x": "zerofit chat: starting",
    "resume runs/x": "zerofit resume: starting",
    "export runs/x": "zerofit export: starting",
    "launch --show recipes/sft.py": "",
    "doctor --json": "",
    "data --help": "",
}


@pytest.mark.parametrize("words", WORDS)
def test_the_first_line_comes_before_the_libraries(words, monkeypatch, capsys):
    def imports(*_):
        raise SystemExit

    monkeypatch.setattr(cli, "_check_and_import", imports)
    monkeypatch.setattr(sys, "argv", ["zerofit", *words.split()])
    with pytest.raises(SystemExit):
        cli.main()
    out, err = capsys.readouterr()
    assert (out + err).startswith(WORDS[words]) and bool(out + err) == bool(WORDS[words])


def test_it_is_printed_at_once():
    """Neither torch nor transformers are imported before it."""
    code = (
        "import sys; sys.argv = ['zerofit', 'data']; from zerofit import cli; cli._check_and_import = lambda *_: "
        "sys.exit(bool({'torch', 'transformers'} & {*sys.modules})); cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("zerofit data: starting"), done.stderr
