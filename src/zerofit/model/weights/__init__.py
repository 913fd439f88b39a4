"""Check a model's weights: files, names and shapes, values."""
