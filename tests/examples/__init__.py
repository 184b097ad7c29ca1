"""The programs in ``examples/``."""
