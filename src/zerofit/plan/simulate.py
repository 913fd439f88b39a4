"""Run simulated ranks in processes of their own to predict what a job allocates; cache the answers.

A simulated rank (simulated_rank.py) builds the model, adapter, optimizer and DeepSpeed configuration of a recipe and
trains two steps with ZerofitTrainer. torch's FakeTensorMode makes every tensor a shape without bytes, its fake process
group replaces the other ranks, and memory_tracker.MemoryTracker counts the bytes that would have been alive.

    run("sft", ["--model", "folder", "--zero", "3"], ranks=64, gpu=hardware.GPUS["h100-80g"])["total"]["backward"]

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
from dataclasses import asdict
from pathlib import Path

import yaml

from zerofit.base.paths import PACKAGE
from zerofit.job import program

STEPS = 2  # optimizer states are allocated in the first step, ZeRO-3 prefetches from the second on


class SimulationFailed(Exception):
    """The job cannot be simulated, or not within the time limit; the text is the reason."""


# --- the question, asked from outside ---


def question(
    recipe: str, flags: list[str], ranks: int, rank: int = 0, gpu=None, device: str | None = None,
    fake: bool = True, padded: bool = False, overrides: dict | None = None, habits: tuple[str, ...] = (),
    widths: tuple[int, ...] = (),
) -> dict:  # fmt: skip
    """Return the question for the peak bytes of rank `rank` of `ranks`, as JSON-compatible data.

    Args:
        flags: the recipe's, with --model; the rows of --data are never opened.
        gpu: hardware.Gpu; None: this machine's CPU.
        device: "gpu" (without memory, host tensors counted separately), "cpu" (like a CPU run), "cuda" (a real GPU,
            with fake=False, to validate the simulation). Default: "gpu" with a `gpu`, else "cpu".
        fake: False: real tensors, and only the other ranks are simulated.
        padded: rows differ in length, so that attention needs a mask.
        overrides: values that replace those of the model's config.json (fewer layers).
        habits: of other training loops: keys of simulated_rank.HABITS, to compare with what was measured in those.
        widths: tokens of the rows of each micro batch, in order; (): --max_length in all of STEPS steps.
    """
    return {
        "recipe": recipe, "flags": flags, "ranks": ranks, "rank": rank, "gpu": asdict(gpu) if gpu else None,
        "fake": fake, "padded": padded, "device": device or ("gpu" if gpu else "cpu"), "overrides": overrides or {},
        "habits": list(habits), "widths": list(widths), "program": _own_program(recipe),
    }  # fmt: skip


def _own_program(recipe: str) -> list[str] | None:
    """Return [file, sha256] of the recipe that this user starts if it defines classes, such as a trainer."""
    own = program.current()
    if own is None or own.recipe != recipe or not own.defines_classes:
        return None
    return [*own.facts.values()]


def run(*args, **kwargs) -> dict:
    """Return the answer to one `question(...)`.

    Returns: {"peak": {phase: {part: bytes}}, "total": {phase: bytes}, "host": bytes of a rank's offload and loading,
        "host_saving": bytes more on rank 0 while it saves, "model_states": see memory_tracker.MemoryTracker,
        "parameters", "trainable", "largest_block", "seconds"}.
    Raises: UserError for the user's mistakes, SimulationFailed if the job cannot be simulated.
    """
    (answer,) = run_all([question(*args, **kwargs)])
    if isinstance(answer, Exception):
        raise answer
    return answer


def run_all(questions: list[dict], cache: Path | None = None, seconds: float | None = None) -> list[dict | Exception]:
    """Return the answers in order; an exception that `run` would raise is returned in place of an answer.

    Libraries are imported once and each question is answered in a fork, as many at once as there are cores. A question
    for a real GPU gets its own process: CUDA cannot be used in a fork of a process that has queried it.
    Args: cache: folder of answers by question. seconds: time limit after which the open questions fail; None: no limit.
    """
    answers: list = [_read_cached(cache, q) for q in questions]
    open_questions = [i for i, answer in enumerate(answers) if answer is None]
    if not open_questions:
        return answers
    if len(open_questions) > 1 and any(questions[i]["device"] == "cuda" for i in open_questions):
        for i in open_questions:
            (answers[i],) = run_all([questions[i]], cache, seconds)
        return answers
    asked = [questions[i] for i in open_questions]
    for i, answer in zip(open_questions, _ask_all(asked, seconds), strict=True):
        answers[i] = _as_exception(answer, cache)
        if cache and not isinstance(answers[i], Exception):  # failures may be temporary
            _write_cached(cache, questions[i], answer)
    return answers


def _ask_all(questions: list[dict], seconds: float | None) -> list[dict]:
    """Return the answers of one process to the questions, or in their place why there is none (see `_as_exception`)."""
    fake, cuda = all(q["fake"] for q in questions), any(q["device"] == "cuda" for q in questions)
    process = (_take_prestarted() if fake and not cuda else None) or _start(fake, cuda)
    output, errors = _ask(process, json.dumps(questions), seconds, keep=_reused and fake)
    if output is None:
        return [{"too slow": True}] * len(questions)
    answers = [{"trace": errors or "the simulation's process printed nothing"}] * len(questions)
    for line in output.splitlines():
        if line.startswith(MARK):
            number, answer = json.loads(line.removeprefix(MARK))
            answers[number] = answer
    return answers


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
    if process := _take_prestarted():
        _kill(process)
        _close(process)


def _kill(process: subprocess.Popen) -> None:
    """Kill the process and its forks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _close(process: subprocess.Popen) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):  # unwritten input is lost with its reader
            stream.close()


def _ask(process: subprocess.Popen, text: str, seconds: float | None, keep: bool = False) -> tuple[str | None, str]:
    """Return the process's answers to `text` (None: not within `seconds`), and its output on stderr.

    Args: keep: let the process wait for the next questions; else it and its forks are killed afterwards.
    """
    answers, received_all = [], False

    def read():
        nonlocal received_all
        for line in process.stdout:
            if line.strip() == DONE:
                received_all = True
                return
            answers.append(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        with contextlib.suppress(BrokenPipeError):  # the process has ended; its stderr holds the reason
            process.stdin.write(text + "\n")
            process.stdin.flush()
        reader.join(None if seconds is None else max(0.0, seconds))
        if reader.is_alive():
            return None, ""
        if received_all and keep:
            _ready.append(process)
        process.stderr.seek(0)
        return "".join(answers), process.stderr.read()
    finally:
        if process not in _ready:
            _kill(process)
            reader.join()
            _close(process)


def _take_prestarted() -> subprocess.Popen | None:
    return _ready.pop() if _ready else None


def _start(fake: bool, cuda: bool) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k not in _OF_A_LAUNCHER and not k.startswith("TORCHELASTIC_")}
    env |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TOKENIZERS_PARALLELISM": "false"}
    env |= {"OMP_NUM_THREADS": "1"} if fake else {}
    env |= {} if cuda else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    pipe = subprocess.PIPE
    argv = [sys.executable, "-m", "zerofit", "simulated-rank"]
    errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (a pipe without a reader would fill up)
    process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=env, start_new_session=True)
    process.stderr = errors
    return process


def _as_exception(answer: dict, cache: Path | None) -> dict | Exception:
    """Return the answer, or the exception for a failure; a traceback is written to a file in `cache`."""
    from zerofit.base.errors import UserError

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


def _read_cached(cache: Path | None, question: dict) -> dict | None:
    file = cache / f"{_key(question)}.json" if cache else None
    try:
        return json.loads(file.read_text()) if file else None
    except (OSError, ValueError):
        return None


def _write_cached(cache: Path, question: dict, answer: dict) -> None:
    file = cache / f"{_key(question)}.json"
    tmp_path = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # without the file the next plan simulates again
        cache.mkdir(parents=True, exist_ok=True)
        tmp_path.write_text(json.dumps(answer))
        os.replace(tmp_path, file)


_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR",
                  "MASTER_PORT", "LOCAL_SIZE")  # fmt: skip


def _key(question: dict) -> str:
    """Return a hash of the question and of everything that could change its answer."""
    import importlib.metadata

    from zerofit.config import deepspeed_json

    versions = [importlib.metadata.version(p) for p in ("torch", "transformers", "accelerate", "deepspeed", "peft")]
    sources = [file.stat().st_mtime_ns for file in sorted(PACKAGE.rglob("*.py"))]
    files = [file.read_text(errors="replace") for file in sorted(deepspeed_json.CONFIGS.glob("*.json"))]
    files += _named_files(question["flags"])
    return hashlib.sha256(repr([question, versions, sources, files]).encode()).hexdigest()[:24]


def _named_files(words: list[str]) -> list[str]:
    """Return the contents of all configuration files that these flags, or YAML files among them, name."""
    contents = []
    for word in words:
        path = Path(word.partition("=")[2] if word.startswith("--") else word)
        with contextlib.suppress(OSError, RuntimeError):  # not a path: too long, or ~nobody
            path = path.expanduser()
            path = path / "config.json" if path.is_dir() else path
            if path.is_file() and path.suffix in (".json", ".yaml", ".yml"):
                contents.append(path.read_text(errors="replace"))
                if path.suffix != ".json":
                    contents += _named_files(_strings(contents[-1]))
    return contents


def _strings(text: str) -> list[str]:
    """Return the top-level string values of a YAML text, without those that name YAML files."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:  # parse.read_yaml reports it
        return []
    values = values.values() if isinstance(values, dict) else []
    return [value for value in values if isinstance(value, str) and not value.endswith((".yaml", ".yml"))]
