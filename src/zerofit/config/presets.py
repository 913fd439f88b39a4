"""--preset: tested combinations of flags by GPU memory."""

from zerofit.errors import UserError

# Flags as on the command line; a --config file and flags win over them. The effective batch stays what it is (32 unless
# said otherwise): the micro batch decides how much is accumulated. Precision is not among them: bf16 where the GPU has
# it, fp16 with loss scaling where it has not, is the default.
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
    """The command line that the preset stands for.

    Raises: UserError for a name that is none.
    """
    if name not in PRESETS:
        raise UserError(f"--preset {name}: there are {', '.join(PRESETS)}.")
    return [word for key, value in PRESETS[name].items() for word in (f"--{key}", value)]
