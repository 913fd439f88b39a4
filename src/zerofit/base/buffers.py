"""Sizes of buffers of the kit and of DeepSpeed, which plans count too."""

import sys

# Data-parallel ranks up to which stages 1 and 2 reduce gradients to their owners. NCCL reduces along a chain of them,
# whose latency outweighs the saved bytes from about 100 GPUs on, by its cost model (docs/notes/speed_techniques.md).
REDUCE_UP_TO = 64

# Ranks above which stage 3 exchanges layers whole; a ring over more takes longer than the bytes of a matrix
# (plan/formulas.py).
WHOLE_ABOVE = 128

# Tokens of a micro batch times numbers of a layer: where the host runs hooks for longer than the GPU computes. 3,072
# tokens of Llama-3 8B, whose layers have 218 million numbers.
SHORT = 3072 * 218_112_000

# Numbers of a layer that is exchanged whole for a short micro batch. Its gradients, its bucket and their copy are on
# each GPU beside what the matrices need: in 16 bits up to 1.5 GB.
LARGEST_WHOLE = 250_000_000

ANY = sys.maxsize  # numbers of a layer of any size

LARGE_VOCABULARY = 8_000  # from here on the head is a large part of the step, and the loss is computed in chunks

LARGEST_BUCKET = 5e8  # numbers; DeepSpeed's own default


def bucket_size(largest_layer: int) -> int:
    """Return the numbers of a bucket of whole layers. largest_layer: parameters of it."""
    return int(min(largest_layer, LARGEST_BUCKET))


def whole_layers_up_to(tokens: int, ranks: int, offload: str) -> int:
    """Return up to how many numbers a layer has that stage 3 exchanges whole; 0: none is.

    Args: tokens: of a micro batch on one rank; offload: none, optimizer or all: parameters in host memory leave a GPU
        that is short of it.
    """
    if ranks > WHOLE_ABOVE:
        return ANY
    return 0 if offload == "all" else min(LARGEST_WHOLE, SHORT // max(1, tokens))
