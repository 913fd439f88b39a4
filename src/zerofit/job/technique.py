"""Define Technique: a way to train with less memory or time, with its flags, what it excludes and its hooks.

One object stands in the file of each technique; config/resolve.py lists them in their order. The refusals of a command
line, docs/compatibility.md and the tests of all pairs are made from the objects.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerofit.base.errors import UserError
from zerofit.job.settings import Settings, as_typed


def _nothing(*_) -> None:
    """Do nothing: the default of a hook."""


@dataclass(frozen=True)
class Conflict:
    """An argument that a technique excludes."""

    argument: str  # its name, without dashes
    values: tuple | None  # those that are refused; None: any that is on
    why: str  # the cause, as the middle of a sentence
    instead: str  # what to do, as the end of it
    stages: tuple[int, ...] | None = None  # the ZeRO stages at which both exclude each other; None: all


@dataclass(frozen=True, kw_only=True)
class Technique:
    """A technique; each hook is a function of its file, and one that is not given does nothing.

    The hooks are called in the order of the list of techniques, whether the technique is on or not: one that decides
    itself from other arguments may turn itself on.
    """

    name: str  # as docs and tests call it: "tiled MLP"
    flag: str  # the argument that turns it on, and that refusals name
    example: str = ""  # a command line's words that turn it on
    values: tuple | None = (
        None  # of the flag with which it is on; None: any but off (None, False, 0, 1, "none", "auto")
    )
    conflicts: tuple[Conflict, ...] = ()
    arguments: type | None = None  # dataclass of flags of its own, as those of config/arguments.py
    resolve: Callable[[Settings], None] = _nothing  # check and complete the arguments, before the model is known
    resolve_for_model: Callable[[Settings, Any], None] = _nothing  # the same, with the model's config.json
    install: Callable[[Settings, Any], Any] = _nothing  # change the loaded model; a model that it returns replaces it

    def is_on(self, settings: Settings) -> bool:
        """Return whether the settings turn it on."""
        return _is_on(settings.values.get(self.flag), self.values)


def _is_on(value: Any, values: tuple | None) -> bool:
    if values is not None:
        return value in values
    return bool(value) and str(value) not in ("1", "none", "auto")


def refuse_conflicts(technique: Technique, settings: Settings) -> None:
    """Refuse the arguments that a technique excludes, if it is on. Raises: UserError naming both, cause and fix."""
    if not technique.is_on(settings):
        return
    for conflict in technique.conflicts:
        value = settings.values.get(conflict.argument)
        applies = conflict.stages is None or settings.zero in conflict.stages
        if applies and _is_on(value, conflict.values):
            stage = f" at ZeRO stage {settings.zero}" if conflict.stages is not None else ""
            raise UserError(
                f"{_typed(settings, technique.flag)} with {_typed(settings, conflict.argument)}{stage}: "
                f"{conflict.why}; {conflict.instead}."
            )


def _typed(settings: Settings, name: str) -> str:
    """Return an argument as it is typed: "--optim sophia", "--new_tokens a b"."""
    value = settings.values[name]
    return f"--{name} {' '.join(map(str, value)) if isinstance(value, list) else as_typed(name, value)}"
