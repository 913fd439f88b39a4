"""Load the model; add adapters, attention kernels, gradient checkpointing and the fused loss."""
