"""How much memory a call needs beyond what is held before it, as the operating system saw it."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

from clearhead.ops.memory import release_memory

__all__ = ["peak_extra_bytes"]

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
# Documented in Linux's proc(5): writing 5 sets the peak of resident memory back to the present value.
_RESET_PEAK = "5"
#: Bytes that the C library takes from its heap, never as a mapping of their own.
_PIECE = 2**16
#: So many at a time, for asking what is free walks through the heap.
_PIECES = 32


def peak_extra_bytes(call: Callable[[], object]) -> int | None:
    """The highest resident memory during ``call`` less that before it, its result included.

    Counts everything, the scratch space of math libraries too. Linux counts pages on each processor and adds them up 32
    at a time (proc(5): such values are inaccurate), so a call that needs less than some hundred KiB reads as noise.

    Returns:
        Bytes, or None where the system does not tell (anything but Linux).
    """
    call()
    last = _give_back_free_memory()
    try:
        _RESET.write_text(_RESET_PEAK)
        before = _peak_resident()
        result = call()
        after = _peak_resident()
    except OSError:
        return None
    finally:
        last()
    del result
    return max(0, after - before)


def _peak_resident() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    if found is None:
        raise OSError("no VmHWM")
    return int(found[1]) * 1024


def _give_back_free_memory() -> Callable[[], object]:
    """Freed memory that is kept, by the kernels or the C library, would hide what the call takes from it; and so would
    garbage that happens to be collected during the call. What is returned is to be called after it."""
    gc.collect()
    release_memory()
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        return _give_back_the_last(library)
    except (OSError, AttributeError, TypeError):
        return lambda: None


class _Usage(ctypes.Structure):
    """What ``mallinfo2`` returns (glibc 2.33 and later): what its heaps hold, and what of that is free, in bytes."""

    _fields_ = [
        ("held", ctypes.c_size_t),
        *((f"not_read_{place}", ctypes.c_size_t) for place in range(7)),
        ("free", ctypes.c_size_t),
        ("not_read_7", ctypes.c_size_t),
    ]


def _give_back_the_last(library: ctypes.CDLL) -> Callable[[], object]:
    """``malloc_trim`` leaves the free block at the end of a heap behind which something else is mapped, and of every
    heap but the first: a thread goes on in another when the first could not grow, be it that a number of bytes was
    absurd. So pieces are taken until the heap of this thread has to grow; what is free again before the last of them is
    not at the end. The last is kept until what is returned is called: its pages would be found again."""
    library.mallinfo2.restype, library.malloc.restype = _Usage, ctypes.c_void_p
    library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    usage, pieces = library.mallinfo2(), []
    for _ in range(usage.free // (_PIECES * _PIECE) + 1):
        pieces += [library.malloc(_PIECE) for _ in range(_PIECES)]
        if library.mallinfo2().held > usage.held:
            break
    for piece in pieces[:-1]:
        library.free(piece)
    library.malloc_trim(0)
    return lambda: [library.free(piece) for piece in pieces[-1:]]
