"""Memory that a call needs is measured whatever the process has done before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from clearhead.benchmark import peak_extra_bytes
from tests.processes import with_torch_alone

#: Pages that a processor may have counted and not told yet, 32 at most each (Linux, percpu_counter_batch).
_NOISE = 32 * 4096 * (os.cpu_count() or 1)

_CALL = """
import ctypes
import torch
from clearhead.benchmark import peak_extra_bytes

rows = torch.zeros(4, 1024, 16)
call = lambda: torch.softmax(rows @ rows.mT, -1)
call()
"""
_PEAKS = "print(*[peak_extra_bytes(call) for _ in range(5)])"
#: Something is mapped right behind the heap, so that the C library goes on elsewhere and cannot shrink what it has.
_BEHIND_A_CLOSED_HEAP = """
library = ctypes.CDLL(None)
library.sbrk.restype = library.mmap.restype = ctypes.c_void_p
library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
end = (library.sbrk(0) + 4095) // 4096 * 4096
PROT_NONE, PRIVATE_ANONYMOUS_FIXED_NOREPLACE = 0, 0x100022
assert library.mmap(end, 4096, PROT_NONE, PRIVATE_ANONYMOUS_FIXED_NOREPLACE, -1, 0) == end
"""
#: What no heap can hold was asked for, so that the C library has gone on in another.
_IN_ANOTHER_HEAP = """
try:
    torch.empty(2**45)
except RuntimeError:
    call()
"""


def _needs_a_peak() -> None:
    if peak_extra_bytes(lambda: None) is None:
        pytest.skip("this system does not tell the peak of resident memory")


def test_peak_extra_bytes_equals_the_allocation() -> None:
    _needs_a_peak()
    peak = peak_extra_bytes(lambda: torch.ones(2**24))
    assert peak is not None
    assert 2**26 - _NOISE <= peak < 1.1 * 2**26


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("happened", [_BEHIND_A_CLOSED_HEAP, _IN_ANOTHER_HEAP], ids=["closed heap", "another heap"])
def test_free_heap_memory_does_not_hide_allocations(happened: str) -> None:
    _needs_a_peak()
    done = with_torch_alone(_CALL + happened + _PEAKS)
    assert done.returncode == 0, done.stderr
    peaks = [int(word) for word in done.stdout.split()]
    assert len(peaks) == 5
    assert all(2**25 - _NOISE <= peak < 1.1 * 2**25 for peak in peaks), peaks
