"""Use FlashAttention 3 on Hopper GPUs if its results match FlashAttention 2."""

import functools
import itertools
import math
from importlib.util import find_spec

import torch

from zerofit.base import distributed
from zerofit.job.technique import Technique
from zerofit.model import attention, load, self_test

MODULE = "flash_attn_interface"  # the module that torch imports for it

DOCUMENTS = (40, 216, 128)  # tokens of the self-test's documents

# Bounds of the relative errors: rounding of both kernels, each below 0.005 in bf16.
BOUNDS = {torch.bfloat16: 0.02, torch.float16: 0.004}


def self_test_kernel(settings, config) -> None:
    """Replace FlashAttention 2, the varlen kernel, by FlashAttention 3 on Hopper if it passes a self-test. Collective.

    torch 2.13 has the switch (activate_flash_attention_impl); the kernels are a separate package. On a Hopper GPU a
    decision names the kernel. --sp_size calls the same kernel with a part of the heads.
    Args: config: the model's.
    """
    dtype = load.DTYPES[settings.compute_dtype]
    has_kernel = settings.attn_implementation == attention.NAME or settings.sp_size > 1
    if settings.use_cpu or not has_kernel or dtype == torch.float32:
        return
    hopper = distributed.all_gather(torch.cuda.get_device_capability()[0] == 9)
    if not any(hopper):
        return
    why = next(filter(None, distributed.all_gather(_is_missing(settings))), None)
    if not all(hopper):
        why = f"FlashAttention 3 needs Hopper GPUs, and {hopper.count(False)} of {len(hopper)} GPUs are not Hopper"
    if why is None:
        text, device = config.get_text_config(), torch.device("cuda")
        compare = functools.partial(_problem, text, dtype, device, settings.sp_size)
        why = self_test.run(compare, MODULE, "uninstall it")
        if why is None:
            torch.nn.attention.activate_flash_attention_impl("FA3")
    name = "FlashAttention 3, which passed its self-test against FlashAttention 2 (off: uninstall its package)"
    settings.decisions.append(f"attention by {name}" if why is None else f"attention by FlashAttention 2: {why}")


def _is_missing(settings) -> str | None:
    """Return why this rank cannot use FlashAttention 3, or None."""
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        return f"torch {torch.__version__} does not support FlashAttention 3"
    if find_spec(MODULE) is None:
        return f"{MODULE} of FlashAttention 3 is not installed; it is faster, especially for long rows"
    if settings.full_determinism:
        return "--full_determinism"
    return None


def _problem(text, dtype: torch.dtype, device: torch.device, ranks: int) -> str | None:
    """Return the failure of FlashAttention 3 for the model's heads and windows, or None.

    FlashAttention 2 is active afterwards.
    Args: ranks: the number of ranks that share the heads (--sp_size).
    """
    heads = text.num_attention_heads
    sizes = {size for size in attention.head_dims(text) if attention.varlen_takes(size)}
    if sizes != {getattr(text, "v_head_dim", size) for size in sizes}:
        return "FlashAttention 3 is not tested with values narrower than keys"
    kv_heads = math.lcm(getattr(text, "num_key_value_heads", None) or heads, ranks)  # --sp_size repeats them
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
            return "documents in one row attend to each other with FlashAttention 3"
        errors = [((x - y).norm() / y.norm()).item() for x, y in zip(outputs, expected, strict=True)]
        if not max(errors) <= BOUNDS[dtype]:
            return f"FlashAttention 3 differs from it by {max(errors):.1%} (bound {BOUNDS[dtype]:.1%})"
    return None


def _attended(heads: int, kv_heads: int, size: int, window: int, dtype: torch.dtype, device) -> tuple[list, float]:
    """Return outputs and gradients of the varlen kernel for random documents, in fp32, and the leak between documents.

    The leak is the largest gradient of the middle document's output by the tokens of the others: 0 if isolated.
    """
    tokens, generator = sum(DOCUMENTS), torch.Generator(device).manual_seed(0)
    draws = [torch.randn(1, n, tokens, size, generator=generator, device=device) for n in (heads, kv_heads, kv_heads)]
    inputs = [x.to(dtype).requires_grad_() for x in draws]
    bounds = torch.tensor([0, *itertools.accumulate(DOCUMENTS)], dtype=torch.int32, device=device)
    out = attention.varlen(*inputs, bounds, max(DOCUMENTS), window, None)
    gradients = torch.autograd.grad(out.float().square().sum(), inputs, retain_graph=True)
    start, end = DOCUMENTS[0], DOCUMENTS[0] + DOCUMENTS[1]
    by_middle = torch.autograd.grad(out[:, start:end].float().square().sum(), inputs)
    leak = max(torch.cat([x[:, :, :start], x[:, :, end:]], 2).abs().max().item() for x in by_middle)
    return [x.detach().float() for x in (out, *gradients)], leak


TECHNIQUE = Technique(name="FlashAttention 3", self_test=self_test_kernel)
