"""Convert the values of another kit's file with that kit's table, and account for each key.

Each key appears in a line of the converted file, or is listed as unsupported or as set to its default.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerofit.base.errors import UserError, first_line, one_line
from zerofit.job.settings import MODULE_NAME
from zerofit.job.settings_file import MAX_DEPTH, RepeatedKey, without_repeated_keys


@dataclass(frozen=True)
class Key:
    """A key of a kit that maps to one zerofit argument."""

    ours: str  # the zerofit argument
    default: Any = None  # the kit's default, or a function of the Conversion that returns it; None: write no line
    page: str = ""  # description of a default that is a function, for the docs
    values: Mapping = field(default_factory=dict)  # their value -> ours, if the names differ; None: write no line
    note: str = ""  # difference in meaning, reported if the file sets the key
    default_note: str = ""  # difference in meaning, reported if the file does not set the key
    other: str = ""  # aliases, separated by spaces; the first one in the file wins
    only: str = ""  # the key only has an effect if this is in Conversion.trained
    skip_off: bool = False  # write no line for a disabled (OFF) or empty value
    read: Callable[[Any], Any] | None = None  # converts their value to ours; an empty value falls back to the default
    on_gpu: bool = False  # the line needs a GPU; it is written for true and for the keys of `values`


@dataclass(frozen=True)
class Rule:
    """Keys of a kit that are converted together."""

    keys: str  # their names, separated by spaces, for the docs
    ours: str  # the resulting arguments, for the docs
    apply: Callable[..., None] | None = None  # takes the Conversion; None: another rule converts these keys
    note: str = ""  # difference in meaning, for the docs


class Shared(Rule):
    """Keys converted by a function shared between kits, which receives their names in this kit."""


@dataclass(frozen=True)
class Kit:
    """The configuration files of a kit."""

    name: str
    version: str  # the version that the table describes
    marks: tuple[str, ...]  # keys that identify its files; keys unique to the kit come first
    keys: Mapping[str, Key]
    rules: tuple[Rule, ...]
    lost: Mapping[str, str]  # reason -> unsupported keys, separated by spaces; a trailing `*` matches a prefix
    refused: Mapping[str, str] = field(default_factory=dict)  # reason -> keys that cannot be ignored, written like lost
    meaning: tuple[str, ...] = ()  # differences that apply to every file of the kit
    defaults: Mapping[str, Any] = field(default_factory=dict)  # defaults that are not off, of keys without a Key
    null_is_absent: bool = False  # null means the default; in other kits null replaces the default
    same_names: bool = False  # it uses the names of transformers' TrainingArguments
    nested: bool = False  # its keys are in sections: {"optimizer": {"lr": 1}} is read as optimizer.lr
    list_section: str = ""  # the section that is not flattened: one data set or a list of them
    like: "Kit | None" = None  # the kit whose table it shares, for the docs


@dataclass(frozen=True)
class Line:
    """A line of the converted file."""

    value: Any
    origin: str  # the original key, or "<kit>'s default"


@dataclass(frozen=True)
class KeyNames:
    """The recipes' arguments, which only config/ can list."""

    accepted: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)  # transformers argument -> why it has no effect here


TEXTS = frozenset(
    "model model_revision output_dir run_name data eval_data data_config data_split columns chat_template "
    "initial_adapter new_tokens lora_target_modules lora_target_parameters modules_to_save hub_model_id "
    "hub_revision metric_for_best_model attn_implementation".split()
)  # arguments whose values are never converted to numbers

MODULES = ("lora_target_modules", "lora_target_parameters", "modules_to_save")  # lists of names, not patterns

OFF = (None, False, "", "none", "None", "no", "false", "False")  # values that disable a setting

UNKNOWN = "unknown key"

GPU_ONLY = "Same training, faster or with less memory on a GPU; uncomment it there"


class Section(dict):
    """A mapping below a key of the file that records which of its keys were read."""

    def __init__(self, values: dict):
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, key, default=None):
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

    def items(self):
        self.read |= self.keys()
        return super().items()


def sectioned(value: Any) -> Any:
    """Return a value with its mappings replaced by Sections."""
    if isinstance(value, dict):
        return Section({key: sectioned(inner) for key, inner in value.items()})
    return [sectioned(inner) for inner in value] if isinstance(value, list) else value


def _read_all(value: Any) -> None:
    """Mark each key below a value as read."""
    if isinstance(value, dict):
        for inner in value.values():
            _read_all(inner)
        if isinstance(value, Section):
            value.read |= value.keys()
    elif isinstance(value, list):
        for inner in value:
            _read_all(inner)


def _read(value: Any, prefix: str = "") -> Iterable[str]:
    """Yield the dotted name of each key below a value that was read."""
    if isinstance(value, Section):
        for name, inner in dict.items(value):
            if name in value.read:
                yield from list(_read(inner, f"{prefix}{name}.")) or [f"{prefix}{name}"]
    elif isinstance(value, list):
        for inner in value:
            yield from _read(inner, prefix)


def _unread(value: Any, place: str, key: str) -> Iterable[tuple[str, str, Any]]:
    """Yield (place, dotted key, value) of each key below a value that was not read."""
    if isinstance(value, Section):
        for name, inner in dict.items(value):
            if name in value.read:
                yield from _unread(inner, f"{place}: {name}", f"{key}.{name}")
            else:
                yield f"{place}: {name}", f"{key}.{name}", inner
    elif isinstance(value, list):
        for index, inner in enumerate(value, 1):
            if isinstance(inner, Section):
                names = (dict.get(inner, name) for name in ("path", "id", "source"))
                yield from _unread(inner, f"{place}: {next(filter(None, names), index)}", key)


class Conversion:
    """A file of another kit during its conversion: its values and the resulting lines."""

    def __init__(self, kit: Kit, values: dict[str, Any], file: Path, gpus: int | None = None, recipe: str = ""):
        self.kit, self.file, self.gpus = kit, file, gpus
        self.values: dict[str, Any] = dict(sectioned(sections(values, kit.list_section) if kit.nested else values))
        for key, value in self.values.items():
            try:
                if isinstance(parsed := as_object(value), dict) and parsed is not value:
                    self.values[key] = sectioned(parsed)
            except (RepeatedKey, RecursionError) as error:
                self.refuse(key, f"invalid JSON ({first_line(error)})")
        self.recipe = recipe  # "": not known yet
        self.trained: set[str] = set()  # "sft or lora", "preference" and its loss, "adapter" and "lora adapter"
        self.chosen_by: list[str] = []  # the keys that determine the recipe
        self.lines: dict[str, Line] = {}
        self.on_gpus: dict[str, Line] = {}  # lines that need a GPU
        self.lost: dict[str, str] = {}
        self.same: list[str] = []  # keys that are set to their default
        self.differences: list[str] = []
        self.linked_files: dict[str, Section] = {}  # place -> mapping read from a file that this one names
        self.texts: dict[str, tuple[str, str]] = {}  # argument -> (their key, text to write to a separate file)
        self.unread = set(self.values)
        self.latest = ""  # the key that was read last
        self.defaults = {
            name: key.default for name, key in kit.keys.items() if not (key.default is None or key.only or key.page)
        } | kit.defaults

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key and mark it as read; return `default` if it is missing or null.

        Args: key: a name, or `name: inner` for a key in the mapping below it.
        """
        name, _, inner = key.partition(": ")
        self.latest = key
        self.unread.discard(name)
        if default is not None:
            self.defaults.setdefault(key, default)
        value = self.values.get(name)
        if inner:
            value = value.get(inner) if isinstance(value, dict) else None
        return default if value is None else value

    def first(self, *keys: str) -> tuple[str | None, Any]:
        """Return (key, value) of the first of several keys that the file sets, and list the others."""
        pairs = [(key, value) for key in keys if (value := self.take(key)) is not None]
        for key, value in pairs[1:]:
            if number(value) == number(pairs[0][1]):
                self.keep(key)
            else:
                self.lose(key, f"{pairs[0][0]} is also set and takes precedence")
        return pairs[0] if pairs else (None, None)

    def put(self, name: str, value: Any, origin: str | None = None) -> None:
        """Write a line. origin: their key, or several separated by commas; None: the kit's default."""
        if name in TEXTS:
            value = self._text(value, origin)
        alone = name == "lora_target_modules" and len(value) == 1
        pattern = (
            name in MODULES and not alone and next((word for word in value if not MODULE_NAME.fullmatch(word)), None)
        )
        if pattern:
            self.refuse(f"{origin}: {pattern}", "is a regular expression in a list; list module names instead")
        _read_all(value)
        is_text = name in (*TEXTS, "chat_template_kwargs")
        self.lines[name] = Line(plain(value) if is_text else number(value), origin or f"{self.kit.name}'s default")

    def _text(self, value: Any, origin: str | None) -> Any:
        """Return the texts in a value as written: YAML reads 3.10 as the number 3.1, and no as false."""
        if isinstance(value, list):
            return [self._text(inner, origin) for inner in value]
        if isinstance(value, dict):  # a data set; its weight is a number
            return {key: inner if key == "weight" else self._text(inner, origin) for key, inner in value.items()}
        if isinstance(value, bool | None):
            self.refuse(str(origin), f"YAML reads it as {json.dumps(value)}; put the text in quotes")
        return str(value)

    def choose(self, recipe: str, *keys: str, adapter: str = "", origin: str | None = None) -> None:
        """Set the recipe if the user has not, and write the adapter kind if the recipe does not imply it.

        Args: keys: the keys that determine the recipe; adapter: its kind; origin: the key that sets that kind.
        """
        self.recipe = self.recipe or recipe
        self.chosen_by = [key for key in keys if self.take(key) is not None]
        self.trained |= set() if self.recipe == "dpo" else {"sft or lora"}
        self.trained |= {"adapter", f"{adapter} adapter"} if adapter else set()
        if adapter and (self.recipe == "dpo" or adapter != "lora"):
            self.put("adapter", adapter, origin)

    def keep(self, *keys: str) -> None:
        """List keys that match the default behavior."""
        self.same += [key for key in keys if key in self.values and key not in self.same]

    def lose(self, key: str, why: str) -> None:
        """List an unsupported key with the reason."""
        self.unread.discard(key)
        self.lost[key] = why

    def differ(self, sentence: str) -> None:
        """List a difference in meaning."""
        if sentence not in self.differences:
            self.differences.append(sentence)

    def refuse(self, key: str, why: str) -> None:
        """Raise UserError: zerofit cannot run this training."""
        raise UserError(one_line(f"{self.file}: {key}: {why}."))


def convert(
    kit: Kit,
    values: dict[str, Any],
    file: Path,
    gpus: int | None = None,
    recipe: str = "",
    names: KeyNames | None = None,
) -> Conversion:
    """Convert the values of a kit's file.

    Args: gpus: number of GPUs of the original job, None if unknown; recipe: "sft", "lora" or "dpo" to override it;
        names: zerofit's arguments, for kits that use transformers' names.
    Raises: UserError if zerofit cannot run this training.
    """
    done = Conversion(kit, values, file, gpus, recipe)
    try:
        for rule in kit.rules:
            if rule.apply:
                rule.apply(done, *(rule.keys.split() if isinstance(rule, Shared) else ()))
        for theirs, key in kit.keys.items():
            _direct(done, theirs, key)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        done.refuse(done.latest, f"invalid value for {kit.name} ({first_line(error)})")
    for theirs in sorted(done.unread):
        _leftover(done, theirs, names or KeyNames())
    account(done)
    for sentence in kit.meaning:
        done.differ(sentence)
    return done


def _direct(done: Conversion, theirs: str, key: Key) -> None:
    """Write the line of a key, or of its default."""
    if key.only and key.only not in done.trained:
        return
    origin, value = done.first(theirs, *key.other.split())
    if key.read and not value:
        origin = None
    if origin is None and theirs in done.values and None in key.values:
        origin = theirs
    elif origin is None:
        value = key.default(done) if key.page else key.default
        if not key.read:
            done.defaults.setdefault(theirs, value)
    if key.default_note and origin is None:
        done.differ(f"{theirs}: {key.default_note}.")
    if key.ours in done.lines or (value is None and not origin) or (key.skip_off and _is_off(value)):
        return
    if isinstance(value, str | bool | int | None) and value in key.values:
        value = key.values[value]
    elif key.on_gpu and value is not True:
        return
    if value is None:
        return
    if key.read:
        value = key.read(value)
    if key.on_gpu:
        done.on_gpus[key.ours] = Line(value, str(origin))
    else:
        done.put(key.ours, value, origin)
    if key.note and origin and value:
        done.differ(f"{theirs}: {key.note}.")


def _leftover(done: Conversion, theirs: str, names: KeyNames) -> None:
    """Write a transformers argument that no rule has read, or list it if it has no effect here."""
    if done.kit.same_names and theirs not in done.lines and done.values[theirs] is not None:
        if theirs in names.accepted and not any(_reason(table, theirs) for table in (done.kit.lost, done.kit.refused)):
            done.put(theirs, done.values[theirs], theirs)
        elif theirs in names.refused and not _is_default(done, theirs, done.values[theirs]):
            done.lose(theirs, names.refused[theirs])


def account(done: Conversion) -> None:
    """List each key that no line names, as a default or as unsupported.

    Raises: UserError for a null where the default is a value.
    """
    origins = [line.origin for line in (*done.lines.values(), *done.on_gpus.values())]
    origins += [*(key for key, _ in done.texts.values()), *done.differences]
    named = {key for origin in origins for key in re.split(r", | x ", origin.partition(": ")[0])}
    named |= {*done.lost, *done.same, *done.chosen_by}
    for key, value in done.values.items():
        if key not in named:
            _list(done, key, key, value)
        elif key not in done.lost:
            for place, name, inner in _unread(value, key, key):
                if place not in done.lost:
                    _list(done, place, name, inner)
            _name_read(done, key)
    for source, value in done.linked_files.items():
        for place, name, inner in _unread(value, source, source.rpartition(" in ")[2].partition(".")[0]):
            _list(done, place, name, inner)


def _name_read(done: Conversion, key: str) -> None:
    """Add the keys read below a key to the origin of the first line that comes from it."""
    for lines in (done.lines, done.on_gpus):
        for name, line in lines.items():
            first, colon, rest = line.origin.partition(": ")
            if key in first.split(", "):
                text = f"{line.value} {rest}"
                inner = [k for k in dict.fromkeys(_read(done.values[key])) if k.rpartition(".")[2] not in text]
                if inner:
                    lines[name] = Line(line.value, f"{first}: {', '.join([rest] * bool(colon) + inner)}")
                return


def _list(done: Conversion, place: str, key: str, value: Any) -> None:
    default = done.defaults.get(key)
    if value is None and not (_is_off(default) or default == -1 or done.kit.null_is_absent):
        done.refuse(place, f"null is not allowed; set a value, or remove the line to use the default {default}")
    if value is None or _is_default(done, key, value):
        done.same.append(place)
    elif why := _reason(done.kit.refused, key):
        done.refuse(f"{place}: {value}", why)
    else:
        entry = next((entry for name, entry in done.kit.keys.items() if key in (name, *entry.other.split())), None)
        reason = f"{UNKNOWN} ({done.kit.name} {done.kit.version})"
        if key in done.values and key not in done.unread:
            reason = "zerofit ignores this value"
        elif entry and entry.only.endswith("adapter") and "adapter" not in done.trained:
            reason = "only for adapters; this file trains all weights"
        elif entry or any(key in rule.keys.split() for rule in done.kit.rules):
            reason = f"has no effect in this training (recipe {done.recipe})"
        done.lose(place, _reason(done.kit.lost, key) or reason)


def _is_default(done: Conversion, key: str, value: Any) -> bool:
    """Return whether a value is the kit's default."""
    entry = done.kit.keys.get(key)
    if entry and isinstance(value, str | bool | int) and value in entry.values and entry.values[value] is None:
        return True
    default = done.defaults.get(key)
    return number(value) == default if not _is_off(default) else _is_off(value)


def _is_off(value: Any) -> bool:
    return not value if isinstance(value, list | dict) else value in OFF


def _reason(table: Mapping[str, str], theirs: str) -> str | None:
    """Return the reason for a key in a table (Kit.lost, Kit.refused); None if the table does not list it."""
    for reason, keys in table.items():
        for key in keys.split():
            if theirs == key or theirs.startswith(f"{key}.") or (key.endswith("*") and theirs.startswith(key[:-1])):
                return reason
    return None


def sections(values: dict[str, Any], excluded: str = "", prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections: {"a": {"b": 1}} becomes {"a.b": 1}. excluded: a section to leave as it is."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict) and value and f"{prefix}{key}" != excluded:
            flat |= sections(value, prefix=f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def plain(value: Any, texts: bool = False) -> Any:
    """Return a value in built-in types.

    Args: texts: also convert texts to numbers, since YAML reads 2e-5 as a text.
    """
    if isinstance(value, dict):
        return {key: plain(inner, texts) for key, inner in dict.items(value)}
    if isinstance(value, list):
        return [plain(inner, texts) for inner in value]
    if texts and isinstance(value, str) and re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?", value, re.I | re.A):
        with contextlib.suppress(ValueError):  # more digits than Python converts
            return int(value) if value.isdecimal() else float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return int(value) if isinstance(value, int) else float(value)


def number(value: Any) -> Any:
    """Convert texts to numbers where possible, also in lists and objects."""
    return plain(value, texts=True)


def words(value: Any) -> list[str]:
    """Return the names in a list or in a text separated by commas."""
    parts = value if isinstance(value, Iterable) and not isinstance(value, str) else str(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def as_object(value: Any) -> Any:
    """Parse a JSON text; return anything else as it is.

    Raises: RepeatedKey for an object that repeats a key; RecursionError for one that is nested too deeply.
    """
    if isinstance(value, str) and value.strip().startswith(("{", "[")):
        try:
            return json.loads(value, object_pairs_hook=without_repeated_keys)
        except RepeatedKey:
            raise
        except ValueError as error:
            read = value[: getattr(error, "pos", 0)]  # valid up to here; Python 3.13 reads any depth
            if sum(map(read.count, "{[")) - sum(map(read.count, "}]")) > MAX_DEPTH:
                raise RecursionError(f"more than {MAX_DEPTH} levels of nesting") from None
            return value
    return value
