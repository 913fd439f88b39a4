"""Optimizers: the registry, the builder, Sophia and bf16 AdamW."""
