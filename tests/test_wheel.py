"""The wheel carries all that a run needs, in a folder that is not the repository; `zerofit init` makes a project."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT, Run

from zerofit.tools import init

SOURCES = ["pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "Makefile", "src", "recipes",
           "deepspeed_configs", "launchers", "examples"]  # fmt: skip
SHORT = ["--max_steps", "2", "--eval_strategy", "no", "--num_samples", "0", "--max_samples", "64"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The bin folder of a new environment with the wheel; libraries come from the running interpreter's."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    env = outside()
    subprocess.run(build, check=True, capture_output=True, timeout=200, env=env)
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wheel = next(folder.glob("zerofit-*.whl"))
    install = [*pip, "--python", str(environment), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120, env=env)
    return environment / "bin"


def outside() -> dict[str, str]:
    """Return the environment without the repository's source, in which pip would find zerofit installed already."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(installed, folder, *words):
    env = outside()
    env["PATH"] = f"{installed}{os.pathsep}{env['PATH']}"
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_the_wheel_holds_what_a_project_is_made_of(installed):
    listed = subprocess.run(["git", "ls-files", *init.FOLDERS, "Makefile"], cwd=ROOT, capture_output=True, text=True)
    packages = next(installed.parent.glob("lib/python*/site-packages"))
    project = packages / "zerofit" / "project"
    carried = {f.relative_to(project).as_posix() for f in project.rglob("*") if f.is_file() and f.suffix != ".pyc"}
    assert set(listed.stdout.split()) <= carried
    assert not (packages / "recipes").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sft", *SHORT, "--zero", "3", "--gpus", "2"], {"recipe": "sft", "world_size": 2, "zero": "3"}),
        (["lora", *SHORT, "--lora_r", "4"], {"recipe": "lora", "world_size": 1, "zero": "0"}),
        (["dpo", *SHORT], {"recipe": "dpo", "world_size": 1, "zero": "0"}),
        # the first command with a model and rows of one's own, as uvx runs it
        (
            [
                "lora",
                "--model",
                str(ROOT / "examples" / "tiny" / "model"),
                "--data",
                str(ROOT / "examples" / "tiny" / "train.jsonl"),
                *SHORT,
            ],
            {"recipe": "lora", "world_size": 1, "zero": "0"},
        ),
    ],
)
def test_a_recipe_runs_in_any_folder(installed, tmp_path, words, expected):
    said = run(installed, tmp_path, "zerofit", *words)
    folder = next((tmp_path / "runs").iterdir())
    result = Run(folder).json("result.json")
    assert result["status"] == "finished" and result.items() >= expected.items()
    assert Run(folder).json("run.json")["git_commit"] is None
    assert f"run folder {folder.relative_to(tmp_path)}" in said and (folder / "report.html").exists()
    assert not re.search(r"\bmake \w+ RUN=", said)


def test_what_a_project_says_is_what_runs(installed, tmp_path):
    said = run(installed, tmp_path, "zerofit", "init", "my-project")
    assert "make sft" in said
    project = tmp_path / "my-project"
    edited = project / "deepspeed_configs" / "zero2.json"
    edited.write_text(json.dumps(json.loads(edited.read_text()) | {"wall_clock_breakdown": True}))
    recipe = project / "recipes" / "sft.py"
    recipe.write_text(recipe.read_text().replace("def main() -> None:\n", 'def main() -> None:\n    print("edited")\n'))
    python = next(line for line in (project / "Makefile").read_text().splitlines() if line.startswith("PYTHON ?="))
    assert Path(python.split()[-1]).parent == installed
    args = f"ARGS={' '.join(SHORT)}"
    said = run(installed, project, "make", "sft", "GPUS=2", "ZERO=2", "OUT=runs/a", args)
    assert "edited" in said
    assert Run(project / "runs" / "a").json("deepspeed.json")["wall_clock_breakdown"] is True
    shown = run(installed, project, "make", "help")
    assert "make sft" in shown and "make test" not in shown


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory):
    """The folder that `make wheelhouse` fills, in a clone."""
    clone = tmp_path_factory.mktemp("wheelhouse") / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    words = [
        "make",
        "wheelhouse",
        "ENV=active",
        f"PYTHON={sys.executable}",
        "-o",
        f"{sys.prefix}/.zerofit-dev-installed",
    ]
    done = subprocess.run(words, cwd=clone, env=outside(), capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    return clone / "wheelhouse"


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_a_wheelhouse_installs_without_a_network(wheelhouse, tmp_path, installer):
    """Into an empty environment, where it trains, plans and refuses as a clone does."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=120)
    tool = {"pip": [str(environment / "bin" / "pip"), "install"],
            "uv": [shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv", "pip", "install", "--offline",
                   "--python", str(environment)]}[installer]  # fmt: skip
    words = [*tool, "--quiet", "--no-index", "--find-links", str(wheelhouse), "zerofit"]
    env = outside() | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    binaries = environment / "bin"
    run(binaries, tmp_path, "zerofit", "sft", *SHORT)
    assert Run(next((tmp_path / "runs").iterdir())).json("result.json")["status"] == "finished"
    planned = run(binaries, tmp_path, "zerofit", "plan", "--gpu_type", "rtx4090-24g", "--model",
                  str(ROOT / "tests" / "configs" / "qwen2.5-0.5b"))  # fmt: skip
    assert "run it: " in planned
    for flags, said in ((["--zero", "7"], "--zero 7"), (["--optim", "galore_adamw"], "pip install")):
        words = [binaries / "zerofit", "sft", *SHORT, *flags]
        done = subprocess.run(words, cwd=tmp_path, env=outside(), capture_output=True, text=True, timeout=200)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
