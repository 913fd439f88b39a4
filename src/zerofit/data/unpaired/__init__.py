"""Unpaired preference rows (KTO): an answer with a label that says whether it is wanted."""
