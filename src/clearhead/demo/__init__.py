"""The main job: train a classifier of handwritten digits, explain it, check it, time it, and write its page."""

from clearhead.demo.job import Settings, run

__all__ = ["Settings", "run"]
