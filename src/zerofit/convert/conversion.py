"""Convert the values of another kit's file by the kit's table; keep what has no counterpart and what differs."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerofit.base.errors import UserError


@dataclass(frozen=True)
class Key:
    """A key of a kit that has one argument here."""

    ours: str  # the argument
    default: Any = None  # what the kit takes where the file has no such key; None: nothing is written
    values: Mapping = field(default_factory=dict)  # their value -> ours, where the names differ
    note: str = ""  # what differs in meaning, said where the file has the key


@dataclass(frozen=True)
class Rule:
    """Keys of a kit that are converted together."""

    keys: str  # their names, separated by spaces, for the page
    ours: str  # what they become, for the page
    apply: Callable[["Conversion"], None] | None = None  # None: another rule converts them too
    note: str = ""  # what differs, for the page


@dataclass(frozen=True)
class Kit:
    """What is known of a kit's configuration files."""

    name: str
    version: str  # from which the table was read
    marks: tuple[str, ...]  # keys by which its files are known; names that no other kit has come first
    keys: Mapping[str, Key]
    rules: tuple[Rule, ...]
    lost: Mapping[str, str]  # reason -> their keys without a counterpart, separated by spaces; `*` ends a prefix
    meaning: tuple[str, ...] = ()  # what differs in every file of the kit
    same_names: bool = False  # it takes transformers' TrainingArguments under their own names
    nested: bool = False  # its keys stand in sections: {"optimizer": {"lr": 1}} is read as optimizer.lr
    like: "Kit | None" = None  # a kit whose table it shares, for the page


@dataclass(frozen=True)
class Line:
    """A line of the converted file."""

    value: Any
    origin: str  # their key, or whose default it is


@dataclass(frozen=True)
class Names:
    """The arguments of the recipes, known to config/ only."""

    accepted: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)  # transformers' argument -> why it has no effect here


TEXTS = (
    "model",
    "model_revision",
    "output_dir",
    "run_name",
    "data",
    "eval_data",
    "data_config",
    "columns",
)  # not numbers

OFF = (None, False, "", "none", "None", "no")  # values that ask for nothing

GPU_ONLY = "the same training, faster or with less memory on a GPU; take the # away there"


class Conversion:
    """A file of another kit while it is converted: what it says, and what that becomes."""

    def __init__(self, kit: Kit, given: dict[str, Any], file: Path, gpus: int | None = None, recipe: str = ""):
        self.kit, self.given, self.file, self.gpus = kit, sections(given) if kit.nested else dict(given), file, gpus
        self.sections = given  # as the file has them; `given` is one level of a nested file
        self.recipe = recipe  # "": not known yet
        self.lines: dict[str, Line] = {}
        self.on_gpus: dict[str, Line] = {}  # what a machine without a GPU would refuse
        self.lost: dict[str, str] = {}
        self.differs: list[str] = []
        self.texts: dict[str, tuple[str, str]] = {}  # argument -> (their key, the text of a file that it names)
        self.unread = {key for key, value in self.given.items() if value is not None}

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, which counts as read; `default` where the file has none or null."""
        self.unread.discard(key)
        value = self.given.get(key)
        return default if value is None else value

    def named(self, key: str, default: Any = None) -> tuple[str | None, Any, Any]:
        """Return (key if the file has it, its value or None, the kit's default) for a line that is always written."""
        value = self.take(key)
        return (key if value is not None else None), value, default

    def first(self, *keys: str) -> tuple[str | None, Any]:
        """Return (key, value) of the first of several keys that the file has; (None, None) if it has none."""
        had = [(key, self.take(key)) for key in keys]
        return next(((key, value) for key, value in had if value is not None), (None, None))

    def put(self, name: str, value: Any, origin: str | None = None) -> None:
        """Write a line. origin: their key; None: it is the kit's default."""
        value = value if name in TEXTS else number(value)
        self.lines[name] = Line(value, origin or f"{self.kit.name}'s default")

    def lose(self, key: str, why: str) -> None:
        """List a key without a counterpart."""
        self.unread.discard(key)
        self.lost[key] = why

    def differ(self, sentence: str) -> None:
        """List a difference in meaning."""
        if sentence not in self.differs:
            self.differs.append(sentence)

    def refuse(self, key: str, why: str) -> None:
        """Raise UserError: nothing here trains what the file asks for."""
        raise UserError(f"{self.file}: {key}: {why}.")

    @property
    def adapter(self) -> bool:
        return self.recipe == "lora" or "adapter" in self.lines


def convert(
    kit: Kit, given: dict[str, Any], file: Path, gpus: int | None = None, recipe: str = "", names: Names | None = None
) -> Conversion:
    """Return a kit's file in our names.

    Args: gpus: number of GPUs of the original job, None: not known; recipe: "sft", "lora" or "dpo" to decide it; names:
        our arguments, for the kits that take transformers' under their own names.
    Raises: UserError where nothing here trains what the file asks for.
    """
    done = Conversion(kit, given, file, gpus, recipe)
    for rule in kit.rules:
        if rule.apply:
            rule.apply(done)
    for theirs, key in kit.keys.items():
        _direct(done, theirs, key)
    for theirs in sorted(done.unread):
        _leftover(done, theirs, names or Names())
    for sentence in kit.meaning:
        done.differ(sentence)
    return done


def _direct(done: Conversion, theirs: str, key: Key) -> None:
    value = done.take(theirs)
    origin = theirs if value is not None else None
    value = key.default if value is None else value
    if value is None or key.ours in done.lines:
        return
    if isinstance(value, str | bool | int) and value in key.values:
        value = key.values[value]
        if value is None:
            return
    done.put(key.ours, value, origin)
    if key.note and origin and value:
        done.differ(f"{theirs}: {key.note}.")


def _leftover(done: Conversion, theirs: str, names: Names) -> None:
    """Write or list a key that no rule has read."""
    value = done.given[theirs]
    reason = _reason(done.kit, theirs)
    is_off = value in OFF if not isinstance(value, list | dict) else not value
    if reason is None and done.kit.same_names and theirs in names.accepted and theirs not in done.lines:
        done.put(theirs, value, theirs)
    elif is_off:
        return
    elif theirs in names.refused and done.kit.same_names:
        done.lose(theirs, names.refused[theirs])
    else:
        done.lose(theirs, reason or f"unknown to this table ({done.kit.name} {done.kit.version})")


def _reason(kit: Kit, theirs: str) -> str | None:
    """Return why a key has no counterpart; None where the table does not have it."""
    for reason, keys in kit.lost.items():
        for key in keys.split():
            if theirs == key or theirs.startswith(f"{key}.") or (key.endswith("*") and theirs.startswith(key[:-1])):
                return reason
    return None


def sections(given: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested sections as one level: {"a": {"b": 1}} is {"a.b": 1}."""
    flat = {}
    for key, value in given.items():
        if isinstance(value, dict) and value:
            flat |= sections(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def number(value: Any) -> Any:
    """Return a text that is a number as a number: YAML reads 2e-5 as a text; also below lists and objects."""
    if isinstance(value, dict):
        return {key: number(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [number(inner) for inner in value]
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", value, re.IGNORECASE):
        return int(value) if value.isdecimal() else float(value)
    return value


def words(value: Any) -> list[str]:
    """Return a list of names that stands as a list or as a text with commas."""
    parts = value if isinstance(value, Iterable) and not isinstance(value, str) else str(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def as_object(value: Any) -> Any:
    """Return a JSON text as what it says; anything else as it is."""
    if isinstance(value, str) and value.strip().startswith(("{", "[")):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
