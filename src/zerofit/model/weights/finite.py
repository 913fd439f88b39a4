"""Refuse a base whose weights hold NaN or Inf: else the learning rate would be blamed after the first step."""

import torch

from zerofit.base import distributed
from zerofit.base.errors import UserError

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # aminmax has no 8-bit floats


@torch.no_grad()
def check(weights: dict, place: str, of: str = "the base") -> None:
    """Raise UserError if a weight of any rank is not finite; collective. One pass, and one wait for the GPU.

    A rank of ZeRO-3 looks at its own part of each parameter.
    Args: weights: name -> parameter; place: what named the model, and of: what holds them, for the message.
    """
    parts = {name: part for name, parameter in weights.items() for part in _numbers(parameter)}
    bad = None
    if parts:
        # The least and the greatest are NaN where one number is; no copy of the weights is made.
        bounds = [torch.stack(torch.aminmax(part)).float() for part in parts.values()]
        finite = torch.stack(bounds).isfinite().all(1).tolist()
        bad = next((name for name, is_finite in zip(parts, finite, strict=True) if not is_finite), None)
    damaged = sorted(name for name in distributed.all_gather(bad) if name)
    if damaged:
        part = parts.get(damaged[0])
        count = f" ({int((~part.isfinite()).sum()):,} numbers)" if part is not None and bad == damaged[0] else ""
        raise UserError(
            f"{place}: {damaged[0]} of {of} holds NaN or Inf{count}, so losses would be NaN; the file is damaged "
            "or was saved by a run that diverged: take another copy."
        )


def _numbers(parameter) -> list[torch.Tensor]:
    """Return what this rank holds of a parameter, without ZeRO-3's padding; of packed weights, their scales."""
    if (state := getattr(parameter, "quant_state", None)) is not None:
        scales = [state.state2.absmax, state.offset] if state.nested else [state.absmax]
        return [scale for scale in scales if scale is not None and scale.is_floating_point()][:1]
    if (scales := getattr(parameter, "SCB", None)) is not None:
        return [scales]
    part = parameter
    if (shard := getattr(parameter, "ds_tensor", None)) is not None:
        if getattr(shard, "final_location", None) == "nvme" or not shard.numel():  # its numbers are not in memory
            return []
        begins = torch.distributed.get_rank(parameter.ds_process_group) * shard.numel()
        part = shard.flatten()[: max(0, parameter.ds_numel - begins)]
    return [part] if part.numel() and part.dtype in TYPES else []
