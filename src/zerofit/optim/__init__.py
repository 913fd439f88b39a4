"""Optimizers: what each needs, and how it is built."""
