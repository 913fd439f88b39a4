"""Data: read files, parse conversations, tokenize, batch."""
