"""Ask a simulated rank what a job allocates, and cache the answer.

The program behind the planner. It builds the very model, adapter, optimizer and DeepSpeed configuration of a recipe and
lets KitTrainer train two steps, while torch's FakeTensorMode makes every tensor a shape without bytes and its fake
process group stands for the other ranks. memory.Ledger follows what would have been alive.

    run("sft", ["--model", "folder", "--zero", "3"], ranks=64, gpu=hardware.GPUS["h100-80g"])["total"]["backward"]   # bytes

Runs in a process of its own: the patches below are for the whole process.
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

from zerofit.paths import PACKAGE

STEPS = 2  # the optimizer's states appear in the first, ZeRO-3 prefetches from the second on


class SimulationFailed(Exception):
    """The job cannot be simulated, or nobody waits for it; the text is the reason in plain words."""


# --- the question, asked from outside ---


def question(
    recipe: str, flags: list[str], ranks: int, rank: int = 0, gpu=None, device: str | None = None,
    fake: bool = True, padded: bool = False, overrides: dict | None = None,
) -> dict:  # fmt: skip
    """What to ask for: the peak bytes of rank `rank` of `ranks`.

    Args:
        flags: the recipe's, with --model; the rows of --data are never opened.
        gpu: hardware.Gpu; None: as on this machine's CPU.
        device: "gpu" (without memory, host tensors told apart), "cpu" (as a CPU run would), "cuda" (a real GPU, with
            fake=False: what validation measures). Default: "gpu" with a `gpu`, else "cpu".
        fake: False keeps real tensors; only the other ranks are missing then.
        padded: rows differ in length, so that attention needs a mask.
        overrides: values laid over the model's config.json (fewer layers).
    """
    return {
        "recipe": recipe, "flags": flags, "ranks": ranks, "rank": rank, "gpu": asdict(gpu) if gpu else None, "fake": fake,
        "padded": padded, "device": device or ("gpu" if gpu else "cpu"), "overrides": overrides or {},
    }  # fmt: skip


def run(*args, **kwargs) -> dict:
    """The answer to one `question(...)`.

    Returns: {"peak": {phase: {part: bytes}}, "total": {phase: bytes}, "host": bytes of a rank's offload and loading,
        "host_saving": bytes more on rank 0 while it saves, "model_states": see memory.Ledger,
        "parameters", "trainable", "largest_block", "seconds"}.
    Raises: UserError for the user's mistakes, GhostFailed when it cannot be run that way.
    """
    (answer,) = run_all([question(*args, **kwargs)])
    if isinstance(answer, Exception):
        raise answer
    return answer


def run_all(questions: list[dict], cache: Path | None = None, seconds: float | None = None) -> list[dict | Exception]:
    """The answers, in order; an exception that `run` would raise stands in its place.

    Libraries are imported once and each question is answered in a fork, as many at once as there are cores. A question for
    a real GPU has a process to itself: CUDA cannot be used in a fork of a process that has looked for it.
    Args: cache: folder of answers by question. seconds: after which all that is left has failed; None: never.
    """
    answers: list = [_kept(cache, q) for q in questions]
    left = [i for i, answer in enumerate(answers) if answer is None]
    if not left:
        return answers
    if len(left) > 1 and any(questions[i]["device"] == "cuda" for i in left):
        for i in left:
            (answers[i],) = run_all([questions[i]], cache, seconds)
        return answers
    asked = [questions[i] for i in left]
    process = _taken() if all(map(_needs_no_device, asked)) else None
    process = process or _started(all(q["fake"] for q in asked), any(q["device"] == "cuda" for q in asked))
    output, errors = _ask(process, json.dumps(asked), seconds, keep=_reused and all(q["fake"] for q in asked))
    unanswered = (
        {"too slow": True} if output is None else {"trace": errors or "the simulation's process printed nothing"}
    )
    found = {}
    for line in (output or "").splitlines():
        if line.startswith(MARK):
            number, answer = json.loads(line.removeprefix(MARK))
            found[left[number]] = answer
    for i in left:
        answers[i] = _as_exception(found.get(i, unanswered), cache)
        answer = found.get(i)
        if cache and not isinstance(answers[i], Exception):  # failures may be of the moment
            _keep(cache, questions[i], answer)
    return answers


INSIDE = (
    "ZEROFIT_GHOST"  # environment variable: this process is a ghost; --show, --plan and --search_batch_size mean others
)

MARK = "ghost-answer: "

DONE = "ghost-done"  # a line after the answers to one list of questions

_ready: list[subprocess.Popen] = []  # has imported the libraries, or does, and waits for questions

_reused = False  # whether a process is kept for the next questions


def prestart() -> None:
    """Start the process that the next questions go to: it imports for seconds while the caller does other things."""
    if not _ready:
        _ready.append(_started(fake=True, cuda=False))


@contextlib.contextmanager
def reused():
    """Answer all questions of the body in one process, which imports the libraries once."""
    global _reused
    _reused = True
    try:
        yield
    finally:
        _reused = False
        stop_prestarted()


def stop_prestarted() -> None:
    """End what `get_ready` started when it was not asked anything."""
    if process := _taken():
        _kill(process)
        _close(process)


def _kill(process: subprocess.Popen) -> None:
    """End the process and its forks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _close(process: subprocess.Popen) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):  # what was not yet written has nobody to read it
            stream.close()


def _ask(process: subprocess.Popen, text: str, seconds: float | None, keep: bool = False) -> tuple[str | None, str]:
    """Return the process's answers to `text` (None: not within `seconds`), and what it has printed on stderr.

    Args: keep: let the process wait for the next questions; else it and its forks are gone afterwards.
    """
    answers, whole = [], False

    def read():
        nonlocal whole
        for line in process.stdout:
            if line.strip() == DONE:
                whole = True
                return
            answers.append(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        with contextlib.suppress(BrokenPipeError):  # it has ended; what it printed says why
            process.stdin.write(text + "\n")
            process.stdin.flush()
        reader.join(None if seconds is None else max(0.0, seconds))
        if reader.is_alive():
            return None, ""
        if whole and keep:
            _ready.append(process)
        process.stderr.seek(0)
        return "".join(answers), process.stderr.read()
    finally:
        if process not in _ready:
            _kill(process)
            reader.join()
            _close(process)


def _taken() -> subprocess.Popen | None:
    return _ready.pop() if _ready else None


def _needs_no_device(question: dict) -> bool:
    return question["fake"] and question["device"] != "cuda"


def _started(fake: bool, cuda: bool) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k not in _OF_A_LAUNCHER and not k.startswith("TORCHELASTIC_")}
    env |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TOKENIZERS_PARALLELISM": "false", INSIDE: "1"}
    env |= {"OMP_NUM_THREADS": "1"} if fake else {}
    env |= {} if cuda else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    pipe = subprocess.PIPE
    words = [sys.executable, "-m", "zerofit", "simulated-rank"]
    errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (a pipe that nobody reads would fill up)
    process = subprocess.Popen(
        words, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=env, start_new_session=True
    )
    process.stderr = errors
    return process


def _as_exception(answer: dict, cache: Path | None) -> dict | Exception:
    """The answer, or what stands in its place; the traceback of an unforeseen error goes to a file that is named."""
    from zerofit.errors import UserError

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


def _kept(cache: Path | None, question: dict) -> dict | None:
    file = cache / f"{_key(question)}.json" if cache else None
    try:
        return json.loads(file.read_text()) if file else None
    except (OSError, ValueError):
        return None


def _keep(cache: Path, question: dict, answer: dict) -> None:
    file = cache / f"{_key(question)}.json"
    aside = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # the next plan asks again
        cache.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(answer))
        os.replace(aside, file)


_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR",
                  "MASTER_PORT", "LOCAL_SIZE", "ZEROFIT_PROBE")  # fmt: skip


def _key(question: dict) -> str:
    """A hash of the question and of everything that could change its answer."""
    import importlib.metadata

    from zerofit.config import deepspeed_json

    versions = [importlib.metadata.version(p) for p in ("torch", "transformers", "accelerate", "deepspeed", "peft")]
    sources = [file.stat().st_mtime_ns for file in sorted(PACKAGE.rglob("*.py"))]
    files = [file.read_text(errors="replace") for file in sorted(deepspeed_json.CONFIGS.glob("*.json"))]
    files += _named_files(question["flags"])
    return hashlib.sha256(repr([question, versions, sources, files]).encode()).hexdigest()[:24]


def _named_files(words: list[str]) -> list[str]:
    """Return the content of every configuration file that these words name, or that such a YAML file names."""
    found = []
    for word in words:
        path = Path(word.partition("=")[2] if word.startswith("--") else word)
        with contextlib.suppress(OSError, RuntimeError):  # a word that is no path: too long, ~nobody
            path = path.expanduser()
            path = path / "config.json" if path.is_dir() else path
            if path.is_file() and path.suffix in (".json", ".yaml", ".yml"):
                found.append(path.read_text(errors="replace"))
                if path.suffix != ".json":
                    found += _named_files(_strings(found[-1]))
    return found


def _strings(text: str) -> list[str]:
    """Return the values of a YAML file's lines that are text, but those that name YAML files."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:  # args.read_yaml says it
        return []
    values = values.values() if isinstance(values, dict) else []
    return [value for value in values if isinstance(value, str) and not value.endswith((".yaml", ".yml"))]
