"""What servers read, and what can be proven of it: `zerofit export --for SERVER`."""
