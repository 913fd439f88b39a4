"""Define Request: a user's arguments for a recipe, before defaults and decisions."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from zerofit.job.recipe import Recipe
from zerofit.job.settings import as_typed

FLAG = "flag"  # source of an argument from the command line

BY_PLAN = "plan"  # source of an argument that a plan has chosen


@dataclass(frozen=True)
class Request:
    """A user's arguments for a recipe, each parsed and checked, with its source.

    To change a job, copy its request with other arguments, `request.put(zero=3)`; config/resolve.py derives defaults
    and decisions again.
    """

    recipe: Recipe
    values: Mapping[str, Any] = field(default_factory=dict)  # argument -> value
    source: Mapping[str, str] = field(default_factory=dict)  # argument -> FLAG, BY_PLAN or a YAML file
    notes: tuple[str, ...] = ()  # sentences to print, e.g. on a repeated flag

    def __post_init__(self):
        for name in ("values", "source"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def put(self, source: str = FLAG, /, **values: Any) -> "Request":
        """Return a copy with these arguments set."""
        sources = dict.fromkeys(values, source)
        return replace(self, values={**self.values, **values}, source={**self.source, **sources})

    def with_plan_values(self, why: str, values: Mapping[str, Any]) -> "Request":
        """Return a copy with a plan's values, which replace earlier ones, and the reason as a note."""
        earlier = (name for name, source in self.source.items() if source == BY_PLAN)
        return replace(self.drop(*earlier).put(BY_PLAN, **values), notes=(*self.notes, why) if why else self.notes)

    def drop(self, *names: str) -> "Request":
        """Return a copy without these arguments, even if they come from the YAML file."""
        values = {name: value for name, value in self.values.items() if name not in names}
        return replace(self, values=values, source={name: self.source[name] for name in values})

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of an argument, or `default`."""
        return self.values.get(name, default)

    def merged_onto(self, base: "Request") -> "Request":
        """Return `base`, e.g. the request of a run, updated with this request.

        Flags override a YAML file; a YAML file of this request replaces the one of `base`.
        """
        if "config" in self.values:
            base = base.drop(*(name for name, source in base.source.items() if source != FLAG))
        from_file = [name for name, source in self.source.items() if source != FLAG and name in base.values]
        added = self.drop(*from_file)
        return replace(
            base, values={**base.values, **added.values}, source={**base.source, **added.source}, notes=self.notes
        )

    def flags(self) -> list[str]:
        """Return the command line's arguments as flags, without the arguments in a YAML file."""
        return self._typed(name for name, source in self.source.items() if source == FLAG)

    def all_flags(self) -> list[str]:
        """Return all arguments as flags, including the arguments in the YAML file."""
        return self._typed(name for name in self.values if name != "config")

    def _typed(self, names: Iterable[str]) -> list[str]:
        return [word for name in names for word in _words(name, self.values[name])]


def _words(name: str, value: Any) -> list[str]:
    """Return a flag and its values."""
    if isinstance(value, list | tuple):
        return [f"--{name}", *(as_typed(name, entry) for entry in value)]
    word = json.dumps(value) if isinstance(value, dict) else as_typed(name, value)
    return [f"--{name}={word}"] if word.startswith("-") else [f"--{name}", word]
