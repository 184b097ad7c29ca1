"""Measuring speed and memory fairly: the same work, in turns, with medians and quartiles."""

from clearhead.benchmark.cases import Case, Setting, case_of, grid
from clearhead.benchmark.machine import load, machine, threads, torch_build, usable_cores, versions
from clearhead.benchmark.memory import peak_extra_bytes
from clearhead.benchmark.results import Result, measure, report
from clearhead.benchmark.timing import Timing, interleaved

__all__ = [
    "Case",
    "Result",
    "Setting",
    "Timing",
    "case_of",
    "grid",
    "interleaved",
    "load",
    "machine",
    "measure",
    "peak_extra_bytes",
    "report",
    "threads",
    "torch_build",
    "usable_cores",
    "versions",
]
