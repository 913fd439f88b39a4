"""Say which of transformers' model types were tried with zerofit, and with what."""
