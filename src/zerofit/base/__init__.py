"""Foundations of all other packages: errors, paths, command lines, processes, devices."""
