"""Objectives: formats of training rows, losses and metrics."""
