"""Count the faults, bad inputs, attacks and independent computations that the tests try, and their results.

python benchmarks/reliability.py                              # the part that `make test` runs
python benchmarks/reliability.py --slow --write               # the long tests too; into the docs
python benchmarks/reliability.py --kinds bad_input injection  # two kinds only
python benchmarks/reliability.py --results runs/everything/*/*.jsonl --write    # of tests that have run; runs none

Runs the tests that are marked fault, bad_input, injection or oracle. A test that tries several things reports their
number with record_property("cases", n); an oracle its largest difference with record_property("relative_difference",
x). The exit code is 1 if anything failed.
--write puts the sums into docs/reliability.md and a row for each file into benchmarks/results/reliability.md.
"""

import argparse
import shlex
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import machine
import pytest

sys.path.append(str(machine.ROOT / "tests"))
import results

PAGE = machine.ROOT / "docs" / "reliability.md"
DETAILS = machine.ROOT / "benchmarks" / "results" / "reliability.md"
BEGIN, END = "<!-- written by benchmarks/reliability.py: begin -->", "<!-- end -->"
KINDS = dict(zip(results.KINDS, ("faults", "bad inputs", "injections", "oracles"), strict=True))
HEADS = ("tried", "held", "failed", "not run here", "largest relative difference")


@dataclass
class Row:
    """Results of the tests of one kind in one file."""

    tried: int = 0
    held: int = 0
    skipped: Counter = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    difference: float | None = None


def rows_of(tests: list[dict], kinds: list[str]) -> dict[tuple[str, str], Row]:
    """Return {(kind, file): row}. tests: what `results.read` returns."""
    rows: dict[tuple[str, str], Row] = {}
    for test in tests:
        for kind in set(test.get("kinds", ())) & {*kinds}:
            count(rows.setdefault((kind, test["test"].split("::")[0]), Row()), test)
    return rows


def count(row: Row, test: dict) -> None:
    """Add one test to a row. No case of a failed test counts as held."""
    if test["outcome"] in ("skipped", "deselected"):
        row.skipped[test["reason"]] += 1
        return
    cases = test.get("cases", 1)
    row.tried += cases
    if test["outcome"] == "failed":
        row.failed.append(test["test"].split("::", 1)[1])
    else:
        row.held += cases
    if "relative_difference" in test:
        row.difference = max(row.difference or 0.0, test["relative_difference"])


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
    parser.add_argument("--results", nargs="+", type=Path, help="count these files of `pytest --results`; run nothing")
    options = parser.parse_args()
    if missing := [str(file) for file in options.results or () if not file.is_file()]:
        parser.error(f"--results {' '.join(missing)}: no such file")
    left_out = [mark for mark in results.ELSEWHERE if not getattr(options, mark)]
    marks = " and ".join([f"({' or '.join(options.kinds)})", *(f"not {mark}" for mark in left_out)])
    facts, code = machine.facts(), pytest.ExitCode.OK
    with tempfile.TemporaryDirectory() as folder:
        files = options.results or [Path(folder) / "results.jsonl"]
        if not options.results:
            place = ["--rootdir", str(machine.ROOT), str(machine.ROOT / "tests")]
            code = pytest.main(["-m", marks, "-q", f"--results={files[0]}", *place])
        rows = rows_of(results.read(*files), options.kinds)
    parts = {PAGE: [*section(facts), *sums(rows, options.kinds)], DETAILS: tables(rows, options.kinds)}
    print("\n" + "\n".join(parts[PAGE] + parts[DETAILS]))
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(
            f"\nthe tests did not run to their end ({pytest.ExitCode(code).name}): nothing is written", file=sys.stderr
        )
    elif options.write:
        for page, lines in parts.items():
            page.write_text(written(page.read_text(encoding="utf-8"), lines), encoding="utf-8")
            print(f"\nwritten: {page.relative_to(machine.ROOT)}")
    return int(any(row.failed for row in rows.values()) or code)


if __name__ == "__main__":
    sys.exit(main())
