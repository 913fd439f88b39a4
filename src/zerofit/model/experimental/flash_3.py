"""Use FlashAttention 3 on Hopper GPUs where it computes what FlashAttention 2 does."""

import functools
import itertools
import math
from importlib.util import find_spec

import torch

from zerofit.base import distributed
from zerofit.job.technique import Technique
from zerofit.model import attention
from zerofit.model import prove as proofs

MODULE = "flash_attn_interface"  # what torch's switch imports

DOCUMENTS = (40, 216, 128)  # tokens of the self-test's documents

# Of the relative errors: its rounding and that of FlashAttention 2, each below 0.005 in bf16.
BOUNDS = {torch.bfloat16: 0.02, torch.float16: 0.004}


def prove(settings, config) -> None:
    """Replace the varlen kernel, FlashAttention 2, by FlashAttention 3 on Hopper, if it computes the same. Collective.

    torch 2.13 has the switch (activate_flash_attention_impl); the kernels are a package of their own. A line among the
    decisions says which of the two it is, on a Hopper GPU. --sp_size calls the same kernel, with a part of the heads.
    Args: config: the model's.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision)
    has_kernel = settings.attn_implementation == attention.NAME or settings.sp_size > 1
    if settings.use_cpu or not has_kernel or dtype is None:
        return
    hopper = distributed.all_gather(torch.cuda.get_device_capability()[0] == 9)
    if not any(hopper):
        return
    why = next(filter(None, distributed.all_gather(_is_missing(settings))), None)
    if not all(hopper):
        why = f"FlashAttention 3 is for Hopper GPUs only, which {hopper.count(False)} of the {len(hopper)} are not"
    if why is None:
        text, device = config.get_text_config(), torch.device("cuda")
        find = functools.partial(_problem, text, dtype, device, settings.sp_size)
        why = proofs.problem(find, MODULE, "uninstall it")
        if why is None:
            torch.nn.attention.activate_flash_attention_impl("FA3")
    name = "FlashAttention 3, which computes here what FlashAttention 2 does (off: uninstall its package)"
    settings.decisions.append(f"attention by {name}" if why is None else f"attention by FlashAttention 2: {why}")


def _is_missing(settings) -> str | None:
    """Return why this rank cannot have FlashAttention 3; None if it can."""
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return f"torch {torch.__version__} has no switch to FlashAttention 3"
    if find_spec(MODULE) is None:
        return f"{MODULE} of FlashAttention 3 is not installed, which is faster, the more the longer the rows"
    if settings.full_determinism:
        return "--full_determinism"
    return None


def _problem(text, dtype: torch.dtype, device: torch.device, ranks: int) -> str | None:
    """Return what is wrong with FlashAttention 3's numbers for the model's heads and windows; None if nothing is.

    Leaves FlashAttention 2 on.
    Args: ranks: among which --sp_size divides the heads.
    """
    heads = text.num_attention_heads
    sizes = {size for size in attention.head_dims(text) if attention.varlen_takes(size)}
    if sizes != {getattr(text, "v_head_dim", size) for size in sizes}:
        return "FlashAttention 3 is not tested with values narrower than keys"
    kv_heads = math.lcm(getattr(text, "num_key_value_heads", None) or heads, ranks)  # repeated to as many
    windows = {0, getattr(text, "sliding_window", None) or 0}
    for size, window in itertools.product(sorted(sizes), sorted(windows)):
        shape = (heads // ranks, kv_heads // ranks, size, window)
        expected, _ = _attended(*shape, dtype, device)
        torch.nn.attention.activate_flash_attention_impl("FA3")
        try:
            outputs, leak = _attended(*shape, dtype, device)
        finally:
            torch.nn.attention.restore_flash_attention_impl()
        if leak > 0:
            return "documents in one row read each other with FlashAttention 3"
        errors = [((x - y).norm() / y.norm()).item() for x, y in zip(outputs, expected, strict=True)]
        if not max(errors) <= BOUNDS[dtype]:
            return f"FlashAttention 3 is {max(errors):.1%} off it (bound {BOUNDS[dtype]:.1%})"
    return None


def _attended(heads: int, kv_heads: int, size: int, window: int, dtype: torch.dtype, device) -> tuple[list, float]:
    """Return outputs and gradients of the varlen kernel for random documents, fp32, and the middle one's effect.

    That is the largest gradient of the middle document's output by the tokens of the others: 0 if they are apart.
    """
    tokens, generator = sum(DOCUMENTS), torch.Generator(device).manual_seed(0)
    draws = [torch.randn(1, n, tokens, size, generator=generator, device=device) for n in (heads, kv_heads, kv_heads)]
    inputs = [x.to(dtype).requires_grad_() for x in draws]
    bounds = torch.tensor([0, *itertools.accumulate(DOCUMENTS)], dtype=torch.int32, device=device)
    out = attention.varlen(*inputs, bounds, max(DOCUMENTS), window, None)
    gradients = torch.autograd.grad(out.float().square().sum(), inputs, retain_graph=True)
    start, end = DOCUMENTS[0], DOCUMENTS[0] + DOCUMENTS[1]
    of_middle = torch.autograd.grad(out[:, start:end].float().square().sum(), inputs)
    leak = max(torch.cat([x[:, :, :start], x[:, :, end:]], 2).abs().max().item() for x in of_middle)
    return [x.detach().float() for x in (out, *gradients)], leak


TECHNIQUE = Technique(name="FlashAttention 3", self_test=prove)
