"""Pages of docs/ that can be read: short pages, short cells, notes that the index leads to."""

import re

import pytest
from conftest import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))  # docs/notes has measurements and derivations, of any length
PAGE_WORDS, CELL_WORDS = 900, 25
LONGER = {
    "coming-from.md": "made from the tables of zerofit convert: a row for each key",
    "code.md": "made from the code: a line for each file and each patch",
    "compatibility.md": "made from the code: a row for each technique",
    "flags.md": "made from the code: a row for each flag",
    "models.md": "made from the results of make models: a row for each type",
    "troubleshooting.md": "a row for each symptom, found by searching",
}


def cells(text):
    """Yield the line number and words of each table cell outside code blocks."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.startswith("```")
        if line.startswith("|") and not code:
            for cell in re.split(r"(?<!\\)\|", line.strip("| ")):
                yield number, cell.split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_cell_is_short(page):
    assert [(number, len(words)) for number, words in cells(page.read_text()) if len(words) > CELL_WORDS] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_short(page):
    words = len(page.read_text().split())
    assert words <= PAGE_WORDS or page.name in LONGER, "move measurements and derivations to docs/notes"


def test_the_notes_are_listed():
    index = (DOCS / "notes" / "README.md").read_text()
    assert [note.name for note in DOCS.glob("notes/*.md") if note.name != "README.md" and note.name not in index] == []
