"""Compute what a decoder layer computes with other kernels: compiled ones, and products of 8-bit floats."""
