"""Measuring speed and memory fairly: the same work, in turns, with medians and quartiles."""

from clearhead.benchmark.cases import Case, Setting, case_of, grid
from clearhead.benchmark.journal import Journal
from clearhead.benchmark.lines import Line, Verdict, measure_row, verdicts
from clearhead.benchmark.machine import load, machine, threads, torch_build, usable_cores, versions
from clearhead.benchmark.memory import peak_extra_bytes
from clearhead.benchmark.ready import check_backends
from clearhead.benchmark.results import Result, measure, report
from clearhead.benchmark.suites import SUITES, Floor, Suite
from clearhead.benchmark.sweep import Point, grid_rows, walk
from clearhead.benchmark.timing import Timing, interleaved

__all__ = [
    "SUITES",
    "Case",
    "Floor",
    "Journal",
    "Line",
    "Point",
    "Result",
    "Setting",
    "Suite",
    "Timing",
    "Verdict",
    "case_of",
    "check_backends",
    "grid",
    "grid_rows",
    "interleaved",
    "load",
    "machine",
    "measure",
    "measure_row",
    "peak_extra_bytes",
    "report",
    "threads",
    "torch_build",
    "usable_cores",
    "verdicts",
    "versions",
    "walk",
]
