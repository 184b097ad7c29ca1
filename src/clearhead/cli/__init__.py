"""The command line: one file a verb, gathered by ``app``."""
