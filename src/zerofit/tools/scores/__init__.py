"""Score a trained model and its base with lm-evaluation-harness."""
