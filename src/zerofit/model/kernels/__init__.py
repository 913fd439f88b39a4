"""Layers that the kernels of other packages compute: Liger, flash-linear-attention, causal-conv1d."""
