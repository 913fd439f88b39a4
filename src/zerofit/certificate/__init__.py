"""The certificate of a run: what was checked before the first step and at the end, each with its number."""
