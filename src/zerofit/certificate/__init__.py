"""The certificate (run manifest): the checks before the first step and at the end, each with its measured number."""
