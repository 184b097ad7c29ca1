"""Tests on a simulated device that is not the CPU, without a GPU."""
