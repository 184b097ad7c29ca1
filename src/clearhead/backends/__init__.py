"""The backends: each one runs a ``Problem``; none knows another."""
