"""How published data sets spell rows, turns and preferences, where it is not as our formats do."""
