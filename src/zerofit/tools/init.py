"""`zerofit init`: create a folder with editable recipes, DeepSpeed files, launchers, examples and a Makefile."""

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from zerofit.base.errors import UserError
from zerofit.base.paths import ROOT

FOLDERS = ("recipes", "deepspeed_configs", "launchers", "examples")

# The repository's Makefile installs into .venv; a project's Makefile uses the environment of this `zerofit`.
REPOSITORY = "# --- repository only:"  # the verbs below this line are left out
CHANGES = {
    "PYTHON ?= python3\n": "PYTHON ?= {python}\n",
    "ENV ?= .venv\n": "ENV ?= active\n",
    "STAMP := $(PREFIX)/.zerofit-installed\n": "STAMP :=\n",
}


def main(argv: list[str]) -> None:
    """`zerofit init`: see --help.

    Raises: UserError for a folder that is not empty or cannot be written to.
    """
    parser = argparse.ArgumentParser(prog="zerofit init", allow_abbrev=False, description=__doc__)
    parser.add_argument("folder", help="a new or an empty folder")
    folder = Path(parser.parse_args(argv).folder).expanduser()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not an empty folder; name a new one.")
    try:
        for name in FOLDERS:  # without the bundled tiny task
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "tiny"))
        (folder / "Makefile").write_text(makefile(), encoding="utf-8")
        (folder / ".gitignore").write_text("runs/\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to: {error.strerror}.") from None
    print(
        f"created {folder} with recipes/, deepspeed_configs/, launchers/, examples/ and a Makefile, all yours to edit. "
        f"Try:\n  cd {shlex.quote(str(folder))}\n  make sft\n  make sft MODEL=Qwen/Qwen3-0.6B DATA=data.jsonl"
    )


def makefile() -> str:
    """Return a project's Makefile: the repository's without its development verbs and its installation."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    head, mark, _ = text.partition(REPOSITORY)
    assert mark, f"the Makefile lacks the line {REPOSITORY!r}"
    for before, after in CHANGES.items():
        assert head.count(before) == 1, before
        head = head.replace(before, after.format(python=_interpreter()))
    return head


def _interpreter() -> str:
    """Return this interpreter for a Makefile, without resolving the link of a virtual environment."""
    return os.path.abspath(sys.executable).replace("$", "$$")  # noqa: PTH100
