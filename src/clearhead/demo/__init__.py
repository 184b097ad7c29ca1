"""The demo: train a classifier of handwritten digits, explain it, check it, time it, and write a page."""

from clearhead.demo.job import Settings, run

__all__ = ["Settings", "run"]
