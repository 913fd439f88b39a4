"""A job: its settings, its program and its run folder."""
