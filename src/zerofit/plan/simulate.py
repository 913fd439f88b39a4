"""Run simulated ranks in processes of their own to predict what a job allocates; cache the answers.

A simulated rank (simulated_rank.py) builds the model, adapter, optimizer and DeepSpeed configuration of a recipe and
trains two steps with ZerofitTrainer. torch's FakeTensorMode makes every tensor a shape without bytes, its fake process
group replaces the other ranks, and memory_tracker.MemoryTracker counts the bytes that would have been alive.

    job = parse.request("sft", ["--model", "folder", "--zero", "3"])
    (answer,) = run_all([Question(job, ranks=64, gpu=hardware.GPUS["h100-80g"])])
    answer["total"]["backward"]

The patches of fake_device.py change the whole process; hence a process of its own.
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

STEPS = 2  # optimizer states are allocated in the first step, ZeRO-3 prefetches from the second on


class SimulationFailed(Exception):
    """The job cannot be simulated, or not within the time limit; the text is the reason."""


# --- the question, asked from outside ---


@dataclass(frozen=True)
class Question:
    """What to simulate: one rank of a job. It travels to the simulation's process as JSON."""

    request: Request  # the job, with its model; the rows of its data are never opened
    ranks: int  # of the job
    rank: int = 0  # whose peak bytes are asked for
    gpu: hardware.Gpu | None = None  # to plan for; None: this machine's CPU
    # "gpu": without memory, host tensors counted separately; "cpu": like a CPU run; "cuda": on a real GPU, with
    # fake=False, to validate the simulation. "": "gpu" with a `gpu`, else "cpu"
    device: str = ""
    fake: bool = True  # False: real tensors, and only the other ranks are simulated
    liger: bool = False  # whether Liger's kernels run where they are a default
    padded: bool = False  # rows differ in length, so that attention needs a mask
    overrides: dict = field(default_factory=dict)  # values that replace those of the model's config.json (fewer layers)
    expandable_segments: bool = field(default_factory=allocator.expandable_segments)  # of torch's allocator
    # "FILE:FUNCTION" each: functions that change the trainer before it trains, e.g. to what another training loop does
    before_training: tuple[str, ...] = ()
    program: tuple[str, ...] = ()  # (file, sha256) of a recipe that is not the kit's; (): none

    def __post_init__(self):
        object.__setattr__(self, "device", self.device or ("gpu" if self.gpu else "cpu"))
        object.__setattr__(self, "program", self.program or _own_program(self.request.recipe))

    @property
    def layers(self) -> int | None:
        """Return the number of layers to simulate; None: all of the model's."""
        return self.overrides.get("num_hidden_layers")

    def as_json(self) -> dict:
        """Return the question as data that JSON can hold."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        request = {"recipe": self.request.recipe.name, "values": dict(self.request.values)}
        request["source"] = dict(self.request.source)
        return plain | {"request": request, "gpu": self.gpu and asdict(self.gpu)}

    @classmethod
    def from_json(cls, plain: dict) -> "Question":
        """Return the question whose `as_json` this is, after it has been JSON."""
        tuples = {name: tuple(plain[name]) for name in ("before_training", "program")}
        gpu = plain["gpu"] and hardware.Gpu(**plain["gpu"])
        recipe = program.start(plain["program"][0]).recipe if plain["program"] else None
        request = plain["request"] | {"recipe": recipe or program.recipe_of(plain["request"]["recipe"])}
        return cls(**plain | tuples | {"request": Request(**request), "gpu": gpu})


def _own_program(recipe: Recipe) -> tuple[str, ...]:
    """Return (file, sha256) of a recipe that is not the kit's."""
    own = program.if_not_of_kit(recipe)
    return tuple(own.facts.values()) if own else ()


def run_all(
    questions: list[Question], cache: Path | None = None, seconds: float | None = None
) -> list[dict | Exception]:
    """Return the answers in order; in place of one a UserError for the user's mistake, or why it is not there.

    Libraries are imported once and each question is answered in a fork, as many at once as there are cores. A question
    for a real GPU gets its own process: CUDA cannot be used in a fork of a process that has queried it.
    Args: cache: folder of answers by question. seconds: time limit after which the open questions fail; None: no limit.
    Returns: of each {"peak": {phase: {part: bytes}}, "total": {phase: bytes}, "host": bytes of a rank's offload and
        loading, "host_saving": bytes more on rank 0 while it saves, "model_states": see memory_tracker.MemoryTracker,
        "allocator": see caching_allocator.needs, "parameters", "trainable", "largest_block", "seconds"}, or a UserError
        or SimulationFailed.
    """
    answers: list = [_read_cached(cache, q) for q in questions]
    open_questions = [i for i, answer in enumerate(answers) if answer is None]
    if not open_questions:
        return answers
    if len(open_questions) > 1 and any(questions[i].device == "cuda" for i in open_questions):
        for i in open_questions:
            (answers[i],) = run_all([questions[i]], cache, seconds)
        return answers
    asked = [questions[i] for i in open_questions]
    for i, answer in zip(open_questions, _ask_all(asked, seconds), strict=True):
        answers[i] = _as_exception(answer, cache)
        if cache and not isinstance(answers[i], Exception):  # failures may be temporary
            keep(cache / f"{key(questions[i])}.json", answer)
    return answers


def _ask_all(questions: list[Question], seconds: float | None) -> list[dict]:
    """Return the answers of one process to the questions, or in their place why there is none (see `_as_exception`)."""
    fake, cuda = all(q.fake for q in questions), any(q.device == "cuda" for q in questions)
    process = _ready.pop() if fake and not cuda and _ready else _start(fake, cuda)
    plain = [q.as_json() for q in questions]
    answers: dict[int, dict] = {}

    def receive(line: str) -> None:
        if not line.startswith(MARK):
            return
        number, answer = json.loads(line.removeprefix(MARK))
        answers[number] = answer

    errors = _ask(process, json.dumps(plain), seconds, receive, keep=_reused and fake)
    if errors is None:
        return [{"too slow": True}] * len(plain)
    lost = {"trace": errors or "the simulation's process printed nothing"}
    return [answers.get(i, lost) for i in range(len(plain))]


MARK = "simulation-answer: "

DONE = "simulation-done"  # a line after the answers to one list of questions

_ready: list[subprocess.Popen] = []  # processes that import, or have imported, the libraries and wait for questions

_reused = False  # whether to keep a process for the next questions


def prestart() -> None:
    """Start the process for the next questions, so that its imports, which take seconds, run in parallel."""
    if not _ready:
        _ready.append(_start(fake=True, cuda=False))


@contextlib.contextmanager
def reused():
    """Answer all questions of the body in one process, which imports the libraries once.

    In the body of another `reused` it is that one's process.
    """
    global _reused
    if _reused:
        yield
        return
    _reused = True
    try:
        yield
    finally:
        _reused = False
        stop_prestarted()


def stop_prestarted() -> None:
    """End the process that waits for questions, if there is one."""
    while _ready:
        _end(_ready.pop())


def _end(process: subprocess.Popen, reader: threading.Thread | None = None) -> None:
    """Kill the process and its forks, wait for the reader of its output, and close its pipes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if reader is not None:
        reader.join()
    for stream in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):  # unwritten input is lost with its reader
            stream.close()


def _ask(
    process: subprocess.Popen, text: str, seconds: float | None, receive: Callable[[str], None], keep: bool = False
) -> str | None:
    """Pass each line that the process prints for `text` to `receive`; return its output on stderr.

    Returns None if the answers are not all there within `seconds`.
    Args: keep: let the process wait for the next questions; else it and its forks are killed afterwards.
    """
    received_all = False

    def read():
        nonlocal received_all
        for line in process.stdout:
            if line.strip() == DONE:
                received_all = True
                return
            receive(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        with contextlib.suppress(BrokenPipeError):  # the process has ended; its stderr holds the reason
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
    """Return the environment of a process that answers questions with these of their attributes."""
    env = {k: v for k, v in os.environ.items() if k not in _OF_A_LAUNCHER and not k.startswith("TORCHELASTIC_")}
    env |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TOKENIZERS_PARALLELISM": "false"}
    # A compiled kernel, as those of DeepSpeed's Muon, would read and write where a tensor without memory points to.
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
    """Return the answer, or the exception for a failure; a traceback is written to a file in `cache`."""
    if "mistake" in answer:
        return UserError(answer["mistake"])
    if "too slow" in answer:
        return SimulationFailed("the simulation takes longer than a launch waits for it")
    if "trace" in answer:
        if cache is None:
            return SimulationFailed(f"the simulation met an error of its own:\n{answer['trace']}")
        file = cache / "error.txt"
        try:
            cache.mkdir(parents=True, exist_ok=True)
            file.write_text(answer["trace"], encoding="utf-8")
        except OSError:
            return _as_exception(answer, None)
        return SimulationFailed(f"the simulation met an error of its own, which {file} holds; please report it")
    return SimulationFailed(answer["failed"]) if "failed" in answer else answer


def _read_cached(cache: Path | None, question: Question) -> dict | None:
    return recall(cache / f"{key(question)}.json") if cache else None


def recall(file: Path) -> dict | None:
    """Return what `keep` has written into a file; None: nothing, or it cannot be read."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def keep(file: Path, answer: dict) -> None:
    """Write an answer into a file of the cache, as far as it can be written."""
    with contextlib.suppress(OSError):  # without the file the next plan simulates again
        file.parent.mkdir(parents=True, exist_ok=True)
        paths.write_text(file, json.dumps(answer))


_OF_A_LAUNCHER = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    *("GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"),
)


def key(question: Question) -> str:
    """Return a hash of the question and of everything that could change its answer."""
    import importlib.metadata

    from zerofit.config import deepspeed_json
    from zerofit.model.experimental import flex_proof

    versions = [importlib.metadata.version(p) for p in ("torch", "transformers", "accelerate", "deepspeed", "peft")]
    sources = [file.stat().st_mtime_ns for file in sorted(PACKAGE.rglob("*.py"))]
    files = [file.read_text(errors="replace") for file in sorted(deepspeed_json.CONFIGS.glob("*.json"))]
    hooks = [hook.rpartition(":")[0] for hook in question.before_training]
    files += _named_files([*question.request.values.values(), *hooks])
    proofs = sorted(file.name for file in cache_root().glob(f"{flex_proof.NAME}/*"))  # decide on the attention
    return hashlib.sha256(repr([question.as_json(), versions, sources, files, proofs]).encode()).hexdigest()[:24]


def _named_files(values: list) -> list[str]:
    """Return the contents of all configuration files and hooks that these values name, lists among them too."""
    contents = []
    for value in values:
        if isinstance(value, list | tuple):
            contents += _named_files(value)
        elif isinstance(value, str):
            path = Path(value)
            with contextlib.suppress(OSError, RuntimeError):  # not a path: too long, or ~nobody
                path = path.expanduser()
                path = path / "config.json" if path.is_dir() else path
                if path.is_file() and path.suffix in (".json", ".py"):
                    contents.append(path.read_text(errors="replace"))
    return contents
