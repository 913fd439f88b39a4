"""Training on one rank: the trainer, its measurements and its checkpoints."""
