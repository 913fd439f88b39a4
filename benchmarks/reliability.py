"""Count the faults, bad inputs, attacks and independent computations that the tests try, and their results.

python benchmarks/reliability.py                              # the part that `make test` runs
python benchmarks/reliability.py --slow --write               # the long tests too; into the docs
python benchmarks/reliability.py --kinds bad_input injection  # two kinds only

Runs the tests that are marked fault, bad_input, injection or oracle. A test that tries several things reports their
number with record_property("cases", n); an oracle its largest difference with record_property("relative_difference",
x). The exit code is 1 if anything failed.
--write puts the sums into docs/reliability.md and a row for each file into benchmarks/results/reliability.md.
"""

import argparse
import shlex
import sys
from collections import Counter
from dataclasses import dataclass, field

import machine
import pytest

PAGE = machine.ROOT / "docs" / "reliability.md"
DETAILS = machine.ROOT / "benchmarks" / "results" / "reliability.md"
BEGIN, END = "<!-- written by benchmarks/reliability.py: begin -->", "<!-- end -->"
KINDS = {"fault": "faults", "bad_input": "bad inputs", "injection": "injections", "oracle": "oracles"}
HEADS = ("tried", "held", "failed", "not run here", "largest relative difference")
ELSEWHERE = ("cluster", "slow")  # marks of tests that run only on request


@dataclass
class Row:
    """Results of the tests of one kind in one file."""

    tried: int = 0
    held: int = 0
    skipped: Counter = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    difference: float | None = None


class Recorder:
    """Pytest plugin that counts the results of the marked tests in `rows`, by kind and file."""

    def __init__(self, kinds: list[str]):
        self.kinds = kinds
        self.rows: dict[tuple[str, str], Row] = {}
        self.kinds_of: dict[str, list[str]] = {}
        self.reports: dict[str, list] = {}

    def pytest_itemcollected(self, item):
        marks = {mark.name for mark in item.iter_markers()}
        self.kinds_of[item.nodeid] = [kind for kind in self.kinds if kind in marks]

    def pytest_deselected(self, items):
        for item in items:
            mark = next((mark for mark in ELSEWHERE if item.get_closest_marker(mark)), None)
            for row in self._rows(item.nodeid) if mark else ():
                row.skipped[f"marked {mark}"] += 1

    def pytest_runtest_logreport(self, report):
        self.reports.setdefault(report.nodeid, []).append(report)

    def pytest_runtest_logfinish(self, nodeid):
        reports = self.reports.pop(nodeid, [])
        said = dict(reports[-1].user_properties) if reports else {}
        for row in self._rows(nodeid):
            count(row, nodeid, reports, said)

    def _rows(self, nodeid: str) -> list[Row]:
        file = nodeid.split("::")[0]
        return [self.rows.setdefault((kind, file), Row()) for kind in self.kinds_of[nodeid]]


def count(row: Row, nodeid: str, reports: list, said: dict) -> None:
    """Add one finished test to a row. No case of a failed test counts as held."""
    skipped = next((report for report in reports if report.skipped), None)
    if skipped:
        row.skipped[skipped.longrepr[2].removeprefix("Skipped: ")] += 1
        return
    cases = said.get("cases", 1)
    row.tried += cases
    if any(report.failed for report in reports):
        row.failed.append(nodeid.split("::", 1)[1])
    else:
        row.held += cases
    if "relative_difference" in said:
        row.difference = max(row.difference or 0.0, said["relative_difference"])


def total(rows: list[Row]) -> Row:
    """Return the sum of rows, and the largest difference of any."""
    differences = [row.difference for row in rows if row.difference is not None]
    return Row(
        sum(row.tried for row in rows),
        sum(row.held for row in rows),
        sum((row.skipped for row in rows), Counter()),
        [name for row in rows for name in row.failed],
        max(differences, default=None),
    )


def line(name: str, row: Row, with_difference: bool) -> str:
    """Return one line of a table."""
    skipped = ", ".join(f"{n} ({reason})" for reason, n in sorted(row.skipped.items()))
    cells = [name, f"{row.tried:,}", f"{row.held:,}", ", ".join(f"`{name}`" for name in row.failed), skipped]
    if with_difference:
        cells.append("-" if row.difference is None else f"{row.difference:.1e}")
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def by_kind(rows: dict[tuple[str, str], Row], kinds: list[str]) -> dict[str, dict[str, Row]]:
    """Return {kind: {file: row}}."""
    return {kind: {file: row for (of, file), row in sorted(rows.items()) if of == kind} for kind in kinds}


def sums(rows: dict[tuple[str, str], Row], kinds: list[str]) -> list[str]:
    """Return the Markdown lines of a table of the kinds."""
    found = {KINDS[kind]: total(list(of_file.values())) for kind, of_file in by_kind(rows, kinds).items()}
    return table(found, "oracle" in kinds)


def tables(rows: dict[tuple[str, str], Row], kinds: list[str]) -> list[str]:
    """Return the Markdown lines of a table by test file for each kind."""
    lines = []
    for kind, of_file in by_kind(rows, kinds).items():
        named = {f"`{file}`": row for file, row in of_file.items()}
        lines += ["", f"## {KINDS[kind].capitalize()}", *table(named, kind == "oracle")]
    return lines


def table(rows: dict[str, Row], with_difference: bool) -> list[str]:
    """Return the lines of one table."""
    heads = ["", *HEADS[: None if with_difference else -1]]
    rule = "|" + "---|" * len(heads)
    return ["", f"| {' | '.join(heads)} |", rule, *(line(name, row, with_difference) for name, row in rows.items())]


def section(facts: dict) -> list[str]:
    """Return the lines that say how the numbers were counted."""
    command = shlex.join(["python", "benchmarks/reliability.py", *sys.argv[1:]])
    return [f"`{command}`", "", *machine.describe(facts, {"versions": machine.versions()})]


def written(page: str, lines: list[str]) -> str:
    """Return the page with these lines between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, *lines, "", END + after])


def main() -> int:
    """Run the marked tests, print the tables and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="only these")
    parser.add_argument("--slow", action="store_true", help="the tests marked slow too (hours)")
    parser.add_argument(
        "--cluster", action="store_true", help="those marked cluster too (make test-cluster installs their needs)"
    )
    parser.add_argument("--write", action="store_true", help="write the result into the docs")
    options = parser.parse_args()
    left_out = [mark for mark in ELSEWHERE if not getattr(options, mark)]
    marks = " and ".join([f"({' or '.join(options.kinds)})", *(f"not {mark}" for mark in left_out)])
    facts, recorder = machine.facts(), Recorder(options.kinds)
    code = pytest.main(["-m", marks, "-q", "--rootdir", str(machine.ROOT), str(machine.ROOT / "tests")], [recorder])
    about, rows = section(facts), recorder.rows
    parts = {PAGE: [*about, *sums(rows, options.kinds)], DETAILS: tables(rows, options.kinds)}
    print("\n" + "\n".join(parts[PAGE] + parts[DETAILS]))
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(
            f"\nthe tests did not run to their end ({pytest.ExitCode(code).name}): nothing is written", file=sys.stderr
        )
    elif options.write:
        for page, lines in parts.items():
            page.write_text(written(page.read_text(encoding="utf-8"), lines), encoding="utf-8")
            print(f"\nwritten: {page.relative_to(machine.ROOT)}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
