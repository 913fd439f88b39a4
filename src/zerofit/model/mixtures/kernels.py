"""Prove that the grouped product of a mixture's experts computes what their own loop does, before it is used."""

import copy
import functools
import inspect
import math

import torch

from zerofit.base.errors import UserError
from zerofit.model import load, prove
from zerofit.model.mixtures import weights

# Of the error of outputs and gradients, a share of their norm, against the loop in fp32.
BOUNDS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
EXPERTS, SELECTED, TOKENS = 4, 2, 64  # of the comparison; the widths are the model's

FLAG = "experts_implementation"


def prove_grouped(settings, config) -> None:
    """Compare the experts' kernel with their loop, on this device and for the model's widths. Collective.

    Args: config: the model's. Raises: UserError for a kernel that computes something else.
    """
    asked = settings.experts_implementation
    if asked == "eager" or not weights.count(config):
        return
    model = load.check_model(settings, copy.deepcopy(config))
    module = next((module for module in model.modules() if hasattr(module, "is_concatenated")), None)
    if module is None:
        return
    name = "grouped_mm" if asked == "auto" else asked
    device = torch.device("cpu" if settings.use_cpu else "cuda")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision, torch.float32)
    why = prove.problem(functools.partial(difference, module, name, dtype, device), f"--{FLAG} {name}", "use eager")
    if why is None:
        settings.decisions.append(f"{FLAG} {name}: computes here what the experts' own loop does, with gradients")
    else:
        raise UserError(f"--{FLAG} {asked}: {why}; use --{FLAG} eager.")


def difference(module, name: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return what is wrong with a kernel's numbers; None if nothing is. One of the experts gets no token.

    Args: module: experts of a layer, of which class and configuration are used; name: of the kernel.
    """
    loop = _of_few(module, device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for weight in loop.parameters():
            weight.normal_(0, 1 / math.sqrt(weight.shape[-1]), generator=generator)
    first = loop.gate_up_proj if loop.has_gate else loop.up_proj
    width = first.shape[1 if loop.is_transposed else 2]
    hidden = torch.randn(TOKENS, width, generator=generator, device=device)
    shares = torch.rand(TOKENS, SELECTED, generator=generator, device=device)
    scores = torch.rand(TOKENS, EXPERTS - 1, generator=generator, device=device)
    chosen = scores.topk(SELECTED, dim=-1).indices
    expected = _computed(loop, hidden, chosen, shares)
    loop.config._experts_implementation = name
    found = _computed(loop.to(dtype), hidden.to(dtype), chosen, shares.to(dtype))
    errors = [((x.float() - y).norm() / y.norm().clamp(min=1e-30)).item() for x, y in zip(found, expected, strict=True)]
    if not max(errors) <= BOUNDS[dtype]:
        return f"{name} is {max(errors):.1%} off the experts' own loop on this device (bound {BOUNDS[dtype]:.1%})"
    return None


def _of_few(module, device: torch.device):
    """Return experts of the same class and widths, but few of them, that compute by their own loop."""
    config = copy.deepcopy(module.config)
    for field in weights.COUNT:
        if isinstance(getattr(config, field, None), int):
            setattr(config, field, EXPERTS)
    config._experts_implementation = "eager"
    own = {}
    if "intermediate_size" in inspect.signature(type(module)).parameters:  # ERNIE-VL: another one for images
        own["intermediate_size"] = module.intermediate_dim
    with device:
        return type(module)(config, **own)


def _computed(module, hidden, chosen, shares) -> list[torch.Tensor]:
    """Return outputs and gradients of the experts, of the input, the router's shares and all weights."""
    hidden, shares = hidden.clone().requires_grad_(), shares.clone().requires_grad_()
    out = module(hidden, chosen, shares)
    found = torch.autograd.grad(out.float().square().sum(), [hidden, shares, *module.parameters()])
    return [out.detach(), *found]
