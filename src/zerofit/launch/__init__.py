"""Start, watch and restart the processes of a job; runs in the launcher, never on a rank."""
