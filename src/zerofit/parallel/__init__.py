"""Parallelism: split rows or the model over ranks."""
