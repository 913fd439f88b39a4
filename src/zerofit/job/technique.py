"""Define Technique: a way to train with less memory or time, with its flag, conflicts and hooks.

Each technique is defined in its module, and config/resolve.py lists all in order. Errors for conflicting flags,
docs/compatibility.md and the tests of all pairs are generated from them.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from zerofit.base.errors import UserError
from zerofit.job.settings import Settings, as_typed


class AllBut:
    """A container of all values of an argument except these and None."""

    def __init__(self, *values: Any):
        self.values = values

    def __contains__(self, value: Any) -> bool:
        return value is not None and value not in self.values


@dataclass(frozen=True)
class Conflict:
    """An argument that a technique excludes."""

    argument: str  # its name, without dashes
    values: Container | None  # excluded values: a tuple or AllBut; None: any enabled value
    why: str  # the cause, as a clause
    instead: str = "remove one of the two"  # the fix, as the last clause
    stages: tuple[int, ...] | None = None  # ZeRO stages with the conflict; None: all

    def applies(self, settings: Settings) -> bool:
        """Return whether the settings have an excluded value."""
        at_stage = self.stages is None or settings.zero in self.stages
        return at_stage and _is_on(settings.values.get(self.argument), self.values)

    def excludes(self, technique: "Technique") -> bool:
        """Return whether the conflict excludes the technique as its example enables it."""
        return technique.flag == self.argument and _is_on(technique.example_value(), self.values)

    def typed(self, settings: Settings) -> str:
        """Return the argument as a flag, with the stage if it matters: "--optim sophia"."""
        return _typed(settings, self.argument) + (f" at ZeRO stage {settings.zero}" if self.stages is not None else "")


def _nothing(*_) -> None:
    """Do nothing; the default of a hook."""


def _unchanged(*_) -> dict[str, Any]:
    """Return {}; the default of a hook."""
    return {}


def _as_long(*_) -> float:
    """Return the factor of a technique that does not change the compute time."""
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Technique:
    """A technique. Its hooks are called in the order of the list of techniques, even if it is disabled.

    A disabled technique may thus enable itself, depending on arguments and model. Simulated ranks also call the hooks
    for the model.
    """

    name: str  # name in docs and tests: "tiled MLP"
    flag: str = ""  # the argument that enables it, named in errors; "": it only has hooks
    values: Container | None = None  # enable it; None: all except None, False, 0, 1, "none", "auto"
    example: str = ""  # flags that enable it
    conflicts: tuple[Conflict, ...] = ()
    arguments: type | None = None  # dataclass of its flags, as in config/arguments.py
    resolve: Callable[[Settings], None] = _nothing  # check and complete the arguments, without the model
    resolve_for_model: Callable[[Settings, Any], None] = _nothing  # the same, with the model's config.json
    # Compare its kernels with the reference implementation on each rank's device, before the model is loaded; Any: its
    # config.json. Collective. A failing technique is rejected or disabled on all ranks.
    self_test: Callable[[Settings, Any], None] = _nothing
    install: Callable[[Settings, Any], None] = _nothing  # change the loaded model, before the optimizer is created
    # Return the arguments that must differ on a simulated rank, whose tensors lack memory. Any: the plan's
    # simulate.Question.
    simulated: Callable[[Settings, Any], dict[str, Any]] = _unchanged
    seconds: Callable[[Settings], float] = _as_long  # factor of the compute time, for plans

    def is_on(self, settings: Settings) -> bool:
        """Return whether the settings enable it."""
        return _is_on(settings.values.get(self.flag), self.values)

    def example_value(self) -> Any:
        """Return the value of the flag in the example, with the type that it has in the settings."""
        if isinstance(self.values, tuple):
            return self.values[0]
        words = self.example.split()
        word = words[words.index(f"--{self.flag}") + 1]
        return True if word == "true" else int(word) if word.isdigit() else word

    def conflict(self, settings: Settings) -> Conflict | None:
        """Return the first conflict with the settings, even if the technique is disabled; None without conflicts."""
        return next((conflict for conflict in self.conflicts if conflict.applies(settings)), None)


def _is_on(value: Any, values: Container | None) -> bool:
    """Return whether a value, or an item of a list, is in `values`; None: whether it enables anything."""
    if values is not None:
        return any(entry in values for entry in (value if isinstance(value, list) else [value]))
    return bool(value) and str(value) not in ("1", "none", "auto")


def refuse_conflicts(technique: Technique, settings: Settings) -> None:
    """Raise UserError with both arguments, cause and fix for a conflict of an enabled technique."""
    conflict = technique.conflict(settings) if technique.is_on(settings) else None
    if conflict is not None:
        is_default = settings.defaults.get(technique.flag) == settings.values[technique.flag]
        name = technique.name if is_default else _typed(settings, technique.flag).removesuffix(" true")
        raise UserError(f"{name} with {conflict.typed(settings)}: {conflict.why}; {conflict.instead}.")


def _typed(settings: Settings, name: str) -> str:
    """Return an argument as a flag, "--new_tokens a b"; the stage, which may not be set by the user, in words."""
    value = settings.values[name]
    if name == "zero":
        return f"ZeRO stage {value}"
    return f"--{name} {' '.join(map(str, value)) if isinstance(value, list) else as_typed(name, value)}"
