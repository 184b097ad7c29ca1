"""How much memory a call needs beyond what is held before it, as the operating system saw it."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

from clearhead.backends.native_memory import release_memory

__all__ = ["peak_extra_bytes"]

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
# Documented in Linux's proc(5): writing 5 sets the peak of resident memory back to the present value.
_RESET_PEAK = "5"


def peak_extra_bytes(call: Callable[[], object]) -> int | None:
    """The highest resident memory during ``call`` less that before it, its result included.

    Counts everything, the scratch space of math libraries too, to the page of 4 KiB; so a call that needs less
    than some hundred KiB reads as noise.

    Returns:
        Bytes, or None where the system does not tell (anything but Linux).
    """
    call()
    _give_back_free_memory()
    try:
        _RESET.write_text(_RESET_PEAK)
        before = _peak_resident()
        result = call()
        after = _peak_resident()
    except OSError:
        return None
    del result
    return max(0, after - before)


def _peak_resident() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    if found is None:
        raise OSError("no VmHWM")
    return int(found[1]) * 1024


def _give_back_free_memory() -> None:
    """Freed memory that is kept, by the kernels or the C library, would hide what the call takes from it; and so would
    garbage that happens to be collected during the call."""
    gc.collect()
    release_memory()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return
