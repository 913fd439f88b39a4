"""Jobs on several nodes."""
