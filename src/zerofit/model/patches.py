"""Patches of libraries on the training path, each with the library's version and the reason.

A test fails when one is no longer needed. (The simulation's own are in ghost.py, in a process of its own.)
"""


def release_gathered_4bit_weights() -> None:
    """Have bitsandbytes (0.50.2) keep a ZeRO-3 parameter for the backward, not a view of its gathered data.

    `MatMul4Bit` keeps `weight.view(-1, 1)` as an attribute, whose storage is the gathered weight. DeepSpeed empties the
    parameter after the layer, but that storage stays until the backward is over, checkpointing or not: the base of all
    layers, whole, on every rank. A parameter that is kept by itself is gathered again before the backward needs it.
    """
    import bitsandbytes
    import torch

    plain = bitsandbytes.matmul_4bit
    if plain.__name__ == "matmul_gathered_4bit":
        return

    class Product(torch.autograd.Function):
        """x (..., K) times the packed weight of an (N, K) matrix, plus bias (N)."""

        @staticmethod
        def forward(ctx, x, weight, bias, quant_state):
            ctx.weight, ctx.quant_state = weight, quant_state
            return plain(x, weight, bias=bias, quant_state=quant_state)

        @staticmethod
        def backward(ctx, gradient):
            weight = bitsandbytes.functional.dequantize_4bit(ctx.weight.data, ctx.quant_state).to(gradient.dtype)
            of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
            return torch.matmul(gradient, weight), None, of_bias, None

    def matmul_gathered_4bit(A, B, quant_state, out=None, bias=None):
        if not hasattr(B, "ds_id") or out is not None:
            return plain(A, B, quant_state=quant_state, out=out, bias=bias)
        return Product.apply(A, B, bias, quant_state)

    bitsandbytes.matmul_4bit = matmul_gathered_4bit
