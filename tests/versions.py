"""Run the tests with several sets of package versions; write launch/tested.json and the table of docs/install.md.

make test-versions                                the fast suite with each set
make test-versions ARGS="--sets floor newest"     some of them; what is written of the others stays
make test-versions ARGS="--quick"                 in each set, the tests that depend most on versions (QUICK)
make test-versions ARGS="--sets prerelease"       the newest pre-releases: written nowhere
make test-versions ARGS="--only tests/config"     written nowhere
"""

import argparse
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "install.md"
TESTED = ROOT / "src" / "zerofit" / "launch" / "tested.json"
BEGIN, END = "<!-- written by make test-versions -->\n", "<!-- end -->\n"
COLUMNS = ("python", "torch", "transformers", "accelerate", "deepspeed", "peft", "huggingface_hub")
HEAD = f"| set | {' | '.join(COLUMNS)} | date | tests |\n|" + "---|" * (len(COLUMNS) + 3) + "\n"
PACKAGES = (*COLUMNS[1:], "datasets", "torchao", "bitsandbytes", "liger-kernel")

QUICK = (
    "tests/model/test_patches.py", "tests/model/test_linear_attention.py", "tests/model/test_attention.py",
    "tests/model/test_load.py", "tests/config/test_transformers_flags.py", "tests/config/test_deepspeed_json.py",
    "tests/plan/test_fake_operations.py", "tests/launch/test_doctor.py", "tests/test_imports.py",
    "tests/train/test_training.py", "tests/train/test_resume.py", "tests/export/test_export.py",
)  # fmt: skip


@dataclass(frozen=True)
class Set:
    """Versions to install, and for which Python."""

    python: str
    resolve: tuple[str, ...]  # options of `uv pip compile`
    constraints: str | None = None  # a file, or the lines of one


# What an image with a GPU had in November 2026; the rest is the pinned set.
MACHINE = "torch==2.11.0\ntriton==3.6.0\naccelerate==1.15.0\nhuggingface_hub==1.33.0\nnumpy==2.5.2\n"

SETS = {
    "floor": Set("3.11", ("--resolution", "lowest-direct")),
    "machine": Set("3.12", (), MACHINE + "transformers==5.17.0\n"),
    "machine-5.23": Set("3.12", (), MACHINE + "transformers==5.23.0\n"),
    "pinned": Set("3.12", (), "constraints.txt"),
    "newest": Set("3.13", ("--resolution", "highest")),
    "prerelease": Set("3.13", ("--resolution", "highest", "--prerelease", "allow")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["floor", "machine", "pinned", "newest"]
    parser.add_argument("--sets", nargs="+", choices=SETS, default=default)
    parser.add_argument("--only", nargs="+", default=[], help="tests to run instead of the fast suite")
    parser.add_argument("--quick", action="store_true", help="run QUICK instead of the fast suite: 15 minutes a set")
    parser.add_argument("--failed", action="store_true", help="run only what failed in the last run of each set")
    parser.add_argument("--install", action="store_true", help="make the environments, run nothing")
    given = parser.parse_args()
    failed = []
    for name in given.sets:
        python = install(name)
        if given.install:
            continue
        counts = run(python, name, given.only or (list(QUICK) if given.quick else []), given.failed)
        print(f"{name}: {counts}", flush=True)
        if not (given.only or name == "prerelease"):
            record(name, python, f"{counts} (quick)" if given.quick else counts)
        if "failed" in counts:
            failed.append(name)
    sys.exit(f"tests failed with: {', '.join(failed)}" if failed else 0)


def install(name: str) -> Path:
    """Make an environment with a set in .venv-versions/NAME; return its interpreter."""
    folder = ROOT / ".venv-versions" / name
    chosen = SETS[name]
    print(f"{name}: installing for Python {chosen.python}", flush=True)
    uv("venv", "--quiet", "--allow-existing", "--python", chosen.python, folder)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = folder / "wanted.txt"
    wanted.write_text("\n".join(project["dependencies"]) + "\n")
    resolved = folder / "resolved.txt"
    bounds = []
    if chosen.constraints:
        file = ROOT / chosen.constraints
        if "\n" in chosen.constraints:
            file = folder / "constraints.txt"
            file.write_text(chosen.constraints)
        bounds = ["--constraint", file]
    uv("pip", "compile", "--quiet", "--python", folder, *chosen.resolve, *bounds, wanted, "--output-file", resolved)
    python = folder / "bin" / "python"
    # torch first: DeepSpeed's build looks for it
    uv("pip", "install", "--quiet", "--python", python, "--constraint", resolved, "torch", "setuptools", "wheel", "pip")
    isolation = ("--no-build-isolation-package", "deepspeed")
    uv("pip", "install", "--quiet", "--python", python, *isolation, "--requirement", resolved)
    extras = project["optional-dependencies"]["dev"]
    uv("pip", "install", "--quiet", "--python", python, "--constraint", resolved, *extras)
    # Where PYTHONDONTWRITEBYTECODE is set, each process of a test would otherwise compile all packages again.
    uv("pip", "install", "--quiet", "--compile-bytecode", "--python", python, "--no-deps", "--editable", ROOT)
    for stamp in (".zerofit-installed", ".zerofit-dev-installed"):  # else `make ENV=active` of a test installs the pins
        (folder / stamp).touch()
    return python


def uv(*words) -> None:
    env = os.environ | {"DS_IGNORE_CUDA_DETECTION": "1"}
    subprocess.run([Path(sys.prefix) / "bin" / "uv", *map(str, words)], cwd=ROOT, check=True, env=env)


def run(python: Path, name: str, only: list[str], failed_only: bool) -> str:
    """Run the fast suite (or some of it), then alone what has failed; return the counts, as "4447 passed, 5 skipped".

    Args: failed_only: run alone what has failed in the last run of this set, instead of all.
    """
    first, again = (python.parents[1] / f"{which}.xml" for which in ("results", "again"))
    if not failed_only:
        test(python, name, first, ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", *only])
    suite = ElementTree.parse(first).getroot().find("testsuite")
    count = {what: int(suite.get(what)) for what in ("tests", "failures", "errors", "skipped")}
    bad = failed(suite)
    passed = count["tests"] - len(bad) - count["skipped"]
    if bad:
        test(python, name, again, bad)
        alone_suite = ElementTree.parse(again).getroot().find("testsuite")
        still, skipped = failed(alone_suite), int(alone_suite.get("skipped"))
        alone, count["skipped"] = len(bad) - len(still) - skipped, count["skipped"] + skipped
        again_passed = f" ({alone} of them alone)" if alone else ""
        said = [f"{passed + alone} passed{again_passed}", *([f"{len(still)} failed"] if still else [])]
    else:
        said = [f"{passed} passed"]
    return ", ".join([*said, f"{count['skipped']} skipped"])


def test(python: Path, name: str, results: Path, words: list[str]) -> None:
    """Run tests with the set's interpreter. Raises: SystemExit if they have changed the set."""
    before, log = versions(python), results.with_suffix(".log")
    print(f"{name}: tests; {log}", flush=True)
    env = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    with log.open("w") as out:
        command = [python, "-m", "pytest", "-q", f"--junit-xml={results}", *words]
        subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, env=env)
    if (now := versions(python)) != before:
        sys.exit(f"{name}: a test has installed other packages: {now} instead of {before}")


def failed(suite) -> list[str]:
    """Return the tests of a suite that have failed, or whose fixtures have, as pytest names them."""
    bad = [one for one in suite.iter("testcase") if one.find("failure") is not None or one.find("error") is not None]
    return [f"{one.get('classname').replace('.', '/')}.py::{one.get('name')}" for one in bad]


def versions(python: Path) -> dict[str, str]:
    """Return the environment's versions of Python and of PACKAGES."""
    code = (
        "import importlib.metadata as m, json, platform as p; "
        f"print(json.dumps({{'python': p.python_version()}} | {{n: m.version(n) for n in {PACKAGES}}}))"
    )
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def record(name: str, python: Path, counts: str) -> None:
    """Replace the set in launch/tested.json, which the notes of a start read, and the table of docs/install.md."""
    tested = json.loads(TESTED.read_text()) if TESTED.exists() else {}
    tested[name] = {"date": date.today().isoformat(), "tests": counts, "versions": versions(python)}
    tested = {one: tested[one] for one in SETS if one in tested}
    TESTED.write_text(json.dumps(tested, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(tested) + END + rest.partition(END)[2])


def table(tested: dict) -> str:
    """Return the table of docs/install.md. tested: launch/tested.json's."""
    rows = [
        f"| {' | '.join([name, *(one['versions'][column] for column in COLUMNS), one['date'], one['tests']])} |\n"
        for name, one in tested.items()
    ]
    return HEAD + "".join(rows)


if __name__ == "__main__":
    main()
