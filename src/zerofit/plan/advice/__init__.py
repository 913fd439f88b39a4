"""What a plan says beside the fastest setting of one method: other methods, long rows, batches, cost."""
