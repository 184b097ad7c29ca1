"""Benchmarks of speed and memory: contenders do the same work in interleaved rounds; medians and quartiles."""

from clearhead.benchmark.cases import Comparison, Setting, comparison_of, grid
from clearhead.benchmark.journal import Journal
from clearhead.benchmark.lines import Line, Verdict, measure_row, verdicts
from clearhead.benchmark.machine import load, machine, threads, torch_build, usable_cores, versions
from clearhead.benchmark.memory import peak_extra_bytes
from clearhead.benchmark.ready import check_backends
from clearhead.benchmark.results import SettingResult, measure, report
from clearhead.benchmark.suites import SUITES, Floor, Suite
from clearhead.benchmark.sweep import Point, grid_rows, walk
from clearhead.benchmark.timing import Timing, interleaved

__all__ = [
    "SUITES",
    "Comparison",
    "Floor",
    "Journal",
    "Line",
    "Point",
    "Setting",
    "SettingResult",
    "Suite",
    "Timing",
    "Verdict",
    "check_backends",
    "comparison_of",
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
