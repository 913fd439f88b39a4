"""Start, supervise and restart the processes of a job. Runs in the launcher, never on a rank."""
