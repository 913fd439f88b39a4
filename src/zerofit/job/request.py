"""Define Request: the arguments that a user has given for a recipe, before defaults and decisions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from zerofit.job.recipe import Recipe
from zerofit.job.settings import as_typed

FLAG = "flag"  # the source of an argument that stands on the command line


@dataclass(frozen=True)
class Request:
    """The arguments given for a recipe, typed and checked one by one, each with its source.

    A job on other settings is a copy with some arguments changed: `request.put(zero=3)`; its defaults and decisions are
    derived again by config/resolve.py.
    """

    recipe: Recipe  # whose arguments these are
    values: Mapping[str, Any] = field(default_factory=dict)  # argument -> value
    source: Mapping[str, str] = field(default_factory=dict)  # argument -> FLAG, or the YAML file that holds it
    notes: tuple[str, ...] = ()  # sentences to print, e.g. on a flag that was given twice

    def __post_init__(self):
        for name in ("values", "source"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def put(self, source: str = FLAG, /, **values: Any) -> "Request":
        """Return a copy with these arguments, instead of those that it has of the same names."""
        sources = dict.fromkeys(values, source)
        return replace(self, values={**self.values, **values}, source={**self.source, **sources})

    def drop(self, *names: str) -> "Request":
        """Return a copy without these arguments, also where the YAML file has them."""
        values = {name: value for name, value in self.values.items() if name not in names}
        return replace(self, values=values, source={name: self.source[name] for name in values})

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value given for an argument, or `default`."""
        return self.values.get(name, default)

    def flags(self) -> list[str]:
        """Return the arguments of the command line as they would be typed; those of a YAML file stay in it."""
        words = []
        for name, value in self.values.items():
            if self.source[name] == FLAG:
                words += [f"--{name}", *_words(name, value)]
        return words


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        return [as_typed(name, entry) for entry in value]
    return [json.dumps(value) if isinstance(value, dict) else as_typed(name, value)]
