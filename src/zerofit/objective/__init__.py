"""Objectives: what a training row is, how it is read, and what is trained on it."""
