"""Ground that everything stands on: errors, paths, command lines, processes, devices."""
