"""Price the time of a step: operations, rates of GPUs and links, what was measured here."""
