"""Define Parallel: a technique in which a group of ranks shares each row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerofit.job.settings import Settings
from zerofit.job.technique import Technique


@dataclass(frozen=True, kw_only=True)
class Parallel(Technique):
    """A technique whose flag is the number of ranks that share each row.

    `job.parallel_dims.register` makes it count: in the ranks with different rows, the batch, checkpoints and plans.
    """

    splits: str = ""  # the split object: "tokens" of a row, "matrices" or "layers" of the model
    neighbors: bool = True  # whether a group consists of neighboring ranks of a node
    fills_nodes: bool = False  # whether a group of neighbors may also consist of all ranks of several nodes
    exchanges: str = "sums"  # data exchanged by neighbors in every layer, for messages
    groups: str = "share rows"  # verb in a plan: "2 groups of 4 GPUs that ..."
    # Raise UserError for an unsupported recipe, before its conflicts.
    check_recipe: Callable[[Settings], None] = lambda settings: None
    default_size: Callable[[Settings], int] = lambda settings: 1  # default of a flag of None
    searched: tuple[int, ...] = ()  # sizes that a plan tries, up to the GPUs of a node
    overlay: str = ""  # file of deepspeed_configs/ to merge into the DeepSpeed configuration
    sections: Callable[[int], dict[str, Any]] = lambda size: {}  # size -> sections of the DeepSpeed configuration

    # For plans; a shape is a plan.formulas.Shape.
    share: Callable[[Any, int], Any] = lambda shape, size: shape  # shape of a rank's part before ZeRO
    sent: Callable[[Any, int, int], tuple[float, float]] = lambda shape, tokens, size: (0.0, 0.0)
    # (shape, tokens of a micro batch on a rank, size) -> (calls, bytes sent by a rank) in the forward of a layer
    sums: bool = False  # whether they are all-reduces, which pass the ring twice

    def __post_init__(self):
        assert self.splits in ("", "tokens", "matrices", "layers"), self.splits

    def fits_nodes(self, size: int, local: int) -> bool:
        """Return whether groups of `size` ranks fit nodes of `local` ranks."""
        return not self.neighbors or local % size == 0 or (self.fills_nodes and size % local == 0)

    @property
    def splits_model(self) -> bool:
        """Return whether each rank of a group holds a part of the model and writes a part of each checkpoint."""
        return self.splits in ("matrices", "layers")
