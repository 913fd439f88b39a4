"""Chat templates: the built-in ones to train with, and the arguments that templates read."""
