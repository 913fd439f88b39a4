"""Run every test suite and every benchmark whose numbers the docs use, on one commit; write docs/evidence.md.

make everything                                    what this commit lacks: hours, may be stopped with Ctrl-C at any time
make everything ARGS="--only slow-train models"    some of it
make everything ARGS="--list"                      the suites, and which of them this commit has
make everything ARGS="--page"                      only the page, from benchmarks/results/everything.json

Two suites run at a time, those that measure time or use all cores alone. The row of a suite that ended is kept in
benchmarks/results/everything.json. A suite that was stopped, or has failed, continues: the results of its tests are in
runs/everything/COMMIT, and tests that passed do not run again. COMMIT is the last one that changed more than pages and
results (`machine.code_commit`). A result of an older commit holds if nothing has changed since but scripts of tests/,
benchmarks/ and launchers/ that it does not use (`concerned`).
"""

import argparse
import ctypes.util
import datetime
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import results

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import machine  # noqa: E402

from zerofit.launch import make_variables  # noqa: E402

STORE = ROOT / "benchmarks" / "results" / "everything.json"
PAGE = ROOT / "docs" / "evidence.md"
AT_ONCE = 2
STOPS = (signal.SIGINT, signal.SIGTERM)
# {package: the extra that brings it}: without it, tests are skipped
NEEDED = {
    "lm_eval": "eval",
    "ray": "ray",
    "apollo_torch": "projected",
    "galore_torch": "projected",
    "openai": "serving",
    "xdist": "dev",
}
BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
PACKAGES = {  # of the system -> whether it is here; tests of the report and of --offload_path need them
    "chromium": lambda: BROWSER,
    "libaio-dev": lambda: ctypes.util.find_library("aio"),
}


@dataclass(frozen=True)
class Suite:
    """One row of the page."""

    name: str  # for --only
    command: str  # as a user types it in the checkout; tests take `--results` from PYTEST_ADDOPTS
    alone: bool = False  # nothing runs beside it, as it measures time or uses all cores
    count: str = "tests"  # what is counted: tests, rows of tables, or a regular expression for the output
    tables: tuple[str, ...] = ()  # files in benchmarks/results with the rows, without ".md"; none: the output
    tests: str = ""  # the folder of tests/ that it uses, if no pytest in its command names them

    def holds_after(self, commit: str) -> bool:
        """Return whether a result of this commit holds on the last one."""
        changed = concerned(commit)
        if changed is None:
            return False
        if self.count == "rows":
            return changed.isdisjoint(scripts(self.command))
        words = run_by(self.command).partition("pytest ")[2].split()
        own = [word for word in [*words, self.tests] if word.startswith("tests/")] or ["tests"]
        return not any(fnmatch(file, pattern) for file in changed for word in own for pattern in (word, f"{word}/*"))


def scripts(command: str) -> list[str]:
    """Return the scripts of benchmarks/ that a command runs."""
    return re.findall(r"\bbenchmarks/\w+\.py", run_by(command))


def run_by(command: str) -> str:
    """Return a command, or the rule of its target for `make TARGET`."""
    target = re.match(r"make ([\w-]+)", command)
    return re.search(rf"^{target[1]}:.*\n(?:\t.*\n)*", (ROOT / "Makefile").read_text(), re.M)[0] if target else command


@functools.cache
def concerned(commit: str) -> set[str] | None:
    """Return the scripts whose results do not hold after the changes since a commit: of tests, benchmarks, launchers.

    These are the changed ones, and those that import them or name the path of one that is no test. None: all results,
    as more has changed.
    """
    changed = machine.changed_files(commit)
    leaf = re.compile(r"tests/everything\.py|tests/(?:.*/)?test_\w+\.py|(?:benchmarks|launchers)/\w+\.py")
    if changed is None or not all(map(leaf.fullmatch, changed)):
        return None
    files = [file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")] if changed else []
    texts = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    found, todo = set(), changed
    while todo:
        found.add(file := todo.pop())
        name = Path(file).stem
        uses = re.compile(rf"^\s*(?:from|import) {name}\b" + rf"|[\"'/]{name}\.py[\"' ]" * ("tests/" not in file), re.M)
        todo += [user for user, text in texts.items() if user not in found and uses.search(text)]
    used_by_all = any(Path(file).name in ("conftest.py", "results.py") for file in found)
    return None if used_by_all else found


def slow(name: str, places: str) -> Suite:
    return Suite(f"slow-{name}", f"pytest -m 'slow and not cluster and not gpu' {places}")


def benchmark(name: str, command: str, *tables: str, alone: bool = True) -> Suite:
    return Suite(name, command, alone, count="rows", tables=tables)


PEERS = "--peers .venv-peers/bin/python"
SUITES = (
    Suite("test", "make test", alone=True),
    slow("train", "tests/train"),
    slow("model", "tests/model tests/optim"),
    slow("objective", "tests/objective tests/pipeline tests/data tests/config tests/convert tests/certificate"),
    slow("launch", "tests/launch --deselect tests/launch/test_kills.py"),
    Suite("kills", "pytest -m slow tests/launch/test_kills.py"),
    slow("plan", "tests/plan tests/gpu_machine"),
    slow("other", "tests/export tests/scores tests/test_*.py"),
    Suite("cluster", "make test-cluster"),
    *(Suite(f"versions-{name}", f'make test-versions ARGS="--sets {name}"', alone=True, count=f"{name}: (.*)")
      for name in ("floor", "machine", "pinned", "newest")),
    Suite("models", "make models ARGS=--again", alone=True, count=r"(\d+) of \d+ tried", tests="tests/matrix"),
    benchmark("oracle", "python benchmarks/oracle.py", "oracle", alone=False),
    benchmark("peers", "make bench-peers", "trl-parity", "trl-dpo", "data"),
    benchmark("data-big", "python benchmarks/data.py --big 1 10 --unused 30000 --workers 2 --packing", "data-big"),
    benchmark("trl-kto", f"python benchmarks/trl_kto.py {PEERS}", "trl-kto"),
    benchmark("plan-validate", "make plan-validate", "plan-cpu", alone=False),
    benchmark("published", "python benchmarks/published.py", "published", alone=False),
    benchmark("published-speeds", "python benchmarks/published_speeds.py --write", "published-speeds", alone=False),
    benchmark("plan-cost", "python benchmarks/plan_cost.py", "plan-cost"),
    benchmark("estimators", "python benchmarks/estimators.py", "estimators", alone=False),
    benchmark("scaling", "python benchmarks/scaling.py", "scaling"),
    benchmark("throughput", "python benchmarks/throughput.py", "throughput"),
    benchmark("ledger", "make ledger", "ledger"),
    benchmark("startup", f"python benchmarks/startup.py {PEERS}", "startup"),
    benchmark("certificate", "python benchmarks/certificate.py", "certificate"),
    benchmark("checkpoint", "python benchmarks/checkpoint.py", "checkpoint"),
    benchmark("supervision", "python benchmarks/supervision.py", "supervision"),
)  # fmt: skip

NEVER = {
    "any test or benchmark on a GPU (`make test-gpu`, `benchmarks/gpu`)": "no machine with one was at hand",
    "NCCL between nodes; hundreds of ranks": "no cluster; nodes are network namespaces of one computer, with gloo",
    "Kubernetes, SkyPilot, Ray on several nodes": "their clients check the files; no cluster was at hand",
    "a push to the real hub, weights of real models": "the machine reaches only the package index",
    "`make image`": "no container daemon",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[suite.name for suite in SUITES], help="these suites")
    parser.add_argument("--again", action="store_true", help="run also what this commit has")
    parser.add_argument("--list", action="store_true", help="print the suites and run nothing")
    parser.add_argument("--page", action="store_true", help="write the page and run nothing")
    options = parser.parse_args()
    commit, store = machine.code_commit(), json.loads(STORE.read_text()) if STORE.exists() else {}
    chosen = [suite for suite in SUITES if not options.only or suite.name in options.only]
    for suite in SUITES:
        row = store.get(suite.name, {"commit": commit})
        if row["commit"] != commit and not commit.endswith("-dirty") and suite.holds_after(row["commit"]):
            row |= {"commit": commit, "run_on": row.get("run_on", row["commit"])}
    if options.list:
        for suite in chosen:
            print(f"{suite.name:18} {state(store.get(suite.name), commit):26} {suite.command}")
        return 0
    if not options.page:
        if commit.endswith("-dirty"):
            sys.exit("everything: error: the checkout has changes; commit them first, as results name a commit")
        if lacking := {extra for package, extra in NEEDED.items() if importlib.util.find_spec(package) is None}:
            extras = ",".join(sorted({*NEEDED.values()}))
            sys.exit(f"everything: error: {', '.join(sorted(lacking))} not installed: `make install EXTRAS={extras}`")
        if lacking := [package for package, is_here in PACKAGES.items() if not is_here()]:
            sys.exit(f"everything: error: {', '.join(lacking)} not installed: `apt-get install {' '.join(lacking)}`")
        todo = [suite for suite in chosen if options.again or state(store.get(suite.name), commit) != "passed"]
        for suite in todo if options.again else ():
            for file in (ROOT / "runs" / "everything").glob(f"*/{suite.name}.*"):
                file.unlink()
        run_all(sorted(todo, key=lambda suite: suite.alone), commit, store)
    save(store)
    bad = [suite.name for suite in chosen if state(store.get(suite.name), commit) != "passed"]
    print(f"docs/evidence.md: {len(chosen) - len(bad)} of {len(chosen)} suites passed on commit {commit}")
    return int(bool(bad))


def save(store: dict) -> None:
    """Write the rows and the page together: a test of a later suite compares them."""
    if store:
        STORE.write_text(json.dumps(store, indent=1) + "\n")
        PAGE.write_text(page(store), encoding="utf-8")


def state(row: dict | None, commit: str) -> str:
    """Return passed, failed, or why the suite has no result on this commit."""
    if row is None:
        return "never run"
    return f"run on {row['commit']}" if row["commit"] != commit else "failed" if row["failed"] else "passed"


def run_all(todo: list[Suite], commit: str, store: dict) -> None:
    """Run the suites, tests two at a time; after each, keep its row. A signal stops all; the next run continues."""
    folder, waiting, running = ROOT / "runs" / "everything" / commit, list(todo), {}
    folder.mkdir(parents=True, exist_ok=True)
    for number in STOPS:  # a shell starts a job in the background with SIGINT ignored
        signal.signal(number, _stop)
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE and not (running and waiting[0].alone):
                suite = waiting.pop(0)
                about = {"machine": machine.facts(), "versions": machine.versions()}
                carry_over(suite, folder)
                running[start(suite, folder)] = suite, about, time.monotonic()
            time.sleep(1)
            for process in [process for process in running if process.poll() is not None]:
                suite, about, began = running.pop(process)
                row = about | result(suite, folder, process.returncode)
                row["seconds"] = spent(suite, folder, time.monotonic() - began)
                if machine.code_commit() != commit:
                    sys.exit(f"everything: error: the code changed while {suite.name} ran; its result is dropped")
                store[suite.name] = row | {"commit": commit}
                save(store)
                print(f"{suite.name}: {counts(row)} ({row['seconds'] / 60:.0f} min)", flush=True)
    except KeyboardInterrupt:
        print("\nstopped; the next `make everything` continues", flush=True)
    finally:
        for process in running:  # a suite has a process group; pytest ends its tests and their children on SIGINT
            os.killpg(process.pid, signal.SIGINT)
        for process, (suite, _, began) in running.items():
            spent(suite, folder, time.monotonic() - began)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _stop(*_) -> None:
    for number in STOPS:  # a second signal must not interrupt the end of the suites
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def carry_over(suite: Suite, folder: Path) -> None:
    """Copy the results of an older commit that hold, if the suite has none: those of test files that are the same."""
    file = folder / f"{suite.name}.jsonl"
    for older in [] if file.exists() else sorted(folder.parent.glob(f"*/{file.name}"), key=os.path.getmtime)[::-1]:
        if (changed := concerned(older.parent.name)) is None:
            continue
        tests = [{"run_on": older.parent.name} | json.loads(line) for line in older.read_text().splitlines()]
        kept = [test for test in tests if test["test"].partition("::")[0] not in changed]
        file.write_text("".join(json.dumps(test) + "\n" for test in kept))
        if (seconds := older.with_suffix(".seconds")).exists():
            file.with_suffix(".seconds").write_text(seconds.read_text())
        return


def start(suite: Suite, folder: Path) -> subprocess.Popen:
    """Start a suite in a session of its own; its output goes to FOLDER/NAME.log."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for name in make_variables.EXPORTED:
        env.pop(name, None)
    if suite.count == "tests":
        env["PYTEST_ADDOPTS"] = f"{env.get('PYTEST_ADDOPTS', '')} --results={folder / suite.name}.jsonl".strip()
    print(f"{suite.name}: {suite.command}; {(folder / suite.name).relative_to(ROOT)}.log", flush=True)
    with (folder / f"{suite.name}.log").open("w") as log:
        return subprocess.Popen(["bash", "-c", suite.command], cwd=ROOT, env=env, stdout=log, stderr=log,
                                stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip


def spent(suite: Suite, folder: Path, seconds: float) -> int:
    """Add the seconds of a run to those of the suite's earlier runs on this commit; return the sum."""
    file = folder / f"{suite.name}.seconds"
    total = round(seconds + (float(file.read_text()) if file.exists() else 0))
    file.write_text(str(total))
    return total


def result(suite: Suite, folder: Path, code: int) -> dict:
    """Return what the row of a suite that has ended counts."""
    row = {"command": suite.command, "date": datetime.date.today().isoformat(), "failed": [], "skipped": {}}
    output = (folder / f"{suite.name}.log").read_text(errors="replace")
    if suite.count == "tests":
        tests = results.read(folder / f"{suite.name}.jsonl")
        outcomes = Counter(test["outcome"] for test in tests)
        row |= {
            "passed": outcomes["passed"],
            "skipped": Counter(t["reason"] for t in tests if t["outcome"] == "skipped"),
        }
        row["failed"] = [test["test"] for test in tests if test["outcome"] == "failed"]
        if run_on := {test["run_on"] for test in tests if "run_on" in test}:
            row["run_on"] = ", ".join(sorted(run_on))
        row["again"] = [test["test"] for test in tests if test["outcome"] == "passed" and test["failed_before"]]
    elif suite.count == "rows":
        texts = [(machine.RESULTS / f"{name}.md").read_text() for name in suite.tables] or [output]
        row["passed"] = sum(map(rows, texts))
    else:
        found = re.findall(suite.count, output)
        row["passed"] = found[-1] if found else ""
    if not row["failed"] and (code or not row["passed"]):
        row["failed"] = [f"exit code {code}: {(output.strip().splitlines() or ['no output'])[-1][:200]}"]
    return row


def rows(text: str) -> int:
    """Return the number of rows in the tables of a Markdown text."""
    table = [line for line in text.splitlines() if line.startswith("|")]
    return len(table) - 2 * sum(bool(re.fullmatch(r"[|: -]+", line)) for line in table)


def counts(row: dict) -> str:
    words = [f"{row['passed']:,} passed" if isinstance(row["passed"], int) else row["passed"]]
    words += [f"{len(row['failed'])} failed"] * bool(row["failed"])
    return ", ".join([*filter(None, words), *[f"{sum(row['skipped'].values())} skipped"] * bool(row["skipped"])])


def page(store: dict) -> str:
    """Return the text of docs/evidence.md. store: the rows of all suites, at least one."""
    known = [(suite, store[suite.name]) for suite in SUITES if suite.name in store]
    commit, number = Counter(row["commit"] for _, row in known).most_common(1)[0]
    about = next(row for _, row in known if row["commit"] == commit)
    missing = [suite.name for suite in SUITES if suite.name not in store]
    lines = ["# What was run, and when?", "", "Written by `make everything` from its results; not edited by hand.", ""]
    lines += [f"Commit **{commit}**: {number} of {len(SUITES)} suites."]
    lines += [f"Run on another commit, which its row names: {len(known) - number}."] * (number < len(known))
    lines += [f"Not run yet: {', '.join(missing)}."] * bool(missing)
    lines += ["`on COMMIT`: run there. Tests and benchmarks that changed since, or use what changed, ran again."] * any(
        "run_on" in row for _, row in known
    )
    lines += ["", *machine.describe(about["machine"] | {"commit": commit}, {"versions": about["versions"]})]
    for title, tests in (("Tests", True), ("Benchmarks", False)):
        of_kind = [(suite, row) for suite, row in known if (suite.count == "rows") != tests]
        if not of_kind:
            continue
        lines += ["", f"## {title}", ""]
        heads = ("suite", "passed" if tests else "rows", "failed", "skipped", "minutes", "date", "command")
        lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
        for suite, row in of_kind:
            day = row["date"] + f" ({row['commit']})" * (row["commit"] != commit)
            day += f", on {row.get('run_on')}" * ("run_on" in row)
            passed = f"{row['passed']:,}" if isinstance(row["passed"], int) else row["passed"]
            cells = (
                suite.name,
                passed,
                len(row["failed"]),
                sum(row["skipped"].values()),
                round(row["seconds"] / 60),
                day,
            )
            lines.append(f"| {' | '.join(map(str, cells))} | `{row['command'].replace('|', chr(92) + '|')}` |")
    lines += [
        "",
        "`make test-all` is the first eight rows in one process. Minutes: on two cores, two suites at a time.",
    ]
    if failed := [(suite.name, name) for suite, row in known for name in row["failed"]]:
        lines += ["", "## Failed", "", *(f"- {suite}: `{name}`" for suite, name in failed)]
    if again := [(suite.name, name) for suite, row in known for name in row.get("again", ())]:
        lines += ["", "## Passed at a second try only", "", *(f"- {suite}: `{name}`" for suite, name in again)]
    reasons = sum((Counter(row["skipped"]) for _, row in known), Counter())
    lines += ["", "## Skipped", "", "| tests | why |", "|---|---|"]
    lines += [f"| {number} | {' '.join(reason.split()[:25])} |" for reason, number in reasons.most_common()]
    lines += [
        "",
        "## Never run",
        "",
        "| what | why |",
        "|---|---|",
        *(f"| {what} | {why} |" for what, why in NEVER.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
