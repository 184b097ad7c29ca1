"""Peak memory of a call, measured by the operating system."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

from clearhead.ops.memory import release_memory

__all__ = ["RESET", "peak_extra_bytes"]

_STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")
# Documented in Linux's proc(5): writing 5 sets the peak of resident memory back to the present value.
_RESET_PEAK = "5"
#: Size of an allocation that the C library serves from its heap, not by a separate mapping.
_PIECE = 2**16
#: Allocations between two queries of the free bytes; a query walks through the heap.
_PIECES = 32


def peak_extra_bytes(call: Callable[[], object]) -> int | None:
    """Peak resident memory during ``call`` minus the memory before it; the result is included.

    The figure includes the workspace of math libraries. Linux counts pages per processor and adds them up 32 at a time
    (proc(5): such values are inaccurate), so less than some hundred KiB is noise.

    Returns:
        Bytes, or None on systems other than Linux.
    """
    call()
    last = _give_back_free_memory()
    try:
        RESET.write_text(_RESET_PEAK)
        before = _peak_resident()
        result = call()
        peak = _peak_resident()
    except OSError:
        return None
    finally:
        last()
    del result
    return max(0, peak - before)


def _peak_resident() -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    if match is None:
        raise OSError("no VmHWM")
    return int(match[1]) * 1024


def _give_back_free_memory() -> Callable[[], object]:
    """Return free memory to the system, so that the call cannot reuse it unnoticed. Collects garbage too.

    Returns:
        A function to call after the measurement.
    """
    gc.collect()
    release_memory()
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        return _give_back_the_last(library)
    except (OSError, AttributeError, TypeError):
        return lambda: None


class _Usage(ctypes.Structure):
    """The struct of ``mallinfo2`` (glibc 2.33 and later): bytes of the heaps, and how many of them are free."""

    _fields_ = [
        ("used", ctypes.c_size_t),
        *((f"not_read_{place}", ctypes.c_size_t) for place in range(7)),
        ("free", ctypes.c_size_t),
        ("not_read_7", ctypes.c_size_t),
    ]


def _give_back_the_last(library: ctypes.CDLL) -> Callable[[], object]:
    """Return the free block at the end of this thread's heap.

    ``malloc_trim`` does not return that block where another mapping follows the heap, nor in any heap but the first (a
    thread uses another heap after the first could not grow). So this allocates pieces until the heap has to grow, then
    frees all but the last and trims again. The last piece stays allocated, so the block is not at the end of the heap.

    Returns:
        A function that frees the last piece.
    """
    library.mallinfo2.restype, library.malloc.restype = _Usage, ctypes.c_void_p
    library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    usage, pieces = library.mallinfo2(), []
    for _ in range(usage.free // (_PIECES * _PIECE) + 1):
        pieces += [library.malloc(_PIECE) for _ in range(_PIECES)]
        if library.mallinfo2().used > usage.used:
            break
    for piece in pieces[:-1]:
        library.free(piece)
    library.malloc_trim(0)
    return lambda: [library.free(piece) for piece in pieces[-1:]]
