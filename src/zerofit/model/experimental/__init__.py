"""Techniques that no GPU has run yet: off by default, or behind their self-test."""
