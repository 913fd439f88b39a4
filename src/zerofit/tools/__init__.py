"""Verbs that stand above the core, which imports none of them."""
