"""Swap of other libraries' modules for clearhead's."""
