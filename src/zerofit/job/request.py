"""Define Request: the arguments that a user has given for a recipe, before defaults and decisions."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from zerofit.job.recipe import Recipe
from zerofit.job.settings import as_typed

FLAG = "flag"  # the source of an argument that stands on the command line

BY_PLAN = "plan"  # the source of one that the plan of a start has chosen


@dataclass(frozen=True)
class Request:
    """The arguments given for a recipe, typed and checked one by one, each with its source.

    A job on other settings is a copy with some arguments changed: `request.put(zero=3)`; its defaults and decisions are
    derived again by config/resolve.py.
    """

    recipe: Recipe  # whose arguments these are
    values: Mapping[str, Any] = field(default_factory=dict)  # argument -> value
    source: Mapping[str, str] = field(default_factory=dict)  # argument -> FLAG, BY_PLAN, or the YAML file that holds it
    notes: tuple[str, ...] = ()  # sentences to print, e.g. on a flag that was given twice

    def __post_init__(self):
        for name in ("values", "source"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def put(self, source: str = FLAG, /, **values: Any) -> "Request":
        """Return a copy with these arguments, instead of those that it has of the same names."""
        sources = dict.fromkeys(values, source)
        return replace(self, values={**self.values, **values}, source={**self.source, **sources})

    def planned(self, why: str, values: Mapping[str, Any]) -> "Request":
        """Return a copy with the arguments that a plan has chosen, instead of earlier choices, and why as a note."""
        earlier = (name for name, source in self.source.items() if source == BY_PLAN)
        return replace(self.drop(*earlier).put(BY_PLAN, **values), notes=(*self.notes, why) if why else self.notes)

    def drop(self, *names: str) -> "Request":
        """Return a copy without these arguments, also where the YAML file has them."""
        values = {name: value for name, value in self.values.items() if name not in names}
        return replace(self, values=values, source={name: self.source[name] for name in values})

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value given for an argument, or `default`."""
        return self.values.get(name, default)

    def over(self, below: "Request") -> "Request":
        """Return what a command line asks for whose flags are added to that of `below`, e.g. to a run's.

        Flags win over a YAML file; a YAML file of this request is instead of the one below.
        """
        if "config" in self.values:
            below = below.drop(*(name for name, source in below.source.items() if source != FLAG))
        of_file = [name for name, source in self.source.items() if source != FLAG and name in below.values]
        added = self.drop(*of_file)
        return replace(
            below, values={**below.values, **added.values}, source={**below.source, **added.source}, notes=self.notes
        )

    def flags(self) -> list[str]:
        """Return the arguments of the command line as they would be typed; those of a YAML file stay in it."""
        return self._typed(name for name, source in self.source.items() if source == FLAG)

    def all_flags(self) -> list[str]:
        """Return all arguments as they would be typed, those of the YAML file instead of its name."""
        return self._typed(name for name in self.values if name != "config")

    def _typed(self, names: Iterable[str]) -> list[str]:
        return [word for name in names for word in _words(name, self.values[name])]


def _words(name: str, value: Any) -> list[str]:
    """Return a flag and its values."""
    if isinstance(value, list | tuple):
        return [f"--{name}", *(as_typed(name, entry) for entry in value)]
    word = json.dumps(value) if isinstance(value, dict) else as_typed(name, value)
    return [f"--{name}={word}"] if word.startswith("-") else [f"--{name}", word]
