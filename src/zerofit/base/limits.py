"""Thresholds for communication and buffers, shared by training and plans."""

import sys

# Most data-parallel ranks for which stages 1 and 2 reduce gradients to their owners. NCCL reduces along a chain. By its
# cost model, the latency of the chain outweighs the saved bytes from about 100 GPUs (docs/speed.md).
MAX_REDUCE_RANKS = 64

# Above this number of ranks stage 3 exchanges full layers: the latency of the ring exceeds the time for the bytes of
# a matrix (plan/formulas.py).
FULL_LAYERS_ABOVE_RANKS = 128

# Tokens per micro batch times parameters per layer, below which the host's hooks take longer than the GPU's work:
# 3,072 tokens of Llama-3 8B, whose layers have 218 million parameters.
SHORT_STEP_TOKEN_WEIGHTS = 3072 * 218_112_000

# Most parameters of a layer that is exchanged in full for a short micro batch. Its gradients, its bucket and their
# copy take up to 1.5 GB more on each GPU in 16 bits.
MAX_FULL_LAYER = 250_000_000

ANY_SIZE = sys.maxsize  # no limit on the parameters per layer

LARGE_VOCABULARY = 8_000  # from this size the head dominates the step, and the loss is computed in chunks

MAX_BUCKET = 5e8  # elements; DeepSpeed's default


def bucket_size(largest_layer: int) -> int:
    """Return the elements of a bucket that holds full layers. largest_layer: its parameters."""
    return int(min(largest_layer, MAX_BUCKET))


def max_full_layer(tokens: int, ranks: int, offload: str) -> int:
    """Return the most parameters of a layer that stage 3 exchanges in full; 0 to exchange single parameters.

    Args: tokens: per micro batch on one rank; offload: none, optimizer or all (the GPU has no memory to spare).
    """
    if ranks > FULL_LAYERS_ABOVE_RANKS:
        return ANY_SIZE
    return 0 if offload == "all" else min(MAX_FULL_LAYER, SHORT_STEP_TOKEN_WEIGHTS // max(1, tokens))
