"""Parallelism: what splits a row or the model over ranks."""
