"""Compute each MLP over tiles of tokens, so that its wide intermediate is never whole.

A tile is a checkpoint: its forward runs again in the backward. Autograd adds up what the tiles give to a weight before
the weight's hook sees it, so DDP and every ZeRO stage reduce it once. (deepspeed's TiledMLP calls backward per tile
and holds only DeepSpeed's hooks back, not DDP's; it is for stages 1 to 3.)
"""

import inspect
import math

import torch
from torch.utils.checkpoint import checkpoint

from zerofit.errors import UserError
from zerofit.settings import decide

NAMES = ("mlp", "feed_forward", "ffn")


def check_flags(settings) -> None:
    """Refuse, by the flags alone, what cannot work.

    Raises: UserError.
    """
    tiles = settings.tiled_mlp
    if tiles != "auto" and not (tiles.isdigit() and int(tiles) >= 1):
        raise UserError(f"--tiled_mlp {tiles}: must be auto or a number of tiles, 1 or more.")
    if tiles != "1" and settings.use_liger_kernel:
        raise UserError("--tiled_mlp with --use_liger_kernel: Liger replaces the MLP; leave one of the two out.")


def choose(settings, config) -> None:
    """Decide `--tiled_mlp auto`: a tile of about as many tokens as the model has features (arXiv 2506.13996)."""
    if settings.tiled_mlp == "auto":
        tokens = settings.per_device_train_batch_size * settings.max_length
        features = config.get_text_config().hidden_size
        tiles = max(1, math.ceil(tokens / features))
        decide(settings, "tiled_mlp", str(tiles), f"{tokens:,} tokens a batch at most, {features:,} features")


def find(model) -> list[torch.nn.Module]:
    """The layers' MLPs: modules named in NAMES that take one tensor and are no mixture of experts.

    Raises: UserError when the model has none, or one that cannot be cut along the tokens.
    """
    named = [(name, module) for name, module in model.named_modules() if name.rsplit(".", 1)[-1] in NAMES]
    for name, module in named:
        parameters = inspect.signature(module.forward).parameters.values()
        needed = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        if len(needed) != 1 or any(hasattr(module, word) for word in ("experts", "router", "gate")):
            raise UserError(
                f"--tiled_mlp: {name} ({type(module).__name__}) is a mixture of experts or takes more than the hidden "
                "states, so it cannot be cut along the tokens; use --tiled_mlp 1."
            )
    if not named:
        raise UserError(f"--tiled_mlp: no module of this model is called {' or '.join(NAMES)}; use --tiled_mlp 1.")
    return [module for _, module in named]


def tile(module: torch.nn.Module, tiles: int) -> None:
    """Make the module's forward work on `tiles` parts of (..., tokens, features), all dimensions but the last flattened.

    Always as many calls as tiles, so that ranks with other lengths gather a ZeRO-3 weight equally often.
    """
    whole = module.forward

    def forward(hidden):
        parts = hidden.reshape(1, -1, hidden.shape[-1]).tensor_split(tiles, dim=1)
        if torch.is_grad_enabled():
            done = [checkpoint(whole, part, use_reentrant=False) for part in parts]
        else:
            done = [whole(part) for part in parts]
        return torch.cat(done, dim=1).reshape(*hidden.shape[:-1], -1)

    module.forward = forward


def install(settings, model) -> None:
    """Tile every MLP of the model where `--tiled_mlp` says so.

    Raises: UserError for a model whose MLPs cannot be cut.
    """
    if settings.tiled_mlp != "1":
        for module in find(model):
            tile(module, int(settings.tiled_mlp))
