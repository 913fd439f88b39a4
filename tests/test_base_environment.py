"""What works here works for a user: a virtual environment made by `make install` alone, without the development extras.

It is kept between runs under a name with the hash of what it is made from, in $ZEROFIT_TEST_ENVIRONMENTS (default
~/.cache/zerofit-tests); `make install` is called on it all the same, and brings it up to date in seconds.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import filelock
import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow  # makes a whole environment

ONLY_FOR_DEVELOPMENT = ("pytest", "hypothesis", "ruff", "kubeflow_trainer_api")
BUILDS = {"zerofit", "pip"}  # the project itself; what the Python that made the environment brings
CONFIG = "tests/configs/qwen2.5-0.5b"
SIMULATED = """
import itertools, json, sys
from zerofit.base import hardware
from zerofit.config import parse
from zerofit.plan import simulate
common = ["--model", "examples/tiny/model", "--data", "none", "--max_length", "64"]
ways = {"sft": ("sft", []), "lora": ("lora", []), "qlora": ("lora", ["--load_in_4bit", "true"])}
asked = {(way, zero): simulate.Question(parse.request(recipe, [*common, *flags, "--zero", zero]), 2,
                                         gpu=hardware.GPUS["h100-80g"])
         for (way, (recipe, flags)), zero in itertools.product(ways.items(), "0123")}
answers = dict(zip(asked, simulate.run_all(list(asked.values())), strict=True))
print(json.dumps({f"{way} {zero}": str(answer) if isinstance(answer, Exception) else max(answer["total"].values())
                  for (way, zero), answer in answers.items()}))
"""
IMPORTS = """
import importlib, pkgutil, zerofit
names = [m.name for m in pkgutil.walk_packages(zerofit.__path__, "zerofit.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(len(names), zerofit.__file__)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """{variables of a shell} in which `make` uses such an environment."""
    made_from = b"".join((ROOT / name).read_bytes() for name in ("constraints.txt", "pyproject.toml", "Makefile"))
    key = hashlib.sha256(made_from + sys.version.encode()).hexdigest()[:16]
    home = Path(os.environ.get("ZEROFIT_TEST_ENVIRONMENTS", "~/.cache/zerofit-tests")).expanduser()
    home.mkdir(parents=True, exist_ok=True)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"ENV": str(home / f"base-{key}"), "PYTHON": sys.executable}
    with filelock.FileLock(home / f"base-{key}.lock"):
        done = make(env, "install", timeout=900)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        yield env


def make(env: dict, *words: str, timeout: int = 300) -> subprocess.CompletedProcess:
    command = ["make", "--no-print-directory", f"ENV={env['ENV']}", f"PYTHON={env['PYTHON']}", *words]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def python(env: dict, code: str) -> str:
    done = subprocess.run(
        [f"{env['ENV']}/bin/python", "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_it_holds_the_pinned_set_and_nothing_of_the_development_extras(environment):
    listed = subprocess.run(
        [f"{environment['ENV']}/bin/python", "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    normal = re.compile(r"[-_.]+")
    installed = {normal.sub("-", p["name"]).lower(): p["version"].split("+")[0] for p in json.loads(listed.stdout)}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {normal.sub("-", name).lower(): version for name, _, version in (line.partition("==") for line in lines)}
    assert {name: version for name, version in installed.items() if pinned.get(name) != version}.keys() <= BUILDS
    assert not {normal.sub("-", name) for name in ONLY_FOR_DEVELOPMENT} & set(installed)


def test_every_module_can_be_imported(environment):
    count, _, origin = python(environment, IMPORTS).partition(" ")
    assert int(count) > 70 and Path(origin).is_relative_to(ROOT / "src")


def test_every_stage_of_every_method_is_simulated(environment):
    """In a process that has imported nothing: what one library needs must not have been another's side effect."""
    answers = json.loads(python(environment, SIMULATED))
    assert len(answers) == 12 and all(isinstance(answer, int) for answer in answers.values()), answers


def test_a_plan_is_made_by_simulation(environment, tmp_path):
    given = ("GPU_TYPE=h100-80g", "GPUS=2", f"MODEL={CONFIG}", "ZERO=3", "ARGS=--exact true")
    done = make(environment, "plan", *given, f"OUT={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "by simulation" in done.stdout and "formula" not in done.stdout.split("chosen:")[1].split("parameters:")[0]
    assert "simulation failed" not in done.stdout


@pytest.mark.parametrize(
    ("recipe", "words", "flags"), [("sft", ("GPUS=2", "ZERO=2"), ""), ("lora", ("ZERO=3",), "--load_in_4bit true")]
)
def test_it_trains(environment, recipe, words, flags, tmp_path):
    args = f"ARGS=--max_steps 3 --num_samples 0 --save_strategy no {flags}"
    done = make(environment, recipe, *words, args, f"OUT={tmp_path / 'run'}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "finished" and result["steps"] == 3
    assert result["world_size"] == (2 if "GPUS=2" in words else 1)
