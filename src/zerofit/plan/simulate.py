"""Run simulated ranks in separate processes to predict the allocations of a job; cache the answers.

A simulated rank (simulated_rank.py) builds the model, adapter, optimizer and DeepSpeed configuration of a recipe and
trains two steps with ZerofitTrainer. Tensors lack storage (torch's FakeTensorMode), torch's fake process group
replaces the other ranks, and memory_tracker.MemoryTracker counts the bytes that would be allocated.

    job = parse.request("sft", ["--model", "folder", "--zero", "3"])
    (answer,) = run_all([Question(job, ranks=64, gpu=hardware.GPUS["h100-80g"])])
    answer["total"]["backward"]

A simulation needs a separate process, because fake_device.py patches libraries.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from zerofit.base import allocator, hardware, paths
from zerofit.base.errors import UserError
from zerofit.base.paths import PACKAGE, cache_root
from zerofit.job import program
from zerofit.job.recipe import Recipe
from zerofit.job.request import Request

STEPS = 2  # the first step allocates optimizer states, ZeRO-3 prefetches from the second step on


class SimulationFailed(Exception):
    """The job cannot be simulated, or the simulation exceeds the time limit. The message is the reason."""


# --- questions ---


@dataclass(frozen=True)
class Question:
    """A rank of a job to simulate. It is sent to the simulation's process as JSON."""

    request: Request  # the job; its data set is not opened
    ranks: int  # ranks of the job
    rank: int = 0  # the simulated rank
    gpu: hardware.Gpu | None = None  # the planned GPU; None: this machine's CPU
    # "gpu": without memory, and host tensors are counted separately; "cpu": like a CPU run; "cuda": on a real GPU with
    # fake=False, to validate simulations; "": "gpu" if `gpu` is set, else "cpu"
    device: str = ""
    fake: bool = True  # False: tensors are real, and only the other ranks are simulated
    liger: bool = False  # whether Liger's kernels run if they are the default
    padded: bool = False  # rows differ in length, so attention needs a mask
    overrides: dict = field(default_factory=dict)  # replaced values of the model's config.json (fewer layers)
    expandable_segments: bool = field(default_factory=allocator.expandable_segments)  # setting of torch's allocator
    # Functions "FILE:FUNCTION" that change the trainer before training, e.g. to behave like another training loop.
    before_training: tuple[str, ...] = ()
    program: tuple[str, ...] = ()  # (file, sha256) of a custom recipe; (): a recipe of zerofit

    def __post_init__(self):
        object.__setattr__(self, "device", self.device or ("gpu" if self.gpu else "cpu"))
        object.__setattr__(self, "program", self.program or _custom_program(self.request.recipe))

    @property
    def layers(self) -> int | None:
        """Return the number of layers to simulate; None: all layers."""
        return self.overrides.get("num_hidden_layers")

    def as_json(self) -> dict:
        """Return the question as JSON data."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        request = {"recipe": self.request.recipe.name, "values": dict(self.request.values)}
        request["source"] = dict(self.request.source)
        return plain | {"request": request, "gpu": self.gpu and asdict(self.gpu)}

    @classmethod
    def from_json(cls, plain: dict) -> "Question":
        """Return the question of `as_json`."""
        tuples = {name: tuple(plain[name]) for name in ("before_training", "program")}
        gpu = plain["gpu"] and hardware.Gpu(**plain["gpu"])
        recipe = program.start(plain["program"][0]).recipe if plain["program"] else None
        request = plain["request"] | {"recipe": recipe or program.recipe_of(plain["request"]["recipe"])}
        return cls(**plain | tuples | {"request": Request(**request), "gpu": gpu})


def _custom_program(recipe: Recipe) -> tuple[str, ...]:
    """Return (file, sha256) of a custom recipe, () for a recipe of zerofit."""
    custom = program.custom_program(recipe)
    return tuple(custom.facts.values()) if custom else ()


def run_all(
    questions: list[Question], cache: Path | None = None, seconds: float | None = None
) -> list[dict | Exception]:
    """Return the answers in order, each a dict or an exception.

    A process imports the libraries once and answers each question in a fork, one per core in parallel. A question for a
    real GPU gets a separate process: CUDA cannot be used in a fork of a process that has queried it.
    Args: cache: folder of answers by question. seconds: time limit after which the open questions fail; None: no limit.
    Returns: per question {"peak": {phase: {part: bytes}}, "total": {phase: bytes}, "host": bytes of offload, loading;
        "host_saving": additional bytes on rank 0 during a save, "model_states": see MemoryTracker, "allocator": see
        caching_allocator.required_bytes, "parameters", "trainable", "seconds"}, a UserError or a SimulationFailed.
    """
    files = [cache / f"{key(q)}.json" if cache else None for q in questions]
    answers: list = [file and _load_answer(file) for file in files]
    open_questions = [i for i, answer in enumerate(answers) if answer is None]
    if not open_questions:
        return answers
    if len(open_questions) > 1 and any(questions[i].device == "cuda" for i in open_questions):
        for i in open_questions:
            (answers[i],) = run_all([questions[i]], cache, seconds)
        return answers
    new_answers = _ask_all([questions[i] for i in open_questions], seconds)
    for i, answer in zip(open_questions, new_answers, strict=True):
        answers[i] = _as_exception(answer, cache)
        if files[i] and not isinstance(answers[i], Exception):  # failures may be temporary
            save_answer(files[i], answer)
    return answers


def _ask_all(questions: list[Question], seconds: float | None) -> list[dict]:
    """Return a process's answers to the questions, with failures as dicts for `_as_exception`."""
    fake, cuda = all(q.fake for q in questions), any(q.device == "cuda" for q in questions)
    process = _ready.pop() if fake and not cuda and _ready else _start(fake, cuda)
    lines: list[str] = []
    errors = _ask(process, json.dumps([q.as_json() for q in questions]), seconds, lines.append, keep=_reusing and fake)
    if errors is None:
        return [{"too slow": True}] * len(questions)
    answers = dict(json.loads(line.removeprefix(ANSWER_MARK)) for line in lines if line.startswith(ANSWER_MARK))
    missing = {"trace": errors or "the simulation's process printed nothing"}
    return [answers.get(i, missing) for i in range(len(questions))]


ANSWER_MARK = "simulation-answer: "
ALL_ANSWERED = "simulation-done"  # line after the answers to a list of questions

_ready: list[subprocess.Popen] = []  # processes that import the libraries and wait for questions

_reusing = False  # whether a process is kept for the next questions


def prestart() -> None:
    """Start the process for the next questions, so that its slow imports run in parallel."""
    if not _ready:
        _ready.append(_start(fake=True, cuda=False))


@contextlib.contextmanager
def reuse_process():
    """Answer all questions of the body in a single process, which imports the libraries once.

    A nested `reuse_process` uses the same process.
    """
    global _reusing
    if _reusing:
        yield
        return
    _reusing = True
    try:
        yield
    finally:
        _reusing = False
        stop_prestarted()


def stop_prestarted() -> None:
    """End the process that waits for questions, if any."""
    while _ready:
        _end(_ready.pop())


def _end(process: subprocess.Popen, reader: threading.Thread | None = None) -> None:
    """Kill the process and its forks, wait for the reader thread, and close the pipes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if reader is not None:
        reader.join()
    for stream in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):  # the process may end before it reads its input
            stream.close()


def _ask(
    process: subprocess.Popen, text: str, seconds: float | None, receive: Callable[[str], None], keep: bool = False
) -> str | None:
    """Pass each line that the process prints for `text` to `receive`; return its output on stderr.

    Return None if an answer is missing after `seconds`.
    Args: keep: let the process wait for the next questions; otherwise kill it and its forks.
    """
    received_all = False

    def read():
        nonlocal received_all
        for line in process.stdout:
            if line.strip() == ALL_ANSWERED:
                received_all = True
                return
            receive(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        with contextlib.suppress(BrokenPipeError):  # the process has ended; the reason is in its stderr
            process.stdin.write(text + "\n")
            process.stdin.flush()
        reader.join(None if seconds is None else max(0.0, seconds))
        if reader.is_alive():
            return None
        if received_all and keep:
            _ready.append(process)
        process.stderr.seek(0)
        return process.stderr.read()
    finally:
        if process not in _ready:
            _end(process, reader)


def environment(fake: bool, cuda: bool) -> dict[str, str]:
    """Return the environment of a process for questions with these attributes."""
    env = {k: v for k, v in os.environ.items() if k not in _LAUNCHER_VARIABLES and not k.startswith("TORCHELASTIC_")}
    env |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TOKENIZERS_PARALLELISM": "false"}
    # Compiled kernels, as in DeepSpeed's Muon, would access the memory of fake tensors.
    env |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"} if fake else {}
    return env | ({} if cuda else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""})


def _start(fake: bool, cuda: bool) -> subprocess.Popen:
    env, pipe = environment(fake, cuda), subprocess.PIPE
    argv = [sys.executable, "-m", "zerofit", "simulated-rank"]
    errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (a pipe without a reader would fill up)
    process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=env, start_new_session=True)
    process.stderr = errors
    return process


def _as_exception(answer: dict, cache: Path | None) -> dict | Exception:
    """Return the answer, or the exception for a failure; write a traceback to a file in `cache`."""
    if "mistake" in answer:
        return UserError(answer["mistake"])
    if "too slow" in answer:
        return SimulationFailed("the simulation exceeds the time limit of a launch")
    if "trace" in answer:
        if cache is None:
            return SimulationFailed(f"the simulation crashed:\n{answer['trace']}")
        file = cache / "error.txt"
        try:
            cache.mkdir(parents=True, exist_ok=True)
            file.write_text(answer["trace"], encoding="utf-8")
        except OSError:
            return _as_exception(answer, None)
        return SimulationFailed(f"the simulation crashed; please report the traceback in {file}")
    return SimulationFailed(answer["failed"]) if "failed" in answer else answer


def _load_answer(file: Path) -> dict | None:
    """Return an answer from `save_answer`; None if the file cannot be read."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def save_answer(file: Path, answer: dict) -> None:
    """Write an answer to the cache, if the file can be written."""
    with contextlib.suppress(OSError):  # without the file the next plan simulates again
        file.parent.mkdir(parents=True, exist_ok=True)
        paths.write_text(file, json.dumps(answer))


_LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    *("GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"),
)


def key(question: Question) -> str:
    """Return a hash of the question and of everything that can change its answer."""
    import importlib.metadata

    from zerofit.config import deepspeed_json
    from zerofit.model.experimental import flex_self_test

    versions = [importlib.metadata.version(p) for p in ("torch", "transformers", "accelerate", "deepspeed", "peft")]
    sources = [file.stat().st_mtime_ns for file in sorted(PACKAGE.rglob("*.py"))]
    files = [file.read_text(errors="replace") for file in sorted(deepspeed_json.CONFIGS.glob("*.json"))]
    hooks = [hook.rpartition(":")[0] for hook in question.before_training]
    files += _named_files([*question.request.values.values(), *hooks])
    self_tests = sorted(file.name for file in cache_root().glob(f"{flex_self_test.NAME}/*"))  # select the attention
    return hashlib.sha256(repr([question.as_json(), versions, sources, files, self_tests]).encode()).hexdigest()[:24]


def _named_files(values: list) -> list[str]:
    """Return the contents of all configuration files and hooks named by these values or lists of values."""
    contents = []
    for value in values:
        if isinstance(value, list | tuple):
            contents += _named_files(value)
        elif isinstance(value, str):
            path = Path(value)
            with contextlib.suppress(OSError, RuntimeError):  # not a path: too long, or an unknown ~user
                path = path.expanduser()
                path = path / "config.json" if path.is_dir() else path
                if path.is_file() and path.suffix in (".json", ".py"):
                    contents.append(path.read_text(errors="replace"))
    return contents
