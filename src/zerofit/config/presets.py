"""Define --preset: tested combinations of flags by GPU memory."""

from zerofit.base.errors import UserError

# Flags as on the command line; a --config file and explicit flags override them. The effective batch is unchanged
# (default 32): the micro batch decides the accumulation. Precision is left to its default: bf16 where the GPU has it,
# else fp16 with loss scaling.
PRESETS: dict[str, dict[str, str]] = {
    "gpu-12g": {
        "optim": "adamw_8bit",
        "per_device_train_batch_size": "1",
        "gradient_checkpointing": "true",
        "fused_loss": "true",
    },
    "gpu-24g": {
        "optim": "adamw_8bit",
        "per_device_train_batch_size": "4",
        "gradient_checkpointing": "true",
        "gradient_checkpointing_every": "2",
        "fused_loss": "true",
    },
    "gpu-40g": {
        "per_device_train_batch_size": "4",
        "gradient_checkpointing": "true",
        "fused_loss": "true",
    },
    "gpu-80g": {
        "per_device_train_batch_size": "8",
        "gradient_checkpointing": "true",
        "gradient_checkpointing_policy": "selective",
        "fused_loss": "true",
    },
    "gpu-141g": {
        "per_device_train_batch_size": "16",
        "gradient_checkpointing": "true",
        "gradient_checkpointing_policy": "selective",
        "fused_loss": "true",
    },
}


def flags(name: str) -> list[str]:
    """Return the flags of a preset.

    Raises: UserError for an unknown name.
    """
    if name not in PRESETS:
        raise UserError(f"--preset {name}: there are {', '.join(PRESETS)}.")
    return [word for key, value in PRESETS[name].items() for word in (f"--{key}", value)]
