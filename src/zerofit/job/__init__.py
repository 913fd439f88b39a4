"""A job: the program that it starts. What it computes is in settings.py."""
