"""Register the dimensions of parallelism that share a row among ranks, and derive the data ranks from them.

A dimension is a Parallel object (parallel/interface.py): tensor, sequence or pipeline parallelism, or a custom one. The
functions take the arguments of Settings or of a recorded run, so that no other code depends on the set of dimensions.
"""

from collections.abc import Mapping
from typing import Any

_dims: list = []


def register(dim):
    """Add a dimension, which replaces one with the same flag, and return it."""
    _dims[:] = [*(other for other in _dims if other.flag != dim.flag), dim]
    return dim


def remove(dim) -> None:
    """Remove a registered dimension."""
    _dims.remove(dim)


def registered() -> tuple:
    """Return the dimensions in the order in which their arguments are resolved."""
    assert _dims, "the dimensions of zerofit.parallel are not imported"
    return tuple(_dims)


def size_flags() -> tuple[str, ...]:
    """Return the arguments that hold the sizes of the dimensions, such as tp_size."""
    return tuple(dim.flag for dim in registered())


def active(values: Mapping[str, Any]) -> list[tuple[Any, int]]:
    """Return (dimension, size) for each dimension that a job's arguments enable."""
    return [(dim, values[dim.flag]) for dim in registered() if (values.get(dim.flag) or 1) > 1]


def ranks_per_row(values: Mapping[str, Any], splits: tuple[str, ...] | None = None) -> int:
    """Return the number of ranks that share each row.

    Args: splits: count only dimensions that split these ("tokens", "matrices", "layers"); None: all.
    """
    product = 1
    for dim, size in active(values):
        product *= size if splits is None or dim.splits in splits else 1
    return product


def data_rank(values: Mapping[str, Any], rank: int, world_size: int) -> int:
    """Return the index of the share of the rows that a rank trains on.

    The ranks of a group are neighbors, or far apart if they communicate little. At most one dimension is enabled:
    config/defaults.check_ranges rejects two.
    """
    share = ranks_per_row(values)
    far_apart = any(not dim.neighbors for dim, _ in active(values))
    return rank % (world_size // share) if far_apart else rank // share
