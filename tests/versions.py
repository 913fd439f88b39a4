"""Run the tests with the oldest and the newest packages that pyproject.toml allows; write the table of docs/install.md.

make test-versions                           the three sets of the table
make test-versions ARGS="--sets oldest"      one of them; the other rows stay
make test-versions ARGS="--sets prerelease"  the newest pre-releases, upper bounds ignored: no row of the table
make test-versions ARGS="--only tests/config --no_table"
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- written by make test-versions -->\n", "<!-- end -->\n"
HEAD = "| set | Python | torch | transformers | accelerate | deepspeed | peft | date | tests |\n|" + "---|" * 9 + "\n"
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft")


@dataclass(frozen=True)
class Set:
    """Versions to install: how uv resolves pyproject.toml, and for which Python."""

    python: str
    resolve: tuple[str, ...]  # options of `uv pip compile`
    bounded: bool = True  # False: upper bounds are ignored


SETS = {
    "oldest": Set("3.11", ("--resolution", "lowest-direct")),
    "pinned": Set("3.12", ("--constraint", "constraints.txt")),
    "newest": Set("3.13", ("--resolution", "highest")),
    "prerelease": Set("3.13", ("--resolution", "highest", "--prerelease", "allow"), bounded=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["oldest", "pinned", "newest"])
    parser.add_argument("--only", nargs="+", default=[], help="tests to run instead of the fast suite")
    parser.add_argument("--failed", action="store_true", help="run only what failed in the last run of each set")
    parser.add_argument("--no_table", action="store_true", help="leave docs/install.md as it is")
    given = parser.parse_args()
    failed = []
    for name in given.sets:
        python = install(name)
        counts = run(python, name, given.only, given.failed)
        print(f"{name}: {counts}", flush=True)
        if not (given.no_table or given.only or name == "prerelease"):
            write(name, row(name, python, counts))
        if "failed" in counts:
            failed.append(name)
    sys.exit(f"tests failed with: {', '.join(failed)}" if failed else 0)


def install(name: str) -> Path:
    """Make an environment with a set in .venv-versions/NAME; return its interpreter."""
    folder = ROOT / ".venv-versions" / name
    chosen = SETS[name]
    print(f"{name}: installing for Python {chosen.python}", flush=True)
    uv("venv", "--quiet", "--allow-existing", "--python", chosen.python, folder)
    wanted = folder / "wanted.txt"
    wanted.write_text("\n".join(requirements(chosen.bounded)) + "\n")
    resolved = folder / "resolved.txt"
    uv("pip", "compile", "--quiet", "--python", folder, *chosen.resolve, wanted, "--output-file", resolved)
    python = folder / "bin" / "python"
    # torch first: DeepSpeed's build looks for it
    uv("pip", "install", "--quiet", "--python", python, "--constraint", resolved, "torch", "setuptools", "wheel", "pip")
    isolation = ("--no-build-isolation-package", "deepspeed")
    uv("pip", "install", "--quiet", "--python", python, *isolation, "--requirement", resolved)
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    uv("pip", "install", "--quiet", "--python", python, "--constraint", resolved, *dev)
    uv("pip", "install", "--quiet", "--python", python, "--no-deps", "--editable", ROOT)
    for stamp in (".zerofit-installed", ".zerofit-dev-installed"):  # else `make ENV=active` of a test installs the pins
        (folder / stamp).touch()
    return python


def requirements(bounded: bool) -> list[str]:
    """Return the dependencies of pyproject.toml, with or without their upper bounds."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return wanted if bounded else [re.sub(r",<[\d.]+", "", one) for one in wanted]


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
        still = failed(ElementTree.parse(again).getroot().find("testsuite"))
        alone = len(bad) - len(still)
        again_passed = f" ({alone} of them alone)" if alone else ""
        said = [f"{passed + alone} passed{again_passed}", *([f"{len(still)} failed"] if still else [])]
    else:
        said = [f"{passed} passed"]
    return ", ".join([*said, f"{count['skipped']} skipped"])


def test(python: Path, name: str, results: Path, words: list[str]) -> None:
    """Run tests with the set's interpreter. Raises: SystemExit if they have changed the set."""
    versions, log = of_set(python), results.with_suffix(".log")
    print(f"{name}: tests; {log}", flush=True)
    env = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    with log.open("w") as out:
        command = [python, "-m", "pytest", "-q", f"--junit-xml={results}", *words]
        subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, env=env)
    if (now := of_set(python)) != versions:
        sys.exit(f"{name}: a test has installed other packages: {' '.join(now)} instead of {' '.join(versions)}")


def failed(suite) -> list[str]:
    """Return the tests of a suite that have failed, or whose fixtures have, as pytest names them."""
    bad = [one for one in suite.iter("testcase") if one.find("failure") is not None or one.find("error") is not None]
    return [f"{one.get('classname').replace('.', '/')}.py::{one.get('name')}" for one in bad]


def row(name: str, python: Path, counts: str) -> str:
    """Return the set's row of the table."""
    return f"| {' | '.join([name, *of_set(python), date.today().isoformat(), counts])} |\n"


def of_set(python: Path) -> list[str]:
    """Return the environment's versions of Python and of PACKAGES."""
    code = f"import importlib.metadata as m, platform as p; print(p.python_version(), *map(m.version, {PACKAGES}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def write(name: str, line: str) -> None:
    """Replace the set's row in docs/install.md, or add it."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {one.split("|")[1].strip(): one for one in table.removeprefix(HEAD).splitlines(keepends=True)} | {name: line}
    PAGE.write_text(before + BEGIN + HEAD + "".join(rows[one] for one in SETS if one in rows) + END + after)


if __name__ == "__main__":
    main()
