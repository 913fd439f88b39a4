"""Write, verify, resume and reshard checkpoints."""
