"""Conventions of published datasets for rows, turns and preferences that differ from our formats."""
