"""Define Technique: a way to train with less memory or time, with its flag, what it excludes and its hooks.

The objects of a technique stand in its file; config/resolve.py lists all of them in their order. The refusals of a
command line, docs/compatibility.md and the tests of all pairs are made from them.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from zerofit.base.errors import UserError
from zerofit.job.settings import Settings, as_typed


class AllBut:
    """The values of an argument but these; an argument without a value (None) has none of them."""

    def __init__(self, *values: Any):
        self.values = values

    def __contains__(self, value: Any) -> bool:
        return value is not None and value not in self.values


@dataclass(frozen=True)
class Conflict:
    """An argument that a technique excludes."""

    argument: str  # its name, without dashes
    values: Container | None  # those that are excluded: a tuple or AllBut; None: any that is on
    why: str  # the cause, as a part of a sentence
    instead: str = "leave one of the two out"  # what to do, as its end
    stages: tuple[int, ...] | None = None  # the ZeRO stages at which both exclude each other; None: all

    def applies(self, settings: Settings) -> bool:
        """Return whether the settings have the argument at such a value."""
        at_stage = self.stages is None or settings.zero in self.stages
        return at_stage and _is_on(settings.values.get(self.argument), self.values)

    def excludes(self, technique: "Technique") -> bool:
        """Return whether the argument at such a value is the technique of that argument, as in its example."""
        return technique.flag == self.argument and _is_on(technique.example_value(), self.values)

    def typed(self, settings: Settings) -> str:
        """Return the argument as it is typed, with the stage if it matters: "--optim sophia"."""
        return _typed(settings, self.argument) + (f" at ZeRO stage {settings.zero}" if self.stages is not None else "")


def _nothing(*_) -> None:
    """Do nothing, as a hook that a technique does not have."""


def _unchanged(*_) -> dict[str, Any]:
    """Return no arguments."""
    return {}


def _as_long(*_) -> float:
    """Return the factor of a technique that does not change the time of the arithmetic."""
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Technique:
    """A technique. Its hooks are called in the order of the list of techniques, whether it is on or not.

    So one that is off may turn itself on, by what the arguments and the model are. The hooks of a rank's model are
    called by simulated ranks too.
    """

    name: str  # as docs and tests call it: "tiled MLP"
    flag: str = ""  # the argument that turns it on, and that refusals name; "": none does, it only has hooks
    values: Container | None = None  # of the flag with which it is on; None: any but None, False, 0, 1, "none", "auto"
    example: str = ""  # words of a command line that turn it on
    conflicts: tuple[Conflict, ...] = ()
    arguments: type | None = None  # dataclass of flags of its own, written as those of config/arguments.py
    resolve: Callable[[Settings], None] = _nothing  # check and complete the arguments, before the model is known
    resolve_for_model: Callable[[Settings, Any], None] = _nothing  # the same, with the model's config.json
    # Compare its kernels with what they replace, on the device of each rank, before the model is loaded; Any: its
    # config.json. Collective. What fails is refused or turned off, on all ranks alike.
    self_test: Callable[[Settings, Any], None] = _nothing
    install: Callable[[Settings, Any], None] = _nothing  # change the loaded model, before the optimizer is made
    # Return the arguments that a simulated rank, which has tensors without memory, must have other values of. Any: the
    # plan's simulate.Question.
    simulated: Callable[[Settings, Any], dict[str, Any]] = _unchanged
    seconds: Callable[[Settings], float] = _as_long  # the factor of the time of the arithmetic, for plans

    def is_on(self, settings: Settings) -> bool:
        """Return whether the settings turn it on."""
        return _is_on(settings.values.get(self.flag), self.values)

    def example_value(self) -> Any:
        """Return the value of the technique's flag in its example, of the type that settings have it in."""
        if isinstance(self.values, tuple):
            return self.values[0]
        words = self.example.split()
        word = words[words.index(f"--{self.flag}") + 1]
        return True if word == "true" else int(word) if word.isdigit() else word

    def conflict(self, settings: Settings) -> Conflict | None:
        """Return the first conflict of the technique with the settings, whether it is on or not; None without any."""
        return next((conflict for conflict in self.conflicts if conflict.applies(settings)), None)


def _is_on(value: Any, values: Container | None) -> bool:
    """Return whether a value, or one of a list of values, is among those; values: None: whether it is on at all."""
    if values is not None:
        return any(entry in values for entry in (value if isinstance(value, list) else [value]))
    return bool(value) and str(value) not in ("1", "none", "auto")


def refuse_conflicts(technique: Technique, settings: Settings) -> None:
    """Refuse what a technique excludes, if it is on. Raises: UserError naming both arguments, cause and fix."""
    conflict = technique.conflict(settings) if technique.is_on(settings) else None
    if conflict is not None:
        nobody_set_it = settings.defaults.get(technique.flag) == settings.values[technique.flag]
        what = technique.name if nobody_set_it else _typed(settings, technique.flag).removesuffix(" true")
        raise UserError(f"{what} with {conflict.typed(settings)}: {conflict.why}; {conflict.instead}.")


def _typed(settings: Settings, name: str) -> str:
    """Return an argument as it is typed: "--new_tokens a b"; the stage, which may be decided, in words."""
    value = settings.values[name]
    if name == "zero":
        return f"ZeRO stage {value}"
    return f"--{name} {' '.join(map(str, value)) if isinstance(value, list) else as_typed(name, value)}"
