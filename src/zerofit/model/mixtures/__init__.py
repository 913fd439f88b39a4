"""Mixtures of experts: which weights are experts, adapters of them, their router loss, a proof of their kernel."""
