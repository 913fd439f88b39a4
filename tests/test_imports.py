"""Which libraries a command imports: nothing that it does not need, since each takes seconds of every process."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

# Module -> what imports it without need if it turns up.
SLOW = {
    "torch": "everything",
    "transformers.modeling_utils": "the models",
    "transformers.training_args": "TrainingArguments",
    "datasets": "the rows",
    "peft": "the adapters",
}
NOT_OF_A_LAUNCH = {
    "bitsandbytes.functional": "peft imports bitsandbytes (model/patches.load_bitsandbytes_on_use)",
    "torch._inductor.select_algorithm": "torch.compile as bitsandbytes is imported",
    "deepspeed": "it chooses its accelerator when it is imported, and a launch does not know the ranks' yet",
    "matplotlib": "plots are drawn at the end of a run",
}
CODE = """
import json, sys
names, sys.argv = json.loads(sys.argv[1]), ["zerofit", *sys.argv[2:]]
import zerofit
from zerofit import cli
try:
    cli.main()
except SystemExit as stop:
    print(json.dumps([stop.code, [name for name in names if name in sys.modules]]))
"""


def imported(words: list[str], names) -> tuple[int, list[str]]:
    """Return the exit code of `zerofit words`, and which of the modules it has imported."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-c", CODE, json.dumps([*names]), *words]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=env)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.bad_input
@pytest.mark.parametrize("words", [
    "launch recipes/sft.py --zero 7", "launch recipes/sft.py --data missing.jsonl", "launch recipes/sfd.py",
    "launch --gpus none recipes/sft.py", "status runs/none",
])  # fmt: skip
def test_a_mistake_is_refused_before_the_libraries_are_imported(words):
    assert imported(words.split(), SLOW) == (2, [])


def test_a_launch_imports_no_more_than_its_checks_need(tmp_path):
    """--gpus: refused by a check that needs torch."""
    words = ["launch", "--gpus", "1000", "recipes/sft.py", "--output_dir", str(tmp_path / "run")]
    assert imported(words, NOT_OF_A_LAUNCH) == (2, [])
    assert imported(words, SLOW) == (2, [*SLOW])  # the names are those of today's libraries


def test_bitsandbytes_loads_when_it_is_used():
    code = """
import sys, zerofit, peft
assert "bitsandbytes.functional" not in sys.modules
import bitsandbytes.nn
assert bitsandbytes.nn.Linear4bit is sys.modules["bitsandbytes.nn.modules"].Linear4bit
from peft.import_utils import is_bnb_4bit_available
assert is_bnb_4bit_available() and not hasattr(bitsandbytes, "nothing") and bitsandbytes.__version__
from peft.tuners.lora import bnb
assert issubclass(bnb.Linear4bit, object) and bnb.bnb.nn.Linear4bit is bitsandbytes.nn.Linear4bit
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
