"""A compiled and packaged model runs in a C++ program without Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clearhead.ops.binary import PATH
from tests.agreement import needs_native

EXAMPLE = Path(__file__).parents[2] / "examples" / "without_python"

pytestmark = [
    needs_native,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("cmake") is None or shutil.which(os.environ.get("CXX", "c++")) is None,
        reason="needs CMake and a C++ compiler",
    ),
]


def _run(*command: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_a_packaged_model_runs_without_python(tmp_path: Path) -> None:
    _run(sys.executable, EXAMPLE / "export_model.py", tmp_path)
    _run("cmake", "-S", EXAMPLE, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}")
    _run("cmake", "--build", tmp_path)
    program = tmp_path / "without_python"
    assert "libpython" not in _run("ldd", program).stdout
    assert _run(program, PATH, tmp_path).stdout.startswith("largest difference to Python: ")
    # The last four bytes are an expected logit: the program notices another one.
    numbers = tmp_path / "numbers.bin"
    numbers.write_bytes(numbers.read_bytes()[:-4] + b"\0\0\x80?")
    assert subprocess.run([program, PATH, tmp_path], capture_output=True, timeout=600).returncode == 1
