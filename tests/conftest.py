"""Shared fixtures and helpers: environment, and real recipe runs on one or several ranks."""

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from fork_server import ForkServer, start

from zerofit.base import distributed, rank_status
from zerofit.launch import make_variables

# `make test-gpu` runs only the tests marked `gpu`. All others expect the CPU's numbers, so a GPU of the machine is
# hidden from them.
GPU_TESTS = os.environ.get("ZEROFIT_TEST_GPU", "0") not in ("", "0")
if not GPU_TESTS:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}

atexit.register(gc.freeze)  # as zerofit's commands do: the interpreter ends seconds sooner

ROOT = Path(__file__).resolve().parents[1]
if "MAKELEVEL" in os.environ:  # `make test` exports its variables, which a test's own make would take for the user's
    for name in make_variables.EXPORTED:
        os.environ.pop(name, None)

pytest_plugins = ["results"]
TINY = ROOT / "examples" / "tiny"
isolated = False
of_all_workers = ""  # folder of the fork server that the workers of `pytest -n` share


def pytest_addoption(parser):
    parser.addoption("--isolated", action="store_true", help="a fresh interpreter for every recipe; 3 times slower")


def pytest_configure(config):
    global isolated, of_all_workers
    isolated = config.getoption("isolated")
    os.environ.pop("PYTEST_ADDOPTS", None)  # of this pytest, not of those that tests start
    of_all_workers = getattr(config, "workerinput", {}).get("fork_server", "")
    if not GPU_TESTS:
        return
    import torch

    from zerofit.base import hardware

    if not torch.cuda.is_available():
        pytest.exit(f"ZEROFIT_TEST_GPU: {hardware.why_no_gpu() or 'torch sees no GPU here'}", 2)
    config.option.markexpr = "gpu"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Let the workers of `pytest -n` share one fork server, which imports while they collect."""
    if not isolated:
        node.workerinput["fork_server"] = str(Path(fork_server().address).parent)


# Files that take longest, begun first: else one worker of `pytest -n` runs the last of them alone.
LONGEST = """
    plan/test_plan.py test_readme.py objective/test_preference.py train/test_training.py launch/test_own_recipe.py
    train/test_memory_tracker.py launch/test_launch.py test_imports.py launch/test_extending.py plan/test_choices.py
    model/test_adapters.py train/test_oracle.py export/test_export.py gpu_machine/test_decisions.py
    train/test_checkpoint.py launch/test_rendezvous.py launch/test_retry.py gpu_machine/test_choice.py
    train/test_resume.py export/test_report.py launch/test_doctor.py
""".split()


def pytest_collection_modifyitems(items):
    order = {ROOT / "tests" / file: number for number, file in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    for item in items:
        if not GPU_TESTS and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: make test-gpu"))


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # a full collection in a test need not walk what the libraries have made


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory):
    """Remove the variables of launchers and of `make test`, and use empty cache folders."""
    for name in list(os.environ):
        if (
            name.startswith("ACCELERATE_")
            or name in "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT RECIPE".split()
        ):
            del os.environ[name]
    os.environ["ZEROFIT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["HF_HOME"] = str(tmp_path_factory.mktemp("hf_home"))  # no cached accelerate config of this machine
    os.environ["PYTHONPATH"] = str(ROOT / "src")
    os.environ["ZEROFIT_PAGE"] = "0"  # no process more for each of hundreds of runs; tests/export/test_live.py sets it


@contextlib.contextmanager
def process_as_before():
    """Restore the signals that a rank hears (rank_status.StopRequest), and the environment: processes inherit both."""
    handlers = {number: signal.getsignal(number) for number in rank_status.SAVE_SIGNALS}
    environment = dict(os.environ)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture(autouse=True)
def isolated_test(request):
    """Restore what a test changes, and one thread a worker: more would spin on cores that other workers use."""
    if hasattr(request.config, "workerinput"):
        import torch

        torch.set_num_threads(1)  # each time: code under test sets all cores, as for a run of one process
    with process_as_before():
        yield


def runs_slow(request) -> bool:
    """Return whether tests marked slow are selected: fixtures that serve both make their runs only then."""
    return "not slow" not in request.config.getoption("markexpr").replace("slow or not slow", "")


def slow_but(names, short) -> list:
    """Return the names of cases as parameters of a test, marked slow but for those that `make test` runs."""
    return [name if name in short else pytest.param(name, marks=pytest.mark.slow) for name in names]


def runs_beside_one_rank(request, folder: Path, cases: dict, short, model_of, alone, split) -> dict:
    """Return {name: Run} of cases on several ranks, and of each model that they train on one.

    Without slow tests only the cases in `short` are run. Args: cases: {ranks: {name: (model, *arguments)}}; model_of:
    makes a model's folder from its name and a path; alone, split: the (recipe, flags) of one rank, from folder and name
    of the model, and of a case, from these and its arguments.
    """
    everything = runs_slow(request)
    chosen = {ranks: {n: c for n, c in named.items() if everything or n in short} for ranks, named in cases.items()}
    kinds = dict.fromkeys(kind for named in chosen.values() for kind, *_ in named.values())
    models = {kind: model_of(kind, folder / f"model-{kind}") for kind in kinds}
    found = run_world(1, {kind: alone(models[kind], kind) for kind in kinds}, folder)
    for ranks, named in chosen.items():
        world = {name: split(models[kind], kind, *rest) for name, (kind, *rest) in named.items()}
        found |= run_world(ranks, world, folder) if world else {}
    return found


@dataclass
class Run:
    """The run folder of a finished recipe run."""

    folder: Path

    @property
    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [m["loss"] for m in self.metrics if "loss" in m]

    @property
    def grad_norms(self) -> list[float]:
        return [m["grad_norm"] for m in self.metrics if "loss" in m]

    def json(self, name: str) -> dict:
        return json.loads((self.folder / name).read_text())


def run_world(ranks: int, cases: dict[str, tuple[str, list[str]]], folder: Path, **env) -> dict[str, Run]:
    """Run {name: (recipe, flags)} one by one in a single launch of `ranks` processes; return {name: Run}.

    Args: env: added variables.
    """
    listed = [
        {"recipe": recipe, "flags": [*flags, "--gpus", str(ranks), "--output_dir", str(folder / name)]}
        for name, (recipe, flags) in cases.items()
    ]
    file = folder / f"cases-{ranks}.json"
    file.write_text(json.dumps(listed))
    threads = str(max(1, 2 // ranks))
    variables = {"OMP_NUM_THREADS": threads} | env
    done = run_python([str(ROOT / "tests" / "world.py"), str(file)], ranks=ranks, timeout=1500, **variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return {name: Run(folder / name) for name in cases}


def recipe_process(recipe: str, *flags: str, cwd=None, **env) -> subprocess.CompletedProcess:
    """Run `python recipes/<recipe>.py flags` as a user would; env: added variables."""
    return run_python([str(ROOT / "recipes" / f"{recipe}.py"), *flags], cwd=cwd, **env)


def run_python(words: list[str], ranks: int = 0, cwd=None, timeout: float = 300, **env) -> subprocess.CompletedProcess:
    """Run `python words`, on `ranks` ranks as torchrun would start them; env: added variables.

    Forks of the process that has the libraries loaded; with --isolated a fresh interpreter, or torchrun.
    A rank that fails ends the others. Raises: subprocess.TimeoutExpired after `timeout` seconds.
    """
    environment = os.environ | env
    if isolated:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks else []
        return subprocess.run([sys.executable, *launcher, *words], capture_output=True, text=True, timeout=timeout,
                              cwd=cwd, env=environment)  # fmt: skip
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(distributed.free_port())}
    size = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    of_ranks = [environment | place | size | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors, Path(os.devnull).open() as nothing:
        streams = [nothing.fileno(), out.fileno(), errors.fileno()]
        folder, server = str(cwd or Path.cwd()), fork_server().address
        programs = [start(server, words, of_rank, folder, streams) for of_rank in of_ranks or [environment]]
        codes = exit_codes(programs, time.monotonic() + timeout)
        out.seek(0)
        errors.seek(0)
        done = out.read().decode(errors="replace"), errors.read().decode(errors="replace")
    if codes is None:
        raise subprocess.TimeoutExpired(words, timeout, *done)
    return subprocess.CompletedProcess(words, next((code for code in codes if code), 0), *done)


def exit_codes(programs: list, deadline: float) -> list[int] | None:
    """Return the exit codes in the order of ending, up to the first that is not 0; None after the deadline."""
    codes, answers = [], dict.fromkeys(programs, b"")
    with contextlib.ExitStack() as stack:
        for program in programs:
            stack.enter_context(program)
        while answers and not any(codes):
            ready = select.select(list(answers), [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                return None
            for program in ready:
                answer = program.recv(64)
                answers[program] += answer
                if not answer or answers[program].count(b"\n") == 2:  # its process id, its exit code
                    codes.append(int([*answers.pop(program).split(), b"-9"][1]))
    return codes


@functools.cache
def fork_server() -> ForkServer:
    """Return the server that the workers share, else start one that ends with this process."""
    if of_all_workers:
        return ForkServer(Path(of_all_workers))
    folder = Path(tempfile.mkdtemp(prefix="zerofit-tests-"))
    server = ForkServer(folder)
    server.begin(HF_HOME=str(folder / "hf_home"), PYTHONPATH=str(ROOT / "src"))
    atexit.register(lambda: (server.stop(), shutil.rmtree(folder)))
    return server


def python() -> str:
    """Return the interpreter to give to make or a launcher: one whose programs are forks, if not --isolated."""
    return sys.executable if isolated else fork_server().python


@functools.cache
def two_layers() -> str:
    """Return a folder with the first half of the bundled model: stage 3 exchanges each matrix, which takes its time."""
    from safetensors.torch import load_file, save_file

    folder = Path(tempfile.mkdtemp(prefix="zerofit-tests-"))
    atexit.register(shutil.rmtree, folder)
    shutil.copytree(TINY / "model", folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text()) | {"num_hidden_layers": 2}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    weights = load_file(file := folder / "model" / "model.safetensors")
    kept = {name: w for name, w in weights.items() if not name.startswith(("model.layers.2.", "model.layers.3."))}
    save_file(kept, file, metadata={"format": "pt"})
    return str(folder / "model")


@pytest.fixture
def forks(monkeypatch):
    """Make forks of the processes that the code under test starts with sys.executable."""
    monkeypatch.setattr(sys, "executable", python())


@pytest.fixture
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY / "model")
