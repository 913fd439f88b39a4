"""Before training: whether the job fits, and whether the data is right."""
