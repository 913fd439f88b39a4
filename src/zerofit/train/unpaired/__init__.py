"""Preference losses of single answers with a label (KTO)."""
