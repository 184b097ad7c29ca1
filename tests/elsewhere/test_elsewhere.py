"""Device-independent code runs on another device with the CPU's numbers, in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("cases.py")


@pytest.mark.slow
def test_everything_runs_on_another_device() -> None:
    """A device is registered for the whole process, so other tests must not share it."""
    command = [sys.executable, "-m", "pytest", str(CASES), "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
