"""Mixtures of experts: find and adapt the experts' weights, and self-test their kernel."""
