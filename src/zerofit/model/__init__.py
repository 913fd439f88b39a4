"""Weights, and what is attached to them: adapters, attention kernels, losses."""
