"""The compiled CPU kernels, and the instruction set that they run on.

``CLEARHEAD_ISA`` names the instruction set to use instead of the best. It is read once, when something first asks.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from clearhead.errors import UnsupportedError
from clearhead.ops import binary
from clearhead.ops.fakes import register
from clearhead.tensors import has_memory

__all__ = ["in_memory", "isa_index", "isa_name", "isa_names", "library", "memory_bound", "reason"]

_MEMORY: Final = "CLEARHEAD_KEEP_MEMORY"


@dataclass(frozen=True)
class _Loaded:
    """The library and the chosen instruction set, or the reason against it."""

    library: ctypes.CDLL | None
    reason: str | None
    names: tuple[str, ...] = ()
    index: int = -1


def library() -> ctypes.CDLL | None:
    """The kernels, or None where ``reason`` says why not."""
    return _loaded().library


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
    loaded = _loaded()
    return None if loaded.library is None else str(loaded.library.ch_isa_name(loaded.index).decode())


def in_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its values."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and has_memory(tensor)
    )


def memory_bound() -> int | None:
    """The bytes of freed results that ``CLEARHEAD_KEEP_MEMORY`` lets the library cache, if it is set.

    Raises:
        UnsupportedError: it is not a number of MiB.
    """
    text = os.environ.get(_MEMORY, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        must, then = "be a whole number of MiB, 0 or more", "Unset it to keep up to an eighth of the machine's memory."
        raise UnsupportedError.about("clearhead", _MEMORY, must=must, got=repr(text)[:80], then=then)
    return int(text) * 2**20


@cache
def _loaded() -> _Loaded:
    handle, problem = binary.load()
    if handle is None:
        return _Loaded(None, problem)
    return _chosen(handle, os.environ.get("CLEARHEAD_ISA", "").strip())


def _chosen(binary: ctypes.CDLL, asked: str) -> _Loaded:
    """Choose the set that ``CLEARHEAD_ISA`` names, or the table's."""
    built: list[str] = []
    while (name := binary.ch_isa_name(len(built))) is not None:
        built.append(name.decode())
    usable = tuple(name for index, name in enumerate(built) if binary.ch_isa_usable(index))
    bound = memory_bound()
    if bound is not None:
        binary.ch_keep_memory(bound)
    if not asked:
        return _Loaded(binary, None, usable, binary.ch_isa_best())
    if asked not in usable:
        lacks = "names a set that this processor lacks" if asked in built else "names no instruction set"
        return _Loaded(None, f"cannot run: CLEARHEAD_ISA={asked!r} {lacks}; here there are {', '.join(usable)}", usable)
    binary.ch_use_isa(built.index(asked))
    return _Loaded(binary, None, usable, built.index(asked))


# Modules that call the operators import this one.
register()
