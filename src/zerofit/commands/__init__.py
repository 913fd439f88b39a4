"""Commands: one file for each verb of `zerofit VERB` that is more than a call."""
