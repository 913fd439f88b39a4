"""Estimate the time of a step from its operations and from published or measured rates of GPUs and links."""
