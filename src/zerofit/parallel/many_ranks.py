"""Exchange whole layers in one call, at ZeRO-3 on many ranks, where the latency of a call outweighs its bytes.

transformers' "auto" makes buckets of hidden_size^2 numbers, so that each matrix of a layer has calls of its own. A
decoder layer that is a leaf module is gathered at once, and a bucket of its size is reduced at once: less than a
third of the calls (docs/scaling.md).
"""

from zerofit.job.settings import merge_json
from zerofit.job.technique import Technique
from zerofit.model import experts, load

ABOVE = 128  # ranks; a ring over more takes longer than the bytes of a matrix (plan/formulas.py)

LARGEST_BUCKET = 5e8  # numbers; DeepSpeed's own default

BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size")


def applies(settings) -> bool:
    """Return whether a job with a dense model exchanges whole layers: its JSON leaves the buckets and leaves open.

    Not for an adapter: DeepSpeed 0.19.8 fails an assertion of stage3.py on leaf modules with frozen weights under
    gradient checkpointing.
    """
    if settings.zero != 3 or settings.world_size <= ABOVE or settings.trains_adapter:
        return False
    section = settings.deepspeed["zero_optimization"]
    keys = ("leaf_module", "stage3_module_granularity_threshold")
    return all(section.get(key) == "auto" for key in BUCKETS) and not any(key in section for key in keys)


def bucket_size(largest_layer: int) -> int:
    """Return the numbers of a bucket. largest_layer: parameters of it."""
    return int(min(largest_layer, LARGEST_BUCKET))


def resolve_for_model(settings, config) -> None:
    """Add the layers' class and buckets of their size to the DeepSpeed configuration."""
    if not applies(settings) or experts.count(config):  # a mixture's layer would gather experts that no token uses
        return
    layers = load.transformer_layers(load.check_model(settings, config))
    if not layers:
        return
    size = bucket_size(max(sum(p.numel() for p in layer.parameters()) for layer in layers))
    names = sorted({type(layer).__name__ for layer in layers})
    added = dict.fromkeys(BUCKETS, size) | {"leaf_module": {"classes": names}}
    settings.deepspeed = merge_json(settings.deepspeed, {"zero_optimization": added})
    settings.decisions.append(
        f"zero_optimization.leaf_module {' '.join(names)}, buckets of {size:,} numbers: {settings.world_size} ranks, "
        "where fewer calls save more than larger buffers cost; values in a --deepspeed JSON turn it off"
    )


TECHNIQUE = Technique(name="whole layers on many ranks", resolve_for_model=resolve_for_model)
