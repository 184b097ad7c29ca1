"""Make the OpenMP that torch has loaded visible to the CPU kernels, which bring none: one pool of threads serves both.

The functions that the kernels left open are looked for in what everybody sees. torch's wheels for x86 put their OpenMP
there, those for ARM load it for themselves alone.
"""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["FILE", "share"]

_MAPS: Final = Path("/proc/self/maps")
#: The file of GNU's, LLVM's or Intel's, under the names that wheels give it: `libgomp-24e2ab19.so.1.0.0`.
FILE: Final = re.compile(r"lib(gomp|omp|iomp5)\b[^/]*\.so")


def share() -> None:
    """Show the OpenMP of this process to libraries that are loaded from now on; loads none.

    Without an OpenMP, or where the system doesn't tell what is loaded, nothing happens.

    >>> import ctypes, torch
    >>> share()
    >>> hasattr(ctypes.CDLL(None), "omp_get_thread_num")
    True
    """
    if hasattr(ctypes.CDLL(None), "omp_get_thread_num"):
        return
    for path in _loaded():
        # A file that was replaced since, say.
        with suppress(OSError):
            ctypes.CDLL(path, os.RTLD_NOLOAD | os.RTLD_GLOBAL)


def _loaded() -> list[str]:
    """The OpenMP libraries of this process, in the order of loading."""
    if not _MAPS.exists():
        return []
    # The sixth column is the file, whose name may hold spaces.
    files = (line.split(maxsplit=5)[-1] for line in _MAPS.read_text().splitlines() if "/" in line)
    return [path for path in dict.fromkeys(files) if FILE.match(path.rsplit("/", 1)[-1])]
