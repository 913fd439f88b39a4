"""make variables that nothing reads, or not the verb: refused before anything runs."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT

from zerofit.launch import make_variables


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
        ("BATCH=4", 'BATCH=4: no such variable; use the flag: ARGS="--effective_batch_size N".'),
        ("LR=1e-4", 'LR=1e-4: no such variable; use the flag: ARGS="--learning_rate N".'),
        ("QWERTY=1", "QWERTY=1: no such variable; pass flags of the recipes as ARGS"),
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


@pytest.mark.parametrize(
    ("line", "runs"),
    [
        ("sft", "launch recipes/sft.py"),
        ("show lora GPUS=2 SP=2", "launch --gpus=2 --show recipes/lora.py --sp_size=2"),
        ("lora HOSTS=h GPUS=2 PORT=1", "hosts --hosts=h --gpus=2 --port=1 recipes/lora.py"),
        ("dpo NODES=2 NODE_RANK=0 MASTER_ADDR=a GPUS=8",
         "launch --gpus=8 --nnodes=2 --node_rank=0 --master_addr=a recipes/dpo.py"),
        ("pipeline", "launch --gpus=2 recipes/pipeline.py"),
        ("pipeline PP=4", "launch --gpus=4 recipes/pipeline.py --pp_size=4"),
        ("pipeline PP=4 NODES=2", "launch --nnodes=2 recipes/pipeline.py --pp_size=4"),
        ("pipeline PP=4 HOSTS=h", "hosts --hosts=h recipes/pipeline.py --pp_size=4"),
        ("launch RECIPE=a/my.py OUT=", "launch a/my.py"),
        ("resume RUN=r", "resume r"),
        ("resume RUN=r RECIPE=my.py ZERO=3 GPUS=1", "resume --gpus=1 --recipe=my.py r --zero=3"),
        ("show slurm RECIPE=lora OUT=o", "slurm --print recipes/lora.py --output_dir=o"),
        ("export RUN=r MERGE=1 FOR=vllm", "export --merge --for=vllm r"),
        ("export RUN=r MERGE=0", "export r"),
        ("convert FILE=f OUT=o", "convert --output=o f"),
    ],
)  # fmt: skip
def test_what_a_line_runs(line, runs):
    goals = [word for word in line.split() if "=" not in word]
    given = dict(word.split("=") for word in line.split() if "=" in word) | {"ZEROFIT_GOALS": " ".join(goals)}
    assert make_variables.words(goals[-1], given) == runs.split()
    assert set(given) - {"ZEROFIT_GOALS"} <= make_variables.reads(goals[-1], given)


def test_the_first_word_of_two_goals_runs_nothing():
    assert make_variables.words("show", {"ZEROFIT_GOALS": "show lora", "GPUS": "2"}) == []


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


TEXT = (ROOT / "Makefile").read_text()
VERBS = [verb for verb in re.findall(r"^([a-z-]+):.*##", TEXT, re.M) if verb != "help"]


STUB = f"""#!{sys.executable}
import json, os, sys
if sys.argv[1] == "-c" or sys.argv[1:3] == ["-m", "zerofit.launch.make_variables"]:
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
print(json.dumps(sys.argv[1:]))
"""


@pytest.fixture
def installed(tmp_path):
    """A folder with the Makefile in which everything is installed by its time stamps, and every program is a stub."""
    for name in ("pyproject.toml", "constraints.txt", ".venv/.zerofit-installed", ".venv/.zerofit-dev-installed",
                 ".venv-peers/.installed"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for program in (".venv/bin/python", ".venv/bin/docker", ".venv-peers/bin/python"):
        (tmp_path / program).parent.mkdir(exist_ok=True)
        (tmp_path / program).write_text(STUB)
        (tmp_path / program).chmod(0o755)
    (tmp_path / "Makefile").write_text(TEXT)
    return tmp_path


def in_folder(folder, words, **more):
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")} | more
    words = ["make", "--no-print-directory", *words]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=env)
    return done.stdout, done.stderr


@pytest.mark.oracle
@pytest.mark.parametrize("beside", [set(), {"NODES"}, {"HOSTS", "NODES"}], ids=["here", "nodes", "hosts"])
@pytest.mark.parametrize("verb", [*VERBS, "show lora", "show slurm", "show data"])
def test_a_verb_refuses_each_variable_that_its_commands_do_not_read(installed, verb, beside):
    """What the commands read: the variables whose values their programs, which are stubs, are given."""
    given = [name for name in make_variables.VARIABLES if name in beside or name not in ("NODES", "HOSTS")]
    words = {name: f"{name}=<{name}>" for name in given}
    _, errors = in_folder(installed, [*verb.split(), *words.values()])
    refused = set(re.findall(r"error: (\w+)=<\w+>: make [a-z -]+ does not read it; ", errors))
    assert len(errors.splitlines()) == len(refused) + 1, errors
    commands, _ = in_folder(installed, [*verb.split(), *(words[name] for name in given if name not in refused)])
    read = {name for name in given if f"<{name}>" in commands} | ({"MERGE"} if "--merge" in commands else set())
    assert set(given) - refused == read, commands


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("plan SEQ=4096", 'SEQ=4096: make plan does not read it; use the flag: ARGS="--max_length N".'),
        (
            "sft RUN=x",
            "RUN=x: make sft does not read it; it works with make cancel, chat, eval,",
        ),
        ("show lora RECIPE=x", "RECIPE=x: make show lora does not read it; it works with make batch-size,"),
        ("slurm NODES=2 NODE_RANK=1", "NODE_RANK=1: make slurm does not read it; it works with make dpo, launch,"),
        ("lora MASTER_ADDR=a", "MASTER_ADDR=a: make lora does not read it; it requires NODES=."),
        ("resume RUN=a NODE_RANK=1", "NODE_RANK=1: make resume does not read it; it requires NODES=."),
        ("dpo INCLUDE=a", "INCLUDE=a: make dpo does not read it; it requires HOSTS=."),
        ("sft HOSTS=h NODES=2", "NODES=2: make sft does not read it; HOSTS= determines it."),
        ("launch EXTRAS=dev", "EXTRAS=dev: make launch does not read it; it works with make install."),
        ("chat RUN=x GPUS=2", "GPUS=2: make chat does not read it; remove it."),
        ("clean ARGS=`x`$y", "ARGS=`x`$y: make clean does not read it; remove it."),
    ],
)
def test_a_variable_that_the_verb_does_not_read_is_refused(words, says):
    done = make(*words.split())
    errors = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert done.returncode == 2 and done.stdout == "" and len(errors) == 1, done.stdout + done.stderr
    assert errors[0].startswith(f"zerofit: error: {says}")


ENVIRONMENT = {"OUT": "/x y$HOME", "MODEL": "m", "DATA": "d", "PORT": "8080", "GPUS": "3", "RUN": "r", "FOR": "vllm",
               "ARGS": "--hub_token secret", "RECIPE": "lora", "ENV": "production", "LAUNCHER": ""}  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("sft", "OUT MODEL DATA PORT GPUS ARGS ENV"),
        ("sft OUT=mine GPUS=1 ENV=active", "MODEL DATA PORT ARGS"),
        ("launch", "OUT MODEL DATA PORT GPUS ARGS RECIPE ENV"),
        ("export RUN=x", "OUT FOR ARGS ENV"),
        ("chat", "RUN ARGS ENV"),
        ("doctor", "OUT PORT GPUS ARGS ENV"),
        ("help", ""),
    ],
)
def test_no_variable_is_taken_from_the_environment_without_a_line(installed, words, said):
    output, errors = in_folder(installed, ["-n", *words.split(), f"PYTHON={sys.executable}"], **ENVIRONMENT)
    lines = [line for line in errors.splitlines() if line.startswith("note: ")]
    assert sorted(re.findall(r"^note: (\w+)", line)[0] for line in lines) == sorted(said.split()), errors
    for line in lines:
        name = re.findall(r"^note: (\w+)", line)[0]
        shown = name if name == "ARGS" else f"{name}={ENVIRONMENT[name]}"
        assert line == f"note: {shown}: set in the environment; override or clear it with `make ... {name}=`."
    assert "note: " not in output and "secret" not in output + errors


ARGS = """--system 'You are a cat' --file=a\\ b "*" '$HOME' """

NEEDED = {"RUN": "r", "TASKS": "t", "FILE": "f", "RECIPE": "x"}


def arguments_of(folder, verb, args):
    """Return the arguments of the last command of a verb."""
    read = make_variables.reads(verb, {"ZEROFIT_GOALS": verb})
    words = [f"{name}={value}" for name, value in NEEDED.items() if name in read]
    output, errors = in_folder(folder, [verb, f"ARGS={args}", *words])
    return [json.loads(line) for line in output.splitlines() if line.startswith("[")][-1:], errors


@pytest.mark.parametrize(
    "verb", [verb for verb in VERBS if "ARGS" in make_variables.reads(verb, {"ZEROFIT_GOALS": verb})]
)
def test_every_verb_splits_args_as_the_recipes_do(installed, verb):
    [given], errors = arguments_of(installed, verb, ARGS)
    words = shlex.split(ARGS)
    assert f"--args={ARGS}" in given or given[-len(words) :] == words, errors


@pytest.mark.bad_input
def test_an_unclosed_quote_of_args_is_named(installed):
    for verb in ("chat", "models"):
        given, errors = arguments_of(installed, verb, "--system 'You")
        assert not given and "zerofit: error: ARGS=--system 'You: cannot be split into words: no closing quot" in errors


@pytest.mark.bad_input
def test_a_recipe_to_reproduce_is_asked_for(installed):
    _, errors = in_folder(installed, ["reproduce"])
    assert "make reproduce: set RECIPE=" in errors
