"""Say which ranks of a job compute the same rows, by the registered ways to share a row among ranks.

A way is an object of parallel/ (parallel/interface.py), or one of a user's own. Asked are the values of arguments, of
Settings or of a record of an earlier run, so that nothing outside of the ways knows how many there are.
"""

from collections.abc import Mapping
from typing import Any

_ways: list = []


def register(way):
    """Add a way, in place of one with the same flag; return it."""
    _ways[:] = [*(other for other in _ways if other.flag != way.flag), way]
    return way


def remove(way) -> None:
    """Forget a registered way."""
    _ways.remove(way)


def ways() -> tuple:
    """Return the ways in the order in which their arguments are resolved."""
    assert _ways, "zerofit.parallel.ways has not been imported"
    return tuple(_ways)


def flags() -> tuple[str, ...]:
    """Return the names of the arguments that hold the number of ranks of each way."""
    return tuple(way.flag for way in ways())


def in_use(values: Mapping[str, Any]) -> list[tuple[Any, int]]:
    """Return (way, ranks of a group) of each way that the values of a job's arguments turn on."""
    return [(way, values[way.flag]) for way in ways() if (values.get(way.flag) or 1) > 1]


def per_row(values: Mapping[str, Any], splits: tuple[str, ...] | None = None) -> int:
    """Return how many ranks share each row.

    Args: splits: count only the ways that split these ("tokens", "matrices", "layers"); None: all.
    """
    product = 1
    for way, size in in_use(values):
        product *= size if splits is None or way.splits in splits else 1
    return product


def data_rank(values: Mapping[str, Any], rank: int, world_size: int) -> int:
    """Return which share of the rows a rank trains on.

    The ranks of a group are neighbors, unless they exchange so little that they stand far apart. At most one
    way is in use: config/defaults.check_ranges refuses two.
    """
    share = per_row(values)
    far_apart = any(not way.neighbors for way, _ in in_use(values))
    return rank % (world_size // share) if far_apart else rank // share
