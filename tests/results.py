"""A pytest option, --results FILE: append the result of each test to FILE, and leave out tests that FILE has as passed.

So a suite that was stopped continues, and `everything.py` and benchmarks/reliability.py count without a second run. One
line of JSON a test: test, outcome (passed, failed, skipped, deselected), reason (of a skip, or the end of an error),
seconds, its marks of KINDS, and what it reports with record_property: cases (how many things it tried, else 1) and
relative_difference (an oracle's largest).
"""

import json
from pathlib import Path

import pytest

KINDS = ("fault", "bad_input", "injection", "oracle")
ELSEWHERE = ("cluster", "slow")  # marks of tests that run only on request


def pytest_addoption(parser):
    parser.addoption("--results", type=Path, help="append results to this file, and leave out what it has as passed")


def pytest_configure(config):
    if config.option.results and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.option.results))


@pytest.hookimpl(optionalhook=True)  # of xdist, whose workers get no PYTEST_ADDOPTS
def pytest_configure_node(node):
    node.workerinput["passed"] = sorted(_passed(node.config.option.results))


def _passed(file: Path | None) -> set[str]:
    """Return the tests that the file has as passed or skipped."""
    return {one["test"] for one in read(*[file] * bool(file)) if one["outcome"] in ("passed", "skipped")}


def pytest_itemcollected(item):
    if kinds := [kind for kind in KINDS if item.get_closest_marker(kind)]:
        item.user_properties.append(("kinds", kinds))


def pytest_collection_modifyitems(config, items):
    is_worker = hasattr(config, "workerinput")
    done = {*config.workerinput["passed"]} if is_worker else _passed(config.option.results)
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_sessionfinish(session, exitstatus):
    """Let a run succeed that finds all of its tests passed in the file."""
    if session.config.option.results and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = 0 if read(session.config.option.results) else exitstatus


class Recorder:
    """Append one line to the file for each test that ends, or that is marked and left out."""

    def __init__(self, file: Path):
        self.file = file
        self.reports: dict[str, list] = {}
        file.parent.mkdir(parents=True, exist_ok=True)

    def pytest_deselected(self, items):
        for item in items:
            if mark := next((mark for mark in ELSEWHERE if item.get_closest_marker(mark)), None):
                self._append(item.nodeid, "deselected", f"marked {mark}", 0.0, item.user_properties)

    def pytest_runtest_logreport(self, report):
        self.reports.setdefault(report.nodeid, []).append(report)

    def pytest_runtest_logfinish(self, nodeid):
        reports = self.reports.pop(nodeid, [])
        if not reports:
            return
        report = next((r for r in reports if r.failed), next((r for r in reports if r.skipped), reports[-1]))
        outcome = "failed" if report.failed else "skipped" if report.skipped else "passed"
        seconds = sum(r.duration for r in reports)
        self._append(nodeid, outcome, _reason(report), seconds, reports[-1].user_properties)

    def _append(self, test: str, outcome: str, reason: str, seconds: float, properties: list):
        line = {"test": test, "outcome": outcome, "reason": reason, "seconds": round(seconds, 1), **dict(properties)}
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")


def _reason(report) -> str:
    if report.passed:
        return ""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return (str(report.longrepr).strip().splitlines() or [""])[-1]


def read(*files: Path) -> list[dict]:
    """Return the last result of each test of these files; one that ran counts before one that was left out.

    failed_before: the test failed in an earlier run.
    """
    results: dict[str, dict] = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            result = json.loads(line)
            before = results.get(result["test"], {"outcome": None, "failed_before": False})
            result["failed_before"] = before["failed_before"] or before["outcome"] == "failed"
            if result["outcome"] != "deselected" or before["outcome"] is None:
                results[result["test"]] = result
    return list(results.values())
