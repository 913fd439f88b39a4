"""Exchange complete decoder layers at ZeRO-3: for short micro batches, many ranks or compiled layers.

transformers' "auto" sets buckets of hidden_size^2 numbers, which means separate calls for each matrix of a layer, and
DeepSpeed runs hooks around each module. A decoder layer that is a leaf module (zero_optimization.leaf_module) is
gathered in one call, with the hooks of one module, and reduced in a bucket of its size (docs/parallelism.md).
"""

from zerofit.base import limits
from zerofit.base.errors import UserError
from zerofit.job.settings import decide, json_value, merge_json
from zerofit.job.technique import Technique
from zerofit.model import experts, load

BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size")

LEAVES = "zero_optimization.leaf_module"


def largest(settings, tokens: int) -> int:
    """Return the largest size in numbers of a dense layer to exchange in one call; 0 for none.

    0 for adapters and frozen weights: on leaf modules with frozen weights DeepSpeed 0.19.8 fails an assertion in
    stage3.py with gradient checkpointing. Offload of parameters indicates short GPU memory.
    Args: settings: may be unresolved for the model; tokens: tokens of a micro batch on one rank.
    """
    is_partly_frozen = settings.trains_adapter or settings.freeze or settings.train_only
    if settings.zero != 3 or is_partly_frozen or not settings.whole_layers:
        return 0
    return limits.max_full_layer(tokens, settings.world_size, settings.offload)


def resolve(settings) -> None:
    """Turn it off if the DeepSpeed JSON sets leaf modules or buckets, or keeps parameters on a disk.

    DeepSpeed's buffers for parameters on a disk hold only a few matrices.
    """
    if settings.zero == 3 and settings.whole_layers and not _is_open(settings.deepspeed["zero_optimization"]):
        typed = settings.source["whole_layers"] not in ("default", "transformers default")
        why = "the DeepSpeed JSON sets leaf modules or buckets, or keeps parameters on a disk" if typed else ""
        decide(settings, "whole_layers", False, why)


def _is_open(section: dict) -> bool:
    has_modules = any(key in section for key in ("leaf_module", "stage3_module_granularity_threshold"))
    on_disk = json_value(section, "offload_param.device") == "nvme"
    return all(section.get(key) == "auto" for key in BUCKETS) and not has_modules and not on_disk


def tokens_of(settings) -> int:
    """Return the maximum number of tokens of a micro batch on one rank."""
    rows = settings.per_device_train_batch_size * settings.objective.documents
    return rows * settings.max_length // settings.parallel_size("tokens")


def resolve_for_model(settings, config) -> None:
    """Add the layers' class and buckets of their size to the DeepSpeed configuration if that is faster.

    Raises: UserError if the layers are compiled and the user's JSON lacks them as leaf modules.
    """
    limit, is_compiled = largest(settings, tokens_of(settings)), settings.compile_layers and settings.zero == 3
    if not (limit or is_compiled) or experts.count(config):  # would gather unused experts
        return
    layers = load.transformer_layers(load.check_model(settings, config))
    size, names = max(map(_numbers, layers), default=0), sorted({type(layer).__name__ for layer in layers})
    if layers and size <= limit:
        # A larger bucket would also gather the first matrix of the layer after the next, and hold both layers.
        matrices = max(_numbers(layer, dimensions=2) for layer in layers)
        sizes = map(limits.bucket_size, (size, matrices))
        _add(settings, names, dict(zip(BUCKETS, sizes, strict=True)), _reason(settings))
        return
    classes = json_value(settings.deepspeed, f"{LEAVES}.classes")
    if is_compiled and classes is None:
        _add(settings, names, {}, "a compiled layer is gathered in one call, before its forward")
    elif is_compiled and not {*names} <= {*classes}:
        raise UserError(
            f"--compile_layers: {LEAVES} of the DeepSpeed JSON lacks {' '.join(names)}, and hooks within a compiled "
            "layer lose its gradients; add it, or delete the section."
        )


def _numbers(layer, dimensions: int = 1) -> int:
    """Return the numbers of a layer in tensors with at least `dimensions`; stage 3 keeps vectors on each rank."""
    return sum(p.numel() for p in layer.parameters() if p.ndim >= dimensions)


def _reason(settings) -> str:
    off = "--whole_layers false turns it off"
    if settings.world_size > limits.FULL_LAYERS_ABOVE_RANKS:
        return f"with {settings.world_size} ranks fewer calls save more time than larger buffers cost; {off}"
    return (
        f"computing a micro batch of at most {tokens_of(settings):,} tokens takes less time than the hooks around each "
        f"matrix; {off}"
    )


def _add(settings, names: list[str], buckets: dict[str, int], reason: str) -> None:
    added = buckets | {"leaf_module": {"classes": names}}
    settings.deepspeed = merge_json(settings.deepspeed, {"zero_optimization": added})
    bucket_text = f", buckets of {max(buckets.values()):,} numbers" if buckets else ""
    settings.decisions.append(f"{LEAVES} {' '.join(names)}{bucket_text}: {reason}")


TECHNIQUE = Technique(name="layer exchange", flag="whole_layers", resolve=resolve, resolve_for_model=resolve_for_model)
