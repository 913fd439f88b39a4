"""Write and read job.json: a job that is resolved, for the ranks that train it and for those who go on with it."""

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

FILE = "job.json"  # its name in an attempt's folder and in the run folder

OPTION = "--job"  # of a recipe's process: the file that the launcher has written for it

_ANYTHING = object()


@dataclass(frozen=True)
class Job:
    """A job as it was resolved, once, by the launcher or by the process itself."""

    request: Request  # what was asked for, from which the settings follow
    settings: Settings  # resolved and frozen
    program: dict | None  # "file" and "sha256" of the recipe's file; None: an interpreter's own lines
    command: str = ""  # that starts the same ranks when typed, secrets hidden
    facts: Mapping[str, Any] = field(default_factory=dict)  # found before: "plan", "canary", "weights"
    trial: Mapping[str, Any] = field(default_factory=dict)  # what its ranks measure instead of training
    version: str = __version__  # of the zerofit that resolved it


_running = SimpleNamespace(job=None)  # of this process


def running() -> Job | None:
    """Return the job that the launcher has written for this process; None where it resolves its own command line."""
    return _running.job


_published: dict = {}  # the prediction by the check before this job, which its launcher or this process has made


def publish(plan: dict | None) -> None:
    """Make a prediction the one of this process's job; None: there is none."""
    _published.clear()
    _published.update(plan or {})


def published() -> dict:
    """Return the prediction of this process's job; {}: there is none."""
    return dict(_published)


def named(argv: list[str]) -> Path | None:
    """Return the file that a recipe's process is started with; None for a user's command line."""
    place = argv.index(OPTION) + 1 if OPTION in argv else len(argv)  # DeepSpeed's launcher adds --local_rank before it
    return Path(argv[place]) if place < len(argv) else None


def words(file: Path, folder: str) -> list[str]:
    """Return the command line of a recipe's process that trains a job; the folder is for `zerofit status`."""
    return [OPTION, str(file), "--output_dir", folder]


def start(file: Path, ranks: int, recipe: Recipe) -> Settings:
    """Make the job of a file the one of this process, and return its settings.

    Args: ranks: the processes that were started; recipe: theirs.
    Raises: UserError for a file that is no job, or one for another number of processes.
    """
    job = read(file, recipe)
    if job.settings.world_size != ranks:
        raise UserError(
            f"{file}: is a job for {job.settings.world_size} processes, and {ranks} were started; give the recipe its "
            "flags, not the job of another launch."
        )
    if distributed.rank() == 0:
        _note_changes(job)
    _running.job = job
    return job.settings


def _note_changes(job: Job) -> None:
    """Print a line if the recipe's file or zerofit is another one than the job was resolved with."""
    now = program.current()
    if job.program and now:
        program.note_change(job.program, now)
    if job.version != __version__:
        print(f"note: the job was resolved by zerofit {job.version}, and this is {__version__}", flush=True)


def write(file: Path, job: Job) -> None:
    """Write a job atomically, without the secrets among its arguments."""
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
        "decisions": [[one, subject(one)] for one in settings.decisions],
        "facts": _plain(dict(job.facts)),
        "trial": _plain(dict(job.trial)),
    }
    paths.write_text(file, json.dumps(content, indent=1, allow_nan=False) + "\n")


def read(file: Path, recipe: Recipe | None = None) -> Job:
    """Return the job of a file, which may be somebody else's: nothing in it is executed or looked up.

    Args: recipe: the one to give it; None: it has the name only.
    Raises: UserError for a file that is missing, damaged or holds anything else.
    """
    content = _content(file)
    recipe = recipe or content["recipe"]
    request = Request(recipe, *_values(content["request"]), tuple(content["notes"]))
    settings = Settings(recipe, *_values(content["arguments"]), content["world_size"], request=request)
    settings.decisions = [Decision(*entry) for entry in content["decisions"]]
    settings.deepspeed, settings.knows_model = _typed(content["deepspeed"]), content["knows_model"]
    settings.seal()
    said, trial = _typed(content["facts"]), _typed(content["trial"])
    return Job(request, settings, content["program"], content["command"], said, trial, content["zerofit"])


# --- JSON ---

_TEXTS = ("recipe", "command", "zerofit")


def _content(file: Path) -> dict:
    """Return the object in a file, whose members have the types that `write` gives them. Raises: UserError."""
    try:
        content = json.loads(paths.read_text(file))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}; start the recipe with its flags.") from None
    except (ValueError, RecursionError):
        raise _damaged(file, "it is not valid JSON") from None
    if not isinstance(content, dict):
        raise _damaged(file, "it is no object")
    kinds: dict[str, Any] = dict.fromkeys(_TEXTS, str) | {"world_size": int, "knows_model": bool}
    kinds |= dict.fromkeys(("request", "arguments", "facts", "trial"), dict)
    kinds |= {"notes": list, "decisions": list, "program": dict | None, "deepspeed": dict | None}
    for name, kind in kinds.items():
        value = content.get(name, _ANYTHING)
        if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or value < 1)):
            raise _damaged(file, f"its {name} is missing or of another type")
    if not all(isinstance(sentence, str) for sentence in content["notes"]):
        raise _damaged(file, "its notes are no sentences")
    if not all(isinstance(one, list) and [type(part) for part in one] == [str, str] for one in content["decisions"]):
        raise _damaged(file, "its decisions are no sentences with their arguments")
    if content["program"] is not None and {"file", "sha256"} - {
        name for name, value in content["program"].items() if isinstance(value, str)
    }:
        raise _damaged(file, "its program has no file and sha256")
    for name in ("request", "arguments"):
        for argument, entry in content[name].items():
            if not isinstance(entry, dict) or not isinstance(entry.get("source"), str) or "value" not in entry:
                raise _damaged(file, f"its {name} have no value and source for {argument}")
    try:
        _typed(content)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        raise _damaged(file, "it has a value that no job has") from None
    return content


def _damaged(file: Path, why: str) -> UserError:
    return UserError(f"{file}: is no job of zerofit: {why}; restore the file, or start the run with its flags.")


def _entries(values: Mapping[str, Any], source: Mapping[str, str]) -> dict[str, dict]:
    return {name: {"value": _plain(value), "source": source[name]} for name, value in values.items()}


def _public(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are no secrets."""
    return {name: value for name, value in values.items() if not name.endswith("_token")}


def _values(entries: dict[str, dict]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (argument -> value, argument -> source)."""
    values = {name: _typed(entry["value"]) for name, entry in entries.items()}
    return values, {name: entry["source"] for name, entry in entries.items()}


def _plain(value: Any) -> Any:
    """Return a value as JSON holds it: what JSON has no form for is an object with one name that begins with `$`.

    Raises: TypeError for a value of a type that no argument has.
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
    if isinstance(value, Path | str):  # an enumeration's word too
        return str(getattr(value, "value", value))
    raise TypeError(f"{type(value).__name__}: no argument has this type")


def _typed(value: Any) -> Any:
    """Return the value that `_plain` has written. Raises: ValueError or TypeError for what it does not write."""
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
