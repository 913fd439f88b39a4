"""Check before training that the job fits and that the data is right."""
