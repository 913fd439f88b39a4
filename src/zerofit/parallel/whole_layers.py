"""Exchange whole decoder layers at ZeRO-3: for short micro batches, on many ranks, and where layers are compiled.

transformers' "auto" makes buckets of hidden_size^2 numbers, so that each matrix of a layer has calls of its own, and
DeepSpeed runs hooks around each module. A decoder layer that is a leaf module (zero_optimization.leaf_module) is
gathered at once, with the hooks of one module, and a bucket of its size is reduced at once (docs/scaling.md).
"""

from zerofit.base import buffers
from zerofit.base.errors import UserError
from zerofit.job.settings import decide, json_value, merge_json
from zerofit.job.technique import Technique
from zerofit.model import experts, load

BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size")

LEAVES = "zero_optimization.leaf_module"


def largest(settings, tokens: int) -> int:
    """Return up to how many numbers a dense layer has that is exchanged whole; 0: none is.

    Not for an adapter or frozen weights: DeepSpeed 0.19.8 fails an assertion of stage3.py on leaf modules that have
    some, under gradient checkpointing. Where parameters are in host memory, that of a GPU is short.
    Args: settings: resolved, also without their model; tokens: of a micro batch on one rank.
    """
    is_partly_frozen = settings.trains_adapter or settings.freeze or settings.train_only
    if settings.zero != 3 or is_partly_frozen or not settings.whole_layers:
        return 0
    return buffers.whole_layers_up_to(tokens, settings.world_size, settings.offload)


def resolve(settings) -> None:
    """Turn it off where the DeepSpeed JSON says what is exchanged, or keeps parameters on a disk.

    For these DeepSpeed has buffers of a few matrices.
    """
    if settings.zero == 3 and settings.whole_layers and not _is_open(settings.deepspeed["zero_optimization"]):
        typed = settings.source["whole_layers"] not in ("default", "transformers default")
        why = "the DeepSpeed JSON says what is exchanged, or has parameters on a disk" if typed else ""
        decide(settings, "whole_layers", False, why)


def _is_open(section: dict) -> bool:
    has_own = any(key in section for key in ("leaf_module", "stage3_module_granularity_threshold"))
    on_disk = json_value(section, "offload_param.device") == "nvme"
    return all(section.get(key) == "auto" for key in BUCKETS) and not has_own and not on_disk


def tokens_of(settings) -> int:
    """Return the most tokens of a micro batch on one rank."""
    rows = settings.per_device_train_batch_size * settings.objective.documents
    return rows * settings.max_length // settings.ranks_that_split("tokens")


def resolve_for_model(settings, config) -> None:
    """Add the layers' class and buckets of their size to the DeepSpeed configuration, where that pays.

    Raises: UserError if the layers are compiled and are no leaf modules of the user's JSON.
    """
    limit, is_compiled = largest(settings, tokens_of(settings)), settings.compile_layers and settings.zero == 3
    if not (limit or is_compiled) or experts.count(config):  # a mixture's would gather experts that no token uses
        return
    layers = load.transformer_layers(load.check_model(settings, config))
    size, names = max(map(_numbers, layers), default=0), sorted({type(layer).__name__ for layer in layers})
    if layers and size <= limit:
        # One more number would gather the first matrix of the layer after the next, and hold both layers for it.
        matrices = max(_numbers(layer, dimensions=2) for layer in layers)
        sizes = map(buffers.bucket_size, (size, matrices))
        _add(settings, names, dict(zip(BUCKETS, sizes, strict=True)), _reason(settings))
        return
    own = json_value(settings.deepspeed, f"{LEAVES}.classes")
    if is_compiled and own is None:
        _add(settings, names, {}, "a compiled layer is gathered whole, before it begins")
    elif is_compiled and not {*names} <= {*own}:
        raise UserError(
            f"--compile_layers: {LEAVES} of the DeepSpeed JSON lacks {' '.join(names)}, and hooks within a compiled "
            "layer lose its gradients; add it, or delete the section."
        )


def _numbers(layer, dimensions: int = 1) -> int:
    """Return the numbers of a layer in tensors of so many dimensions or more; stage 3 keeps vectors on each rank."""
    return sum(p.numel() for p in layer.parameters() if p.ndim >= dimensions)


def _reason(settings) -> str:
    off = "--whole_layers false turns it off"
    if settings.world_size > buffers.WHOLE_ABOVE:
        return f"{settings.world_size} ranks, where fewer calls save more than larger buffers cost; {off}"
    return (
        f"a micro batch of at most {tokens_of(settings):,} tokens, which is computed faster than the hooks around each "
        f"matrix; {off}"
    )


def _add(settings, names: list[str], buckets: dict[str, int], reason: str) -> None:
    added = buckets | {"leaf_module": {"classes": names}}
    settings.deepspeed = merge_json(settings.deepspeed, {"zero_optimization": added})
    of_size = f", buckets of {max(buckets.values()):,} numbers" if buckets else ""
    settings.decisions.append(f"{LEAVES} {' '.join(names)}{of_size}: {reason}")


TECHNIQUE = Technique(name="whole layers", flag="whole_layers", resolve=resolve, resolve_for_model=resolve_for_model)
