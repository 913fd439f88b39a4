"""The pages of docs/ are short, listed in docs/README.md and llms.txt, and have the tables made from the code."""

import functools
import re
import shlex
import sys
from dataclasses import fields

import everything
import pytest
from conftest import ROOT

from zerofit.base.errors import UserError
from zerofit.commands import compatible, models
from zerofit.config import arguments, parse
from zerofit.convert import kits
from zerofit.job import program
from zerofit.launch import make_variables
from zerofit.model import patches
from zerofit.tools import convert

sys.path.insert(0, str(ROOT / "docs"))
import tables

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
PAGE_WORDS, CELL_WORDS, ALL_WORDS, README_WORDS = 1_400, 25, 33_000, 1_100


def cells(text):
    """Yield the line number and words of each table cell outside code blocks."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.startswith("```")
        if line.startswith("|") and not code:
            for cell in re.split(r"(?<!\\)\|", line.strip("| ")):
                yield number, cell.split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_and_its_cells_are_short(page):
    assert [(number, len(words)) for number, words in cells(page.read_text()) if len(words) > CELL_WORDS] == []
    assert len(page.read_text().split()) <= PAGE_WORDS, "measurements are kept in benchmarks/results"


def test_the_docs_stay_small():
    assert len(PAGES) <= 33
    assert sum(len(page.read_text().split()) for page in PAGES) <= ALL_WORDS
    assert len((ROOT / "README.md").read_text().split()) <= README_WORDS


def test_every_page_is_listed():
    index, for_agents = (DOCS / "README.md").read_text(), (ROOT / "llms.txt").read_text()
    assert [page.name for page in PAGES if page.name != "README.md" and f"({page.name})" not in index] == []
    assert [page.name for page in PAGES if f"(docs/{page.name})" not in for_agents] == []


def test_the_tables_of_the_site_are_complete():
    flags = "\n".join(tables.flags())
    assert all(f"| `--{field.name}` |" in flags for field in fields(arguments.RunArguments))
    keys = "\n".join(tables.keys())
    assert all(f"## {kit.name} " in keys for kit in kits.KITS)
    assert "[trainer.py](../src/zerofit/train/trainer.py)" in (code := "\n".join(tables.code()))
    assert patches.__doc__.splitlines()[0].rstrip(".") in code and code.count("| model/patches.py |") > 3
    assert "cannot be combined with" in "\n".join(tables.compatibility())
    assert "- `llama`: all checks pass" in tables.models()


def test_the_verbs_print_the_tables(capsys):
    """A technique by its flag or name, model types, and the keys of a kit."""
    compatible.main(["--fp8", "packing"])
    printed = capsys.readouterr().out
    assert "`--fp8 true --bf16 true` cannot be combined with" in printed and "`--packing true`" in printed
    models.main(["llama"])
    assert capsys.readouterr().out == "- `llama`: all checks pass\n"
    convert.main(["--keys", "trl"])
    assert capsys.readouterr().out.startswith("## TRL ")
    for verb, word in ((compatible, "--nothing"), (models, "nothing")):
        with pytest.raises(UserError, match="nothing: not "):
            verb.main([word])


# Flags of other programs (torchrun, deepspeed, pip, docker, sbatch, kubectl, hf, lm_eval, rsync), and of tables.
OTHER_FLAGS = """
    nproc_per_node nnodes rdzv_backend rdzv_id rdzv_endpoint signals-to-handle shutdown-timeout max-restarts num_gpus
    from no-deps no-binary no-index find-links rm shm-size ulimit volume build-arg ntasks ntasks-per-node nodes
    gpus-per-node cpus-per-task time signal requeue open-mode kill-on-bad-exit partition account from-literal private
    model_args apply_chat_template ignore-existing loss_factor disk help version
"""


@functools.cache
def known_flags() -> set[str]:
    """Return the flags of all recipes, verbs and runners of tests, without dashes."""
    recipes = {name for recipe in program.kit().values() for name in parse.argument_names(recipe)}
    files = [file for folder in ("src", "examples", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    files += [file for file in (ROOT / "tests").glob("*.py") if not file.name.startswith("test_")]
    verbs = {flag for file in files for flag in re.findall(r"--([a-z][\w-]*)", file.read_text())}
    return recipes | verbs | {*OTHER_FLAGS.split()}


def flags_of(text: str) -> set[str]:
    return {flag.rstrip("-") for flag in re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", text)}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_flags_of_a_page_exist(page):
    assert flags_of(page.read_text()) - known_flags() == set(), "flags that no program has"


def test_flags_of_every_suite_exist():
    """docs/evidence.md has the command of each suite that was run."""
    assert flags_of("\n".join(suite.command for suite in everything.SUITES)) - known_flags() == set()


def make_lines(text: str):
    """Yield the words of each make line in a page: of tables and blocks, without "..." and comments."""
    for line in re.findall(r"(?:^ *|\$ |`)(make [a-z][^`\n]*?)(?= +#|`| *$)", text, re.M):
        for command in line.replace("...", "").split(" & "):
            yield shlex.split(command)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_make_lines_of_a_page_are_accepted(page):
    """Variables by the check of every make line; flags and values by the recipe's parser."""
    for words in make_lines(page.read_text()):
        verbs = [word for word in words[1:] if "=" not in word]
        variables = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        env = variables | {"ZEROFIT_GOALS": " ".join(verbs), "ZEROFIT_GIVEN": " ".join(variables)}
        assert {*verbs} <= {*make_variables.VERBS, "help"}, words
        missing = [f"make {verb}: {text}" for verb, text in make_variables.REQUIRED.items()]  # a table names the verb
        errors = [error for error in make_variables.check(env)[0] if error not in missing]
        assert errors == [], words
        if verbs and verbs[-1] in program.kit() and "CONFIG" not in variables and "--help" not in words[-1]:
            added = [word for word in make_variables.words(verbs[-1], env) if word.startswith("--")]
            names = parse.argument_names(program.kit()[verbs[-1]])
            flags = [word for word in added if word[2:].partition("=")[0] in names and not word.endswith("=")]
            parse.request(verbs[-1], [*flags, *shlex.split(variables.get("ARGS", ""))])
