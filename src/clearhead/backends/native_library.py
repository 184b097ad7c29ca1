"""The compiled CPU kernels: found, loaded on first use, and held against the C header they were built from.

``CLEARHEAD_NATIVE=0`` leaves them out; ``CLEARHEAD_ISA`` names the instruction set to use instead of the best.
Both are read once, when something first asks.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

# Its OpenMP must be in the process before the kernels are: they bring none of their own.
import torch as torch
from torch._C._functorch import is_functorch_wrapped_tensor

from clearhead.backends import openmp
from clearhead.backends.native_header import (
    ABI,
    SIZES,
    AppendDescription,
    Call,
    Described,
    Description,
    DropoutDescription,
    LinearDescription,
    NormDescription,
    ProjectionDescription,
    RotationDescription,
    Verb,
)

__all__ = [
    "PATH", "in_memory", "isa_index", "isa_name", "isa_names", "library", "message", "new_description", "quick",
    "reason", "run",
]  # fmt: skip

PATH: Final = Path(__file__).resolve().parent.parent / "_native" / "libclearhead_native.so"

_int32, _int64, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_Kind = TypeVar("_Kind", bound=Described)


@dataclass(frozen=True)
class _Loaded:
    """What looking for the library came to: it, twice, and the chosen set, or the reason against it."""

    library: ctypes.CDLL | None
    reason: str | None
    names: tuple[str, ...] = ()
    index: int = -1
    quick: ctypes.PyDLL | None = None


def library() -> ctypes.CDLL | None:
    """The kernels, or None where ``reason`` says why not."""
    return _loaded().library


def quick() -> ctypes.PyDLL | None:
    """The kernels for calls of a few microseconds: Python's lock is kept, which is dearer to give away and fetch."""
    return _loaded().quick


def reason() -> str | None:
    """Why the kernels cannot be used in this process, or None."""
    return _loaded().reason


def isa_names() -> list[str]:
    """The instruction sets that were built and that this processor has, widest first; ``CLEARHEAD_ISA`` picks one.

    Without it the table in ``native/src/entry.cpp`` does: Intel's processors run the dot products of ``avx512bf16`` at
    half the rate of float32, so they widen bfloat16 and take ``avx512``.
    """
    return list(_loaded().names)


def isa_index() -> int:
    """The set in use, as the library counts; -1 where there is none."""
    return _loaded().index


def isa_name() -> str | None:
    """The set in use, or None."""
    found = _loaded()
    return None if found.library is None else str(found.library.ch_isa_name(found.index).decode())


def new_description(kind: type[_Kind]) -> _Kind:
    """A description for one thread and the set in use; sizes and tensors are the caller's."""
    return kind.new(isa_index())


def in_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its numbers."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_nested or is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor())
    )


def run(calls: Sequence[tuple[Verb, ctypes.Structure]]) -> tuple[int, int]:
    """Make calls one after the other until one fails: the last code, and how many came to their end.

    Python is asked once for all of them: between two large calls it finds its own memory gone from the caches.
    """
    found = library()
    assert found is not None
    listed = (Call * len(calls))(*[Call(verb, 0, ctypes.addressof(description)) for verb, description in calls])
    done = _int32()
    return int(found.ch_run(listed, len(calls), ctypes.byref(done))), done.value


def message(code: int) -> str:
    """A code that a kernel returned, in words."""
    found = library()
    return f"code {code}" if found is None else str(found.ch_message(code).decode())


@cache
def _loaded() -> _Loaded:
    if os.environ.get("CLEARHEAD_NATIVE", "").strip() == "0":
        return _Loaded(None, "is switched off by CLEARHEAD_NATIVE=0")
    if not PATH.exists():
        return _Loaded(None, "is not built (it takes GCC or Clang: install again, or make native in a checkout)")
    try:
        openmp.share()
        found = ctypes.CDLL(str(PATH))
        # Another version may lack other functions, so this one is asked first.
        if (theirs := found.ch_abi()) != ABI:
            return _Loaded(None, f"is of another version of clearhead ({theirs} instead of {ABI}): install again")
        _declare(found)
    except (OSError, AttributeError) as problem:
        return _Loaded(None, f"was built for another machine or another torch ({' '.join(str(problem).split())})")
    sizes = tuple(int(getattr(found, name)()) for name in SIZES)
    if sizes != (expected := tuple(map(ctypes.sizeof, SIZES.values()))):
        return _Loaded(None, f"is of another version of clearhead ({sizes} instead of {expected}): install again")
    return _chosen(found, os.environ.get("CLEARHEAD_ISA", "").strip())


def _chosen(found: ctypes.CDLL, asked: str) -> _Loaded:
    """Settle on the set that was asked for, or on the best."""
    built: list[str] = []
    while (name := found.ch_isa_name(len(built))) is not None:
        built.append(name.decode())
    usable = tuple(name for index, name in enumerate(built) if found.ch_isa_usable(index))
    problem = found.ch_operators_problem().decode()
    if problem:
        return _Loaded(None, f"was built for another torch ({problem})")
    if not asked:
        return _Loaded(found, None, usable, found.ch_isa_best(), _quick())
    if asked not in usable:
        lacks = "names a set that this processor lacks" if asked in built else "names no instruction set"
        return _Loaded(None, f"cannot run: CLEARHEAD_ISA={asked!r} {lacks}; here there are {', '.join(usable)}", usable)
    found.ch_use_isa(built.index(asked))
    return _Loaded(found, None, usable, built.index(asked), _quick())


def _quick() -> ctypes.PyDLL:
    """The library that has just been loaded, without the types that would be checked on every call."""
    found = ctypes.PyDLL(str(PATH))
    # Addresses are Python integers, which would be passed as 32 bits.
    found.ch_new_tensor.argtypes, found.ch_new_tensor.restype = [_int32, _int32, _pointer, _pointer], _pointer
    found.ch_keep_memory.argtypes, found.ch_keep_memory.restype = [_int64], _int64
    return found


def _declare(found: ctypes.CDLL) -> None:
    """Give the functions the types of the header."""
    for name in SIZES:
        getattr(found, name).restype = _int64
    found.ch_isa_best.restype = ctypes.c_int
    found.ch_operators_problem.restype = ctypes.c_char_p
    found.ch_use_isa.argtypes, found.ch_use_isa.restype = [_int32], None
    found.ch_product_rate.argtypes, found.ch_product_rate.restype = [_int32] * 3, ctypes.c_double
    found.ch_run.argtypes = [ctypes.POINTER(Call), _int32, ctypes.POINTER(_int32)]
    found.ch_kept_memory.restype = _int64
    found.ch_keep_memory.argtypes, found.ch_keep_memory.restype = [_int64], _int64
    for function, argument, result in (
        (found.ch_isa_name, ctypes.c_int, ctypes.c_char_p),
        (found.ch_isa_usable, ctypes.c_int, ctypes.c_int),
        (found.ch_message, ctypes.c_int, ctypes.c_char_p),
        (found.ch_forward, ctypes.POINTER(Description), ctypes.c_int),
        (found.ch_backward, ctypes.POINTER(Description), ctypes.c_int),
        (found.ch_linear_forward, ctypes.POINTER(LinearDescription), ctypes.c_int),
        (found.ch_linear_backward, ctypes.POINTER(LinearDescription), ctypes.c_int),
        (found.ch_project, ctypes.POINTER(ProjectionDescription), ctypes.c_int),
        (found.ch_drop, ctypes.POINTER(DropoutDescription), ctypes.c_int),
        (found.ch_norm_forward, ctypes.POINTER(NormDescription), ctypes.c_int),
        (found.ch_norm_backward, ctypes.POINTER(NormDescription), ctypes.c_int),
        (found.ch_append_rows, ctypes.POINTER(AppendDescription), ctypes.c_int),
        (found.ch_rotate, ctypes.POINTER(RotationDescription), ctypes.c_int),
    ):
        function.argtypes, function.restype = [argument], result
