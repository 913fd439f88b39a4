"""Convert: the configurations of other kits, read and written down in our names."""
