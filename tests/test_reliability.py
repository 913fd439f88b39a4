"""docs/reliability.md and its note: how results are counted, that the pages are there and tests of each kind marked."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import reliability
import results

TESTS = """
import pytest

@pytest.mark.fault
def test_holds(record_property):
    record_property("cases", 5)

@pytest.mark.fault
@pytest.mark.parametrize("held", [True, False])
def test_fails_once(held):
    assert held

@pytest.mark.fault
@pytest.mark.skip(reason="no disk")
def test_skipped():
    pass

@pytest.mark.fault
@pytest.mark.slow
def test_long():
    pass

@pytest.fixture
def broken():
    yield
    raise OSError

@pytest.mark.injection
def test_whose_end_fails(broken):
    pass

@pytest.mark.oracle
@pytest.mark.parametrize("difference", [1e-7, 3e-6])
def test_difference(difference, record_property):
    record_property("relative_difference", difference)

def test_of_no_kind():
    assert False
"""


def test_results_are_counted(tmp_path):
    """A second run with the same file runs only what has not passed."""
    (tmp_path / "test_some.py").write_text(TESTS)
    marks = f"({' or '.join(results.KINDS)}) and not slow"
    words = ["-q", "-m", marks, "-p", "results", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".", "."]
    command, file = [sys.executable, "-m", "pytest", "--results=results.jsonl", *words], tmp_path / "results.jsonl"
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    for tests in (7, 2):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        ran = sum(int(n) for n in re.findall(r"(\d+) (?:passed|failed|skipped)", done.stdout.splitlines()[-1]))
        assert ran == tests, done.stdout + done.stderr
    passed = subprocess.run([*command, "-k", "test_holds"], cwd=tmp_path, env=env, capture_output=True, timeout=60)
    assert passed.returncode == 0  # nothing is left to run
    kinds = list(reliability.KINDS)
    rows = reliability.rows_of(results.read(file), kinds)
    lines = [*reliability.sums(rows, kinds), *reliability.tables(rows, kinds)]
    fault = "| 7 | 6 | `test_fails_once[False]` | 1 (marked slow), 1 (no disk) |"
    assert f"| faults {fault} - |" in lines and f"| `test_some.py` {fault}" in lines
    assert "| injections | 1 | 0 | `test_whose_end_fails` |  | - |" in lines
    assert "| `test_some.py` | 2 | 2 |  |  | 3.0e-06 |" in lines
    assert "| bad inputs | 0 | 0 |  |  | - |" in lines


@pytest.mark.parametrize(("page", "tables"), [(reliability.PAGE, 1), (reliability.DETAILS, 4)])
def test_the_generated_part_of_a_page_parses(page, tables):
    text = page.read_text()
    assert text.count(reliability.BEGIN) == text.count(reliability.END) == 1
    generated = text.partition(reliability.BEGIN)[2].partition(reliability.END)[0]
    if page == reliability.PAGE:
        assert re.search(r"^`python benchmarks/reliability\.py.*`$", generated, re.M)
        assert re.search(r"^\d{4}-\d\d-\d\d, commit \w+", generated, re.M) and "pytest" not in generated
    found = re.findall(r"(?:^\|.*\|\n)+", generated, re.M)
    assert len(found) == tables
    for rows in found:
        head, _, *body = [re.split(r" \| ", row.strip("| \n")) for row in rows.splitlines()]
        assert head[0] == "tried" and body
    counts = [
        [int(n.replace(",", "")) for n in pair]
        for pair in re.findall(r"^\| [^|]+ \| ([\d,]+) \| ([\d,]+) \|", generated, re.M)
    ]
    assert counts and all(held <= tried for tried, held in counts)
    assert reliability.written(text, generated.strip("\n").splitlines()).split() == text.split()


@pytest.mark.parametrize("kind", reliability.KINDS)
def test_tests_of_every_kind_are_marked(kind):
    marked = [line for file in (ROOT / "tests").rglob("test_*.py") if file.name != "test_reliability.py"
              for line in file.read_text().splitlines() if f"pytest.mark.{kind}" in line]  # fmt: skip
    assert len(marked) >= 15
