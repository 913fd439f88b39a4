"""Define Parallel: a technique with which a group of ranks shares each row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerofit.job.settings import Settings
from zerofit.job.technique import Technique


@dataclass(frozen=True, kw_only=True)
class Parallel(Technique):
    """A technique whose flag is the number of ranks that share each row.

    `job.groups.register` makes it count: in the ranks with different rows, the batch, checkpoints and plans.
    """

    splits: str = ""  # what its ranks divide: the "tokens" of a row, the "matrices" or the "layers" of the model
    neighbors: bool = True  # a group has neighboring ranks of one node; else its ranks stand far apart
    whole_nodes: bool = False  # a group of neighbors may also have all ranks of several nodes
    exchanges: str = "sums"  # what a group of neighbors exchanges in every layer
    groups: str = "share rows"  # what a plan says of them: "2 groups of 4 GPUs that ..."
    # Raise UserError for a recipe that it cannot train, before its conflicts.
    check_recipe: Callable[[Settings], None] = lambda settings: None
    default_size: Callable[[Settings], int] = lambda settings: 1  # where the flag has no value
    searched: tuple[int, ...] = ()  # sizes that a plan tries, as far as a node has so many GPUs
    overlay: str = ""  # file of deepspeed_configs/ to merge into the DeepSpeed configuration
    sections: Callable[[int], dict[str, Any]] = lambda size: {}  # of the DeepSpeed configuration, by size

    # For plans; a shape is a plan.formulas.Shape.
    share: Callable[[Any, int], Any] = lambda shape, size: shape  # the shape of what one rank holds before ZeRO
    sent: Callable[[Any, int, int], tuple[float, float]] = lambda shape, tokens, size: (0.0, 0.0)
    # (shape, tokens of a micro batch on a rank, size) -> (calls, bytes that a rank sends) in the forward of a layer
    sums: bool = False  # they are all-reduces, which go round the ring twice

    def __post_init__(self):
        assert self.splits in ("", "tokens", "matrices", "layers"), self.splits

    def fits_nodes(self, size: int, local: int) -> bool:
        """Return whether groups of `size` ranks lie as they must on nodes of `local` ranks."""
        return not self.neighbors or local % size == 0 or (self.whole_nodes and size % local == 0)

    @property
    def splits_model(self) -> bool:
        """Return whether each rank of a group holds a part of the model, and so writes a part of each checkpoint."""
        return self.splits in ("matrices", "layers")
