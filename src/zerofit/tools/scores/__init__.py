"""Score a trained model and its base by lm-evaluation-harness."""
