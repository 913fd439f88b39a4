"""Define --preset: tested combinations of flags by GPU memory."""

from typing import Any

from zerofit.base.errors import UserError

# A --config file and explicit flags override them. They do not change the effective batch (default 32), as accumulation
# follows from the micro batch, or the precision (default bf16, or fp16 with loss scaling on GPUs without bf16).
_CHECKPOINTED = {"gradient_checkpointing": True, "fused_loss": True}

_SELECTIVE = _CHECKPOINTED | {"gradient_checkpointing_policy": "selective"}

PRESETS: dict[str, dict[str, Any]] = {
    "gpu-12g": {"optim": "adamw_8bit", "per_device_train_batch_size": 1} | _CHECKPOINTED,
    "gpu-24g": {"optim": "adamw_8bit", "per_device_train_batch_size": 4, "gradient_checkpointing_every": 2}
    | _CHECKPOINTED,
    "gpu-40g": {"per_device_train_batch_size": 4} | _CHECKPOINTED,
    "gpu-80g": {"per_device_train_batch_size": 8} | _SELECTIVE,
    "gpu-141g": {"per_device_train_batch_size": 16} | _SELECTIVE,
}


def values(name: str) -> dict[str, Any]:
    """Return the arguments of a preset.

    Raises: UserError for an unknown name.
    """
    if name not in PRESETS:
        raise UserError(f"--preset {name}: must be one of {', '.join(PRESETS)}.")
    return dict(PRESETS[name])
