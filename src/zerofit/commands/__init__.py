"""Commands of `zerofit VERB`, one file per verb."""
