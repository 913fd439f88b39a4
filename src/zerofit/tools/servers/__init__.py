"""Exports for servers and checks against the trained model: `zerofit export --for SERVER`."""
