"""make variables that nothing reads: every verb is refused before anything runs."""

import subprocess
import sys

import pytest
from conftest import ROOT


def make(*words):
    command = ["make", "-C", str(ROOT), "--no-print-directory", "ENV=active", f"PYTHON={sys.executable}", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("STAGE=3", "STAGE=3: no such variable; did you mean ZERO?"),
        ("gpus=2", "gpus=2: no such variable; did you mean GPUS?"),
        ("NUM_GPUS=2", "NUM_GPUS=2: no such variable; did you mean GPUS?"),
        ("MODELL=a/b", "MODELL=a/b: no such variable; did you mean MODEL?"),
        ("BATCH=4", 'BATCH=4: no such variable; it is a flag: ARGS="--effective_batch_size N".'),
        ("LR=1e-4", 'LR=1e-4: no such variable; it is a flag: ARGS="--learning_rate N".'),
        ("QWERTY=1", "QWERTY=1: no such variable; a flag of the recipes goes into ARGS"),
        pytest.param("D;E=3", "D;E=3: no such variable", marks=pytest.mark.injection),
        pytest.param(
            "X='a\" b` $(touch pwned)`", "X='a\" b` $(touch pwned)`: no such variable", marks=pytest.mark.injection
        ),
        pytest.param(
            "X=$(shell touch pwned)$HOME", "X=$(shell touch pwned)$HOME: no such variable", marks=pytest.mark.injection
        ),
    ],
)
def test_an_unknown_variable_is_refused(word, says):
    done = make("sft", "GPUS=1", word)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode == 2 and done.stdout == "" and len(errors) == 1, done.stdout + done.stderr
    assert errors[0].startswith(f"zerofit: error: {says}")
    assert not (ROOT / "pwned").exists()


def test_a_resume_takes_the_recipe_of_the_environment_and_not_the_default(monkeypatch):
    assert '--recipe="$RECIPE"' not in make("-n", "resume", "RUN=x").stdout
    assert '--recipe="$RECIPE"' in make("-n", "resume", "RUN=x", "RECIPE=my_sft.py").stdout
    monkeypatch.setenv("RECIPE", "my_sft.py")
    assert '--recipe="$RECIPE"' in make("-n", "resume", "RUN=x").stdout


@pytest.mark.bad_input
@pytest.mark.parametrize("verb", [(), ("help",), ("clean",), ("install",), ("show", "lora"), ("no-such-verb",)])
def test_every_verb_refuses(verb):
    done = make(*verb, "stage=2", "GPU_COUNT=2")
    assert done.returncode == 2 and done.stdout == ""
    assert "did you mean ZERO?" in done.stderr and "GPU_COUNT=2: no such variable; did you mean GPUS?" in done.stderr


def test_known_variables_and_those_of_make_pass():
    words = ["SHELL=bash", "RECIPE=lora", "MAKEFLAGS=", "ZERO=$2", "DATA=a b's", "EXTRAS=dev", "MERGE=1", "SWEEP=x"]
    done = make("help", *words)
    assert done.returncode == 0 and "make sft" in done.stdout, done.stderr
