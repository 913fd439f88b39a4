"""Advice in addition to the fastest setting of one method: other methods, long rows, batches, cost."""
