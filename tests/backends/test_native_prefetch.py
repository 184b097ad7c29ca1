"""Prefetches of the CPU kernels reach the machine code."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
#: A function that only prefetches, which the compiler may not inline.
PROGRAM = """
#define CH_NS baseline
#include "vector.h"
namespace baseline {
__attribute__((noinline)) static void lines(const char* at, long count) {
  for (long line = 0; line < count; line++) prefetch_line(at + 64 * line);
}
}
void call(const char* at, long count) { baseline::lines(at, count); }
"""


def test_kernels_prefetch_by_the_function_that_compilers_keep() -> None:
    files = [path for kind in ("*.h", "*.cpp") for path in NATIVE.rglob(kind)]
    counts = {path.name: path.read_text("utf-8").count("__builtin_prefetch") for path in files}
    assert {name: count for name, count in counts.items() if count} == {"vector.h": 1}


def test_calls_of_functions_that_only_prefetch_are_kept() -> None:
    """GCC takes such a function for one without effects, and deletes its calls where it does not inline them."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    options = ["-x", "c++", "-std=gnu++20", "-O3", "-Wno-psabi", "-S", "-o", "-", f"-I{NATIVE / 'src'}", "-"]
    code = subprocess.run([compiler, *options], input=PROGRAM, capture_output=True, text=True, check=True).stdout
    assert any(name in code for name in ("prefetch", "prfm"))
