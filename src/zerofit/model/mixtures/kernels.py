"""Self-test the grouped product of a mixture's experts against their loop, before it is used."""

import copy
import functools
import inspect
import math

import torch

from zerofit.base.errors import UserError
from zerofit.model import load, self_test
from zerofit.model.mixtures import weights

# Bounds of the relative errors of outputs and gradients, compared with the loop in fp32.
BOUNDS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
EXPERTS, SELECTED, TOKENS = 4, 2, 64  # sizes of the comparison; the widths are the model's

FLAG = "experts_implementation"


def self_test_grouped(settings, config) -> None:
    """Compare the experts' kernel with their loop, on this device and for the model's widths. Collective.

    Args: config: the model's. Raises: UserError for a kernel whose results differ.
    """
    implementation = settings.experts_implementation
    if implementation == "eager" or not weights.count(config):
        return
    model = load.check_model(settings, copy.deepcopy(config))
    module = next((module for module in model.modules() if hasattr(module, "is_concatenated")), None)
    if module is None:
        return
    name = "grouped_mm" if implementation == "auto" else implementation
    device = torch.device("cpu" if settings.use_cpu else "cuda")
    dtype = load.DTYPES[settings.compute_dtype]
    why = self_test.run(functools.partial(difference, module, name, dtype, device), f"--{FLAG} {name}", "use eager")
    if why is None:
        settings.decisions.append(f"{FLAG} {name}: matches the experts' loop on this device, with gradients")
    else:
        raise UserError(f"--{FLAG} {implementation}: {why}; use --{FLAG} eager.")


def difference(module, name: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the failure of a kernel, or None. One of the experts gets no token.

    Args: module: the experts of a layer, whose class and configuration are used; name: the kernel's name.
    """
    loop = _smaller(module, device)
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
    results = _computed(loop.to(dtype), hidden.to(dtype), chosen, shares.to(dtype))
    pairs = zip(results, expected, strict=True)
    error = max(((x.float() - y).norm() / y.norm().clamp(min=1e-30)).item() for x, y in pairs)
    if not error <= BOUNDS[dtype]:
        return f"{name} differs from the experts' loop by {error:.1%} on this device (bound {BOUNDS[dtype]:.1%})"
    return None


def _smaller(module, device: torch.device):
    """Return a module of the same class and widths with fewer experts, computed by their loop."""
    config = copy.deepcopy(module.config)
    for field in weights.COUNT:
        if isinstance(getattr(config, field, None), int):
            setattr(config, field, EXPERTS)
    config._experts_implementation = "eager"
    extra = {}
    if "intermediate_size" in inspect.signature(type(module)).parameters:  # ERNIE-VL: the size differs for images
        extra["intermediate_size"] = module.intermediate_dim
    with device:
        return type(module)(config, **extra)


def _computed(module, hidden, chosen, shares) -> list[torch.Tensor]:
    """Return the outputs and the gradients of the input, the router's shares and all weights."""
    hidden, shares = hidden.clone().requires_grad_(), shares.clone().requires_grad_()
    out = module(hidden, chosen, shares)
    gradients = torch.autograd.grad(out.float().square().sum(), [hidden, shares, *module.parameters()])
    return [out.detach(), *gradients]
