"""Compute each MLP over tiles of tokens, so that its wide intermediate is never stored for all tokens.

Each tile is checkpointed: its forward runs again in the backward. Autograd sums the gradients of all tiles before the
hook of a weight runs, so DDP and every ZeRO stage reduce it once. (deepspeed's TiledMLP runs a backward per tile and
only delays DeepSpeed's hooks, not DDP's: it supports stages 1 to 3.)
"""

import inspect
import math

import torch
from torch.utils.checkpoint import checkpoint

from zerofit.base.errors import UserError
from zerofit.job.settings import decide
from zerofit.job.technique import AllBut, Technique

NAMES = ("mlp", "feed_forward", "ffn")


def resolve(settings) -> None:
    """Check --tiled_mlp. Raises: UserError for a string other than auto."""
    if isinstance(settings.tiled_mlp, str) and settings.tiled_mlp != "auto":
        raise UserError(f"--tiled_mlp {settings.tiled_mlp}: must be auto or a number of tiles, 1 or more.")


def resolve_for_model(settings, config) -> None:
    """Decide `--tiled_mlp auto`: about as many tokens per tile as hidden features (arXiv 2506.13996)."""
    if settings.tiled_mlp == "auto":
        tokens = settings.per_device_train_batch_size * settings.max_length // settings.parallel_size("tokens")
        features = config.get_text_config().hidden_size
        tiles = automatic(tokens, features)
        decide(settings, "tiled_mlp", tiles, f"up to {tokens:,} tokens per micro batch, {features:,} features")


def automatic(tokens: int, features: int) -> int:
    """Return the number of tiles of `--tiled_mlp auto`. Args: tokens: per micro batch and rank."""
    return max(1, math.ceil(tokens / features))


def find(model) -> list[torch.nn.Module]:
    """Return the MLPs of the layers: modules named as in NAMES.

    Raises: UserError without such a module, or if one takes several tensors or is a mixture of experts.
    """
    named = [(name, module) for name, module in model.named_modules() if name.rsplit(".", 1)[-1] in NAMES]
    for name, module in named:
        parameters = inspect.signature(module.forward).parameters.values()
        required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        if len(required) != 1 or any(hasattr(module, word) for word in ("experts", "router", "gate")):
            raise UserError(
                f"--tiled_mlp: {name} ({type(module).__name__}) is a mixture of experts or needs more inputs than the "
                "hidden states, so it cannot be tiled; use --tiled_mlp 1."
            )
    if not named:
        raise UserError(f"--tiled_mlp: no module of this model is named {' or '.join(NAMES)}; use --tiled_mlp 1.")
    return [module for _, module in named]


def tile(module: torch.nn.Module, tiles: int) -> None:
    """Make the module process its input, flattened to (tokens, features), in `tiles` parts.

    Every call has exactly `tiles` parts, so that ranks with different lengths gather a ZeRO-3 weight equally often.
    """
    untiled = module.forward

    def forward(hidden):
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        each, more = divmod(flat.shape[1], tiles)
        # tensor_split would allocate and add a full tensor of zeros for each tile in the backward.
        parts = flat.split([each + (tile < more) for tile in range(tiles)], dim=1)
        if torch.is_grad_enabled():
            outputs = [checkpoint(untiled, part, use_reentrant=False) for part in parts]
        else:
            outputs = [untiled(part) for part in parts]
        return torch.cat(outputs, dim=1).reshape(*hidden.shape[:-1], -1)

    module.forward = forward


def install(settings, model) -> None:
    """Tile every MLP of the model unless `--tiled_mlp` is 1.

    Raises: UserError for a model whose MLPs cannot be tiled.
    """
    if settings.tiled_mlp != 1:
        for module in find(model):
            tile(module, settings.tiled_mlp)


TECHNIQUE = Technique(
    name="tiled MLP",
    flag="tiled_mlp",
    values=AllBut(1),
    example="--tiled_mlp 2",
    resolve=resolve,
    resolve_for_model=resolve_for_model,
    install=install,
)
