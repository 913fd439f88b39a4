"""Write and read job.json: a resolved job, for the ranks that train it and for later resumes."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zerofit import __version__
from zerofit.base import distributed, paths
from zerofit.base.errors import UserError
from zerofit.job import program
from zerofit.job.recipe import Recipe
from zerofit.job.request import Request
from zerofit.job.settings import Decision, Settings, subject

FILE = "job.json"  # file name in an attempt's folder and in the run folder

OPTION = "--job"  # option of a recipe's process: the job file that the launcher wrote

_MISSING = object()


@dataclass(frozen=True)
class Job:
    """A job, resolved once by the launcher or by the process itself."""

    request: Request  # the user's arguments, from which the settings follow
    settings: Settings  # resolved and frozen
    program: dict | None  # "file" and "sha256" of the recipe's file; None in an interactive interpreter
    command: str = ""  # command line that starts the same ranks, secrets hidden
    facts: Mapping[str, Any] = field(default_factory=dict)  # results of earlier checks: "plan", "canary", "weights"
    trial: Mapping[str, Any] = field(default_factory=dict)  # measurements of its ranks instead of training
    version: str = __version__  # zerofit version that resolved it


_running = SimpleNamespace(job=None)  # the job of this process


def running() -> Job | None:
    """Return the job that the launcher wrote for this process; None if the process resolves its command line."""
    return _running.job


_published: dict = {}  # the plan's prediction for this job, made by its launcher or this process


def publish(plan: dict | None) -> None:
    """Store the prediction for this process's job; None: without a prediction."""
    _published.clear()
    _published.update(plan or {})


def published() -> dict:
    """Return the prediction for this process's job; {} without a prediction."""
    return dict(_published)


def file_argument(argv: list[str]) -> Path | None:
    """Return the job file on the command line of a recipe's process; None on a user's command line."""
    place = argv.index(OPTION) + 1 if OPTION in argv else len(argv)  # DeepSpeed's launcher adds --local_rank in front
    return Path(argv[place]) if place < len(argv) else None


def words(file: Path, folder: str) -> list[str]:
    """Return the arguments of a recipe's process that trains a job; `zerofit status` reads the folder."""
    return [OPTION, str(file), "--output_dir", folder]


def start(file: Path, ranks: int, recipe: Recipe) -> Settings:
    """Set the job of this process from a file, and return its settings.

    Args: ranks: number of started processes; recipe: the recipe of the process.
    Raises: UserError for an invalid job file, or a job for another number of processes.
    """
    job = read(file, recipe)
    if job.settings.world_size != ranks:
        raise UserError(
            f"{file}: is a job for {job.settings.world_size} processes, but {ranks} were started; start the recipe "
            "with its flags, not with the job of another launch."
        )
    if distributed.rank() == 0:
        _note_changes(job)
    _running.job = job
    return job.settings


def _note_changes(job: Job) -> None:
    """Print a note if the recipe's file or zerofit has changed since the job was resolved."""
    now = program.current()
    if job.program and now:
        program.note_change(job.program, now)
    if job.version != __version__:
        print(f"note: the job was resolved by zerofit {job.version}; this is zerofit {__version__}", flush=True)


def write(file: Path, job: Job) -> None:
    """Write a job atomically, without secret arguments."""
    settings = job.settings
    secret = settings.values.keys() - _public(settings.values).keys()
    content = {
        "zerofit": job.version,
        "program": job.program,
        "command": job.command,
        "recipe": settings.recipe.name,
        "world_size": settings.world_size,
        "knows_model": settings.knows_model,
        "request": _entries(_public(job.request.values), job.request.source),
        "notes": list(job.request.notes),
        "arguments": _entries(settings.values | dict.fromkeys(secret, None), settings.source),
        "deepspeed": _plain(settings.deepspeed),
        "decisions": [[decision, subject(decision)] for decision in settings.decisions],
        "facts": _plain(dict(job.facts)),
        "trial": _plain(dict(job.trial)),
    }
    paths.write_text(file, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read(file: Path, recipe: Recipe | None = None) -> Job:
    """Read a job from a file, which may come from another user: its content is not executed.

    Args: recipe: the recipe object; None: the job has only its name.
    Raises: UserError for a missing or damaged file.
    """
    content = _content(file)
    recipe = recipe or content["recipe"]
    request = Request(recipe, *_values(content["request"]), tuple(content["notes"]))
    settings = Settings(recipe, *_values(content["arguments"]), content["world_size"], request=request)
    settings.decisions = [Decision(*entry) for entry in content["decisions"]]
    settings.deepspeed, settings.knows_model = _typed(content["deepspeed"]), content["knows_model"]
    settings.seal()
    facts, trial = _typed(content["facts"]), _typed(content["trial"])
    return Job(request, settings, content["program"], content["command"], facts, trial, content["zerofit"])


# --- JSON ---

_TEXTS = ("recipe", "command", "zerofit")


def _content(file: Path) -> dict:
    """Return the object in a file after checking the types of its members. Raises: UserError."""
    try:
        content = json.loads(paths.read_text(file))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}; start the recipe with its flags.") from None
    except (ValueError, RecursionError):
        raise _damaged(file, "it is not valid JSON") from None
    if not isinstance(content, dict):
        raise _damaged(file, "it is not an object")
    kinds: dict[str, Any] = dict.fromkeys(_TEXTS, str) | {"world_size": int, "knows_model": bool}
    kinds |= dict.fromkeys(("request", "arguments", "facts", "trial"), dict)
    kinds |= {"notes": list, "decisions": list, "program": dict | None, "deepspeed": dict | None}
    for name, kind in kinds.items():
        value = content.get(name, _MISSING)
        if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or value < 1)):
            raise _damaged(file, f"{name} is missing or has the wrong type")
    if not all(isinstance(sentence, str) for sentence in content["notes"]):
        raise _damaged(file, "notes must be a list of strings")
    if not all(isinstance(entry, list) and [*map(type, entry)] == [str, str] for entry in content["decisions"]):
        raise _damaged(file, "decisions must be pairs of strings")
    if content["program"] is not None and {"file", "sha256"} - {
        name for name, value in content["program"].items() if isinstance(value, str)
    }:
        raise _damaged(file, "program must have a file and a sha256")
    for name in ("request", "arguments"):
        for argument, entry in content[name].items():
            if not isinstance(entry, dict) or not isinstance(entry.get("source"), str) or "value" not in entry:
                raise _damaged(file, f"{name}: {argument} must have a value and a source")
    try:
        _typed(content)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        raise _damaged(file, "it contains an invalid value") from None
    return content


def _damaged(file: Path, why: str) -> UserError:
    return UserError(f"{file}: is not a zerofit job file: {why}; restore the file, or start the run with its flags.")


def _entries(values: Mapping[str, Any], source: Mapping[str, str]) -> dict[str, dict]:
    return {name: {"value": _plain(value), "source": source[name]} for name, value in values.items()}


def _public(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not secret."""
    return {name: value for name, value in values.items() if not name.endswith("_token")}


def _values(entries: dict[str, dict]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (argument -> value, argument -> source)."""
    values = {name: _typed(entry["value"]) for name, entry in entries.items()}
    return values, {name: entry["source"] for name, entry in entries.items()}


def _plain(value: Any) -> Any:
    """Return a value in its JSON form; types that JSON lacks become an object with one name that begins with `$`.

    Raises: TypeError for an unsupported type.
    """
    if value is None or isinstance(value, bool | int) or type(value) is str:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, tuple):
        return {"$tuple": [_plain(entry) for entry in value]}
    if isinstance(value, dict):
        is_plain = all(type(name) is str and not name.startswith("$") for name in value)
        if is_plain:
            return {name: _plain(entry) for name, entry in value.items()}
        return {"$dict": [[_plain(name), _plain(entry)] for name, entry in value.items()]}
    if isinstance(value, Path | str):  # str includes members of enumerations
        return str(getattr(value, "value", value))
    raise TypeError(f"{type(value).__name__}: unsupported type of an argument")


def _typed(value: Any) -> Any:
    """Invert `_plain`. Raises: ValueError or TypeError for an invalid form."""
    if isinstance(value, list):
        return [_typed(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    first: tuple[str, Any] = next(iter(value.items()), ("", None))
    tag, inner = first
    if not tag.startswith("$"):
        return {name: _typed(entry) for name, entry in value.items()}
    if len(value) != 1 or tag not in ("$float", "$tuple", "$dict"):
        raise ValueError(tag)
    if tag == "$float":
        return float({"inf": "inf", "-inf": "-inf", "nan": "nan"}[inner])
    return tuple(map(_typed, inner)) if tag == "$tuple" else {_typed(name): _typed(entry) for name, entry in inner}
