"""Reject a base with NaN or Inf in its weights, which would look like a diverged first step."""

import torch

from zerofit.base import distributed
from zerofit.base.errors import UserError

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # dtypes that aminmax supports


@torch.no_grad()
def check(weights: dict, place: str, of: str = "the base") -> None:
    """Raise UserError if a weight of any rank is not finite. Collective; one pass, and one wait for the GPU.

    Under ZeRO-3 a rank checks its part of each parameter.
    Args: weights: name -> parameter; place: the flag and the model, of: the file or model, both for messages.
    """
    parts = {name: part for name, parameter in weights.items() for part in _numbers(parameter)}
    bad = None
    if parts:
        # Minimum and maximum are NaN if any number is NaN; the weights are not copied.
        bounds = [torch.stack(torch.aminmax(part)).float() for part in parts.values()]
        finite = torch.stack(bounds).isfinite().all(1).tolist()
        bad = next((name for name, is_finite in zip(parts, finite, strict=True) if not is_finite), None)
    damaged = sorted(name for name in distributed.all_gather(bad) if name)
    if damaged:
        part = parts.get(damaged[0])
        count = f" ({int((~part.isfinite()).sum()):,} numbers)" if part is not None and bad == damaged[0] else ""
        raise UserError(
            f"{place}: {damaged[0]} of {of} holds NaN or Inf{count}, so losses would be NaN; the file is damaged "
            "or was saved by a run that diverged. Use another copy."
        )


def _numbers(parameter) -> list[torch.Tensor]:
    """Return this rank's part of a parameter, without ZeRO-3's padding, or the scales of a packed weight."""
    if (state := getattr(parameter, "quant_state", None)) is not None:
        scales = [state.state2.absmax, state.offset] if state.nested else [state.absmax]
        return [scale for scale in scales if scale is not None and scale.is_floating_point()][:1]
    if (scales := getattr(parameter, "SCB", None)) is not None:
        return [scales]
    part = parameter
    if (shard := getattr(parameter, "ds_tensor", None)) is not None:
        if getattr(shard, "final_location", None) == "nvme" or not shard.numel():  # not in memory
            return []
        begins = torch.distributed.get_rank(parameter.ds_process_group) * shard.numel()
        part = shard.flatten()[: max(0, parameter.ds_numel - begins)]
    return [part] if part.numel() and part.dtype in TYPES else []
