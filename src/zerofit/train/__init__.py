"""Training on one rank: the trainer, what it measures, and its checkpoints."""
