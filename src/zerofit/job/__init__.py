"""A job: its settings, the program that it starts, and its run folder."""
