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
    "torch._dynamo": "torch.compile, and the attention of the models",
    "datasets": "the rows",
}
NOT_OF_A_LAUNCH = {
    "deepspeed": "it chooses its accelerator when it is imported, and a launch does not know the ranks' yet",
    "matplotlib": "plots are drawn at the end of a run",
}
REFUSED = ["launch recipes/sft.py --output_dir /proc/x", "launch recipes/sft.py --data missing.jsonl",
           "launch recipes/sfd.py", "launch --gpus none recipes/sft.py", "status runs/none"]  # fmt: skip
CODE = """
import json, sys
commands, names = json.loads(sys.argv[1]), json.loads(sys.argv[2])
from zerofit import cli
codes, found = [], []
for words in commands:
    sys.argv = ["zerofit", *words]
    try:
        cli.main()
    except SystemExit as stop:
        codes.append(stop.code)
    found.append([name for name in names if name in sys.modules])
print(json.dumps([codes, found]))
"""


def imported(commands: list[list[str]]) -> tuple[list[int], list[list[str]]]:
    """Return the exit codes of `zerofit` commands that ended with one, and the modules above imported after each."""
    words = [sys.executable, "-c", CODE, json.dumps(commands), json.dumps([*SLOW, *NOT_OF_A_LAUNCH])]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.bad_input
def test_a_mistake_is_refused_before_the_libraries_are_imported():
    assert imported([words.split() for words in REFUSED]) == ([2] * len(REFUSED), [[]] * len(REFUSED))


@pytest.mark.slow
def test_a_launch_imports_no_more_than_its_checks_need(tmp_path):
    """--show reads no rows and builds no model. A check that needs torch refuses --gpus."""
    words = ["launch", "--gpus", "1000", "recipes/sft.py", "--output_dir", str(tmp_path / "run")]
    refused, (shown, launched) = imported([["launch", "--show", "recipes/sft.py"], words])
    assert refused == [2] and launched == [name for name in SLOW if name != "datasets"]
    assert {"torch", "transformers.training_args"} <= set(shown) and "datasets" not in shown


def test_the_interpreter_ends_without_collecting_what_the_libraries_made():
    ends = "import atexit, gc\natexit.register(lambda: print(gc.get_freeze_count() > 0))\n"  # the first is the last
    for main in ("sys.argv = ['zerofit', '--version']; from zerofit.cli import main; main()",
                 "from zerofit import entrypoint; entrypoint.guard(lambda: None)"):  # fmt: skip
        done = subprocess.run([sys.executable, "-c", ends + "import sys\n" + main], capture_output=True, text=True)
        assert done.stdout.endswith("True\n"), done.stderr


@pytest.mark.parametrize("triton", [False, True])
def test_the_end_of_the_interpreter_is_silent_where_triton_lists_its_functions(triton):
    """What libraries print in their exit handlers stays. Without triton, so does what comes after them."""
    program = f"""
import atexit, ctypes, sys, types
from zerofit.base import process
process.begin()
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
libc.on_exit(libc.psignal, ctypes.c_void_p(libc.strdup(b"leaked")))  # C code that writes to stderr
if {triton}:
    sys.modules["triton._C.libtriton"] = types.ModuleType("libtriton")
atexit.register(lambda: print("summary", file=sys.stderr))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "summary\n" + "leaked: Unknown signal 0\n" * (not triton)


# What a process is like: environment, modules beside zerofit's, signal handlers, filters of warnings and logs, threads,
# the signal at the parent's death.
STATE = """
import ctypes, logging, os, signal, sys, threading, warnings
def state():
    death = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(2, ctypes.byref(death)) == 0  # PR_GET_PDEATHSIG
    return {
        "environment": dict(os.environ),
        "modules": sorted(name for name in sys.modules if name.partition(".")[0] != "zerofit"),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "warnings": list(warnings.filters),
        "logs": sorted(logging.root.manager.loggerDict),
        "threads": threading.active_count(),
        "death": death.value,
    }
before = state()
"""
UNCHANGED = """
assert "Trainer" in dir(zerofit) and zerofit.__version__.count(".") == 2 and not hasattr(zerofit, "nothing")
after = state()
assert before == after, [name for name in before if before[name] != after[name]]
"""
BEGUN = """
after = state()
assert after["environment"]["PYTORCH_ALLOC_CONF"]
assert after["death"] == signal.SIGKILL and "zerofit-end" in [thread.name for thread in threading.enumerate()]
assert logging.getLogger("torchao").level == logging.ERROR
print("begun")
"""
ENTRIES = {
    "zerofit": "sys.argv = ['zerofit', '--version']; from zerofit.cli import main; main()",
    "python -m zerofit": "sys.argv = ['zerofit', '--version']; import runpy; runpy.run_module('zerofit')",
    "guard": "from zerofit import entrypoint; entrypoint.guard(lambda: None)",
    "recipe": "from zerofit import Recipe, entrypoint; entrypoint.check_early(Recipe('x'))",
    "torchrun": """
import runpy
from torch.distributed import run
run.main = lambda argv: None
runpy.run_module('zerofit.launch.torchrun', run_name='__main__')""",
}


def python_of_a_supervisor(code: str) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter whose supervisor is this process, without settings of torch's allocator."""
    env = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    env["ZEROFIT_SUPERVISOR"] = str(os.getpid())
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env)


def test_importing_the_package_changes_nothing_in_the_process():
    done = python_of_a_supervisor(f"{STATE}import zerofit\n{UNCHANGED}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("entry", ENTRIES)
def test_each_program_prepares_its_process(entry):
    done = python_of_a_supervisor(f"{STATE}{ENTRIES[entry]}\n{BEGUN}")
    assert done.stdout.endswith("begun\n"), done.stderr


@pytest.mark.slow
def test_a_recipe_imports_torch_only_after_the_settings_that_torch_reads():
    """Also one without entrypoint.check_early."""
    looks = "import importlib.abc, os, sys\nclass Look(importlib.abc.MetaPathFinder):\n"
    looks += "    def find_spec(self, name, path, target=None):\n"
    looks += "        if name == 'torch': print('PYTORCH_ALLOC_CONF' in os.environ)\n"
    done = python_of_a_supervisor(f"{looks}sys.meta_path.insert(0, Look())\nfrom zerofit import recipe\n")
    assert {*done.stdout.splitlines()} == {"True"}, done.stderr


def test_public_names():
    import zerofit
    from zerofit.train.trainer import ZerofitTrainer

    assert zerofit.Trainer is ZerofitTrainer and zerofit.__all__ == [*zerofit._PUBLIC, "__version__"]
