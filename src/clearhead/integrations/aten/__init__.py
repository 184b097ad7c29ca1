"""Replacements of ATen's CPU kernels: attention, and the matrix multiplications behind linear layers."""
