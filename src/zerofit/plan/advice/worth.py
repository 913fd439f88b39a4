"""Hold what --method auto decides by, for the search and for the quick answer."""

# How many times as long as the fastest method a step may take, of the first method (all weights) and of the others but
# the last (an adapter on whole weights). LoRA saves a third of the products, and half of them where it needs no
# recomputation: up to that, full fine-tuning is as fast as it can be. LoRA has no rounding of the base.
WORTH_FIRST, WORTH_NEXT = 2.0, 1.25

# GiB of host memory for each GiB of a node's GPUs that --method auto counts on where HOST_MEMORY is not known. Nodes of
# clouds have 2.1 (one A100) to 4, a workstation with a 24-GB card 64 GB.
HOST_OF_GPU = 2.0


def worth(place: int, methods: int, takes_adapters: bool) -> float:
    """Return how many times as long as the fastest a method may take. place: of `methods` in order of preference."""
    if place == methods - 1:
        return float("inf")
    return WORTH_NEXT if takes_adapters else WORTH_FIRST


def most(seconds: float, times: float, offload: str) -> float:
    """Return the seconds up to which a setting is preferred. seconds: of the fastest; times: `worth` of its method.

    With the weights in host memory it must be as fast as the fastest: each micro batch waits for links whose speeds no
    measurement has confirmed, and smaller batches wait longer.
    """
    return seconds if offload == "all" else times * seconds


def host_bytes(gpu_bytes: float, gpus: int) -> int:
    """Return the bytes of a node's host memory that are counted on. gpus: of the job on a node."""
    return int(HOST_OF_GPU * gpu_bytes * gpus)
