"""What is not of the CPU alone runs on another device with the CPU's numbers: in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("cases.py")


@pytest.mark.slow
def test_everything_runs_on_a_device_that_is_not_the_cpu() -> None:
    """torch is told of a device once and for the whole process, which other tests should not share."""
    command = [sys.executable, "-m", "pytest", str(CASES), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
