"""tests/everything.py: suites end, fail, stop and continue; each test folder is in one of them."""

import json
import os
import shlex
import subprocess
import sys
import time

import everything
import machine
import pytest
from conftest import ROOT
from everything import Suite


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Put results, page and checkout into a folder."""
    monkeypatch.setattr(everything, "ROOT", tmp_path)
    monkeypatch.setattr(everything, "STORE", tmp_path / "everything.json")
    monkeypatch.setattr(everything, "PAGE", tmp_path / "evidence.md")
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    monkeypatch.setattr(machine, "code_commit", lambda: "abc1234")
    monkeypatch.setattr(machine, "changed_files", lambda commit: ["src/zerofit/a.py"])
    monkeypatch.setattr(everything, "NEEDED", {})
    monkeypatch.setattr(everything, "PACKAGES", {})
    return tmp_path


def run(monkeypatch, suites, *words) -> int:
    monkeypatch.setattr(everything, "SUITES", suites)
    monkeypatch.setattr("sys.argv", ["everything.py", *words])
    return everything.main()


PASSED = {"test": "a.py::b", "outcome": "passed", "reason": "", "seconds": 1.0}


def result_lines(*lines: dict) -> str:
    """Return a command that writes results as `pytest --results` does."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return f"printf %s {shlex.quote(text)} >> ${{PYTEST_ADDOPTS#--results=}}"


def test_rows_are_kept_and_the_page_names_the_commit(files, monkeypatch, capsys):
    skipped = PASSED | {"test": "a.py::c", "outcome": "skipped", "reason": "no disk"}
    suites = [  # the last finds the page with the rows of those before it
        Suite("some", result_lines(PASSED, skipped)),
        everything.benchmark("table", "printf '|a|\\n|---|\\n|1|\\n|2|\\n' > numbers.md", "numbers"),
        Suite("versions", "grep -q '^| some ' evidence.md && echo 'floor: 7 passed, 1 skipped'", True, "floor: (.*)"),
    ]
    assert run(monkeypatch, suites) == 0
    page = everything.PAGE.read_text()
    assert "Commit **abc1234**: 3 of 3 suites." in page and "| 1 | no disk |" in page
    assert "| some | 1 | 0 | 1 | 0 |" in page and "| table | 2 | 0 | 0 |" in page
    assert "| versions | 7 passed, 1 skipped | 0 |" in page
    capsys.readouterr()
    assert run(monkeypatch, suites) == 0 and ".log" not in capsys.readouterr().out  # nothing runs again


def test_a_failed_suite_runs_again_and_says_so(files, monkeypatch):
    failed = PASSED | {"outcome": "failed", "reason": "AssertionError"}
    assert (
        run(monkeypatch, [Suite("some", result_lines(failed) + "; exit 1"), Suite("other", "exit 3", count="rows")])
        == 1
    )
    page = everything.PAGE.read_text()
    assert "- some: `a.py::b`" in page and "- other: `exit code 3: no output`" in page
    assert run(monkeypatch, [Suite("some", result_lines(PASSED))]) == 0
    assert "## Passed at a second try only" in everything.PAGE.read_text()


def test_a_result_of_another_commit_is_out_of_date(files, monkeypatch):
    suites = [Suite("some", result_lines(PASSED)), Suite("new", result_lines(PASSED))]
    assert run(monkeypatch, suites, "--only", "some") == 0
    monkeypatch.setattr(machine, "code_commit", lambda: "def5678")
    assert run(monkeypatch, suites, "--only", "new") == 0
    page = everything.PAGE.read_text()
    assert "Run on another commit, which its row names: 1." in page and "(def5678)" in page
    monkeypatch.setattr(machine, "code_commit", lambda: "def5678-dirty")
    with pytest.raises(SystemExit, match="commit them first"):
        run(monkeypatch, suites)


@pytest.fixture
def scripts(files):
    """Write scripts that use each other."""
    texts = {
        "tests/conftest.py": "import timer\n",
        "tests/x/test_a.py": "",
        "tests/x/test_b.py": "from test_shared import flags\n",
        "tests/y/test_c.py": "COMMAND = ['python', 'benchmarks/size.py']\n",
        "benchmarks/speed.py": "import kits\n",
        "Makefile": "speed: $(STAMP)\n\t@$(PY) benchmarks/speed.py\n\nnodes:\n\t@$(PY) -m pytest -m x tests/y\n\n"
        "other:\n\t@$(PY) benchmarks/size.py\n",
    }
    for name, text in texts.items():
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_text(text)
    everything.concerned.cache_clear()
    yield files
    everything.concerned.cache_clear()


@pytest.mark.parametrize(
    ("changed", "files_of_results"),
    [
        ("tests/x/test_a.py", {"tests/x/test_a.py"}),
        ("tests/x/test_shared.py", {"tests/x/test_shared.py", "tests/x/test_b.py"}),
        ("benchmarks/kits.py", {"benchmarks/kits.py", "benchmarks/speed.py"}),
        ("benchmarks/size.py", {"benchmarks/size.py", "tests/y/test_c.py"}),
        ("launchers/size.py", {"launchers/size.py", "tests/y/test_c.py"}),
        ("benchmarks/timer.py", None),  # conftest.py imports it
        ("tests/conftest.py", None),
        ("tests/helper.py", None),
        ("recipes/sft.py", None),
    ],
)
def test_a_change_concerns_the_scripts_that_use_it(scripts, monkeypatch, changed, files_of_results):
    monkeypatch.setattr(machine, "changed_files", lambda commit: [changed])
    assert everything.concerned("abc1234") == files_of_results


def test_a_change_leaves_the_results_that_it_does_not_concern(scripts, monkeypatch):
    """Suites without these scripts keep their rows; the suite with a changed test runs it again, and only it."""
    names = ("tests/x/test_a.py::one", "tests/x/test_b.py::two")
    lines = result_lines(*(PASSED | {"test": name} for name in names))
    folders = {"own": "tests/x", "other": "tests/y", "all": ""}
    suites = [*(Suite(name, f"{lines}; : pytest {folder}") for name, folder in folders.items()),
              everything.benchmark("table", "printf '|a|\n|---|\n|1|\n'; : benchmarks/speed.py")]  # fmt: skip
    assert run(monkeypatch, suites) == 0

    def held_after(*changed: str) -> set[str]:
        everything.concerned.cache_clear()
        monkeypatch.setattr(machine, "changed_files", lambda commit: list(changed))
        more = [Suite("nodes", "make nodes"), Suite("models", "make other", count="(.*) tried", tests="tests/y")]
        return {suite.name for suite in [*suites, *more] if suite.holds_after("abc1234")}

    assert everything.scripts("make speed") == ["benchmarks/speed.py"]
    assert held_after("recipes/sft.py") == held_after("tests/x/test_a.py", "recipes/sft.py") == set()
    assert held_after("benchmarks/kits.py") == {"own", "other", "all", "nodes", "models"}
    assert held_after("benchmarks/size.py") == {"own", "table"}
    assert held_after("tests/x/test_a.py") == {"other", "table", "nodes", "models"}
    monkeypatch.setattr(machine, "code_commit", lambda: "def5678")
    run(monkeypatch, suites, "--page")
    rows = json.loads(everything.STORE.read_text())
    assert {name for name, row in rows.items() if row["commit"] == "def5678"} == {"other", "table"}
    assert ", on abc1234" in everything.PAGE.read_text()
    (folder := scripts / "runs" / "everything" / "def5678").mkdir()
    everything.carry_over(suites[0], folder)
    (folder / "own.log").touch()
    (kept,) = (folder / "own.jsonl").read_text().splitlines()
    assert json.loads(kept)["test"] == "tests/x/test_b.py::two"
    assert everything.result(suites[0], folder, 0)["run_on"] == "abc1234"


def test_tests_that_passed_are_left_out_by_parallel_workers_too(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import os\npytest_plugins = ['results']\nos.environ.pop('PYTEST_ADDOPTS', None)\n"
    )
    (tmp_path / "test_a.py").write_text("def test_one(): pass\n\n\ndef test_two(): pass\n")
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "PYTEST_ADDOPTS": f"--results={tmp_path / 'results'}"}
    for tests in ("test_a.py::test_one", "test_a.py"):
        subprocess.run([sys.executable, "-m", "pytest", "-n", "2", "--rootdir", str(tmp_path), tests], cwd=tmp_path,
                       env=env, check=True, capture_output=True)  # fmt: skip
    lines = map(json.loads, (tmp_path / "results").read_text().splitlines())
    assert [line["test"] for line in lines] == ["test_a.py::test_one", "test_a.py::test_two"]


def test_a_stop_ends_the_suites_and_keeps_no_row(files, monkeypatch, capsys):
    """As Ctrl-C does while two suites run: their processes end, a suite that has ended before is kept."""
    long = [Suite(f"long-{n}", f"echo $$ > pid{n}; exec sleep 600") for n in (1, 2)]

    interrupted = []

    def interrupt(seconds, sleep=time.sleep):
        sleep(0.05)
        if not interrupted and all((files / f"pid{n}").exists() and (files / f"pid{n}").read_text() for n in (1, 2)):
            interrupted.append(True)
            raise KeyboardInterrupt

    monkeypatch.setattr(everything.time, "sleep", interrupt)
    assert run(monkeypatch, [Suite("short", result_lines(PASSED)), *long]) == 1
    assert list(json.loads(everything.STORE.read_text())) == ["short"] and "stopped" in capsys.readouterr().out
    for n in (1, 2):
        with pytest.raises(ProcessLookupError):
            everything.os.kill(int((files / f"pid{n}").read_text()), 0)


def test_every_folder_of_slow_tests_is_in_one_suite():
    named = [word for suite in everything.SUITES if suite.name.startswith("slow-")
             for word in shlex.split(suite.command) if word.startswith("tests/")]  # fmt: skip
    folders = {f"tests/{file.parent.relative_to(ROOT / 'tests').parts[0]}"
               for file in (ROOT / "tests").glob("*/**/test_*.py")} - {"tests/cluster", "tests/gpu"}  # fmt: skip
    assert sorted(word for word in named if "." not in word) == sorted(folders)
    assert "tests/test_*.py" in named


def test_the_page_is_what_the_results_say():
    assert everything.page(json.loads(everything.STORE.read_text())) == everything.PAGE.read_text()
