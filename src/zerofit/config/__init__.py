"""From the words of a command line to frozen settings."""
