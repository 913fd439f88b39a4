"""Accumulate LoRA's product into the output of its linear layer, in one kernel.

peft computes result + B(A(x)) * scaling with three passes over each output, and a fourth for a packed base, whose
output it clones. Here B's product accumulates, scaled, into the output, and the backward applies the scaling to rows of
only r numbers.
"""

import functools

import torch
from peft.tuners.lora import LoraLayer
from torch.autograd.function import once_differentiable

from zerofit.job.technique import Technique


class AddScaledProduct(torch.autograd.Function):
    """result + scaling * hidden @ weight.T, with shapes (..., n), (..., r) and (n, r)."""

    @staticmethod
    def forward(ctx, result, hidden, weight, scaling: float, in_place: bool):
        rows, b = hidden.reshape(-1, hidden.shape[-1]).to(result.dtype), weight.to(result.dtype)
        ctx.save_for_backward(hidden, weight)
        ctx.scaling = scaling
        if in_place:
            result.view(-1, result.shape[-1]).addmm_(rows, b.t(), alpha=scaling)
            ctx.mark_dirty(result)
            return result
        flat = result.reshape(-1, result.shape[-1])
        return torch.addmm(flat, rows, b.t(), alpha=scaling).view(result.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        rows, upstream = hidden.reshape(-1, hidden.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        d_hidden = d_weight = None
        if ctx.needs_input_grad[1]:
            d_hidden = (upstream @ weight.to(gradient.dtype)).mul_(ctx.scaling).view(hidden.shape).to(hidden.dtype)
        if ctx.needs_input_grad[2]:
            d_weight = (upstream.t() @ rows.to(gradient.dtype)).to(weight.dtype).mul_(ctx.scaling)
        return gradient, d_hidden, d_weight, None, None


def _add(linear, in_place: bool, hidden, result=None, scaling: float = 1.0):
    """Forward of LoRA's B: unchanged without a result, else accumulate into the output of the base layer.

    It remains a module call, whose hooks gather the weight at ZeRO-3.
    """
    if result is None:
        return type(linear).forward(linear, hidden)
    return AddScaledProduct.apply(result, hidden, linear.weight, scaling, in_place)


def _forward(layer, x, *args, **kwargs):
    """Forward of peft's LoRA layer for a single active, unmerged adapter without dropout or variant."""
    adapters = layer.active_adapters
    if layer.disable_adapters or layer.merged or kwargs or len(adapters) != 1 or not _is_plain(layer, adapters[0]):
        return type(layer).forward(layer, x, *args, **kwargs)
    result, name = layer.base_layer(x, *args), adapters[0]
    a, cast = layer.lora_A[name], getattr(layer, "cast_input_dtype_enabled", True)
    hidden = a(x.to(a.weight.dtype) if cast and not torch.is_autocast_enabled(x.device.type) else x)
    return layer.lora_B[name](hidden, result, layer.scaling[name])


def _is_plain(layer, name: str) -> bool:
    dropout, b = layer.lora_dropout[name], layer.lora_B[name]
    return isinstance(dropout, torch.nn.Identity) and name not in layer.lora_variant and b.bias is None


def install(settings, model) -> None:
    """Fuse the LoRA of the model's linear layers, including packed ones.

    It works in place unless the output is a view (with a bias, at ZeRO-3 because of its hooks, with --fp8) or is kept
    by selective checkpointing.
    """
    if settings.values.get("adapter") != "lora" or not settings.fused_lora:
        return

    kept = settings.gradient_checkpointing_policy == "selective" or settings.fp8
    in_place = settings.zero != 3 and not kept
    for layer in model.modules():
        # Packed layers are subclasses of torch.nn.Linear.
        if not isinstance(layer, LoraLayer) or not isinstance(layer.get_base_layer(), torch.nn.Linear):
            continue
        layer.forward = functools.partial(_forward, layer)
        for b in layer.lora_B.values():
            b.forward = functools.partial(_add, b, in_place and layer.get_base_layer().bias is None)


TECHNIQUE = Technique(name="fused LoRA", install=install)
