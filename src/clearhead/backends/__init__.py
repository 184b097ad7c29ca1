"""The backends: each runs a ``Problem``, independently of the others."""
