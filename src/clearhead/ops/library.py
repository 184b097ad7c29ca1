"""The compiled CPU kernels, and the instruction set that they run on.

``CLEARHEAD_ISA`` names the instruction set to use instead of the best. It is read once, when something first asks.
Wrong values of variables raise then.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from clearhead.choices import UNFUSED_ISA, ask_kernels, is_invariant, is_portable
from clearhead.environment import VARIABLES, value_of
from clearhead.ops import binary
from clearhead.ops.fakes import register
from clearhead.tensors import has_memory

__all__ = ["in_memory", "isa_index", "isa_name", "isa_names", "library", "loaded_library", "memory_bound", "reason"]

_KINDS: Final = (torch.Tensor, torch.nn.Parameter)
_STRIDED: Final = torch.strided


@dataclass(frozen=True)
class _Loaded:
    """The library and the chosen instruction set, or the reason against it."""

    library: ctypes.CDLL | None
    reason: str | None
    names: tuple[str, ...] = ()
    index: int = -1


def library() -> ctypes.CDLL | None:
    """The kernels, or None where ``reason`` says why not."""
    return loaded_library().library


def reason() -> str | None:
    """Why the kernels cannot be used in this process, or None.

    Raises:
        UnsupportedError: an environment variable has a wrong value.
    """
    return loaded_library().reason


def isa_names() -> list[str]:
    """The instruction sets that were built and that this processor has, widest first; ``CLEARHEAD_ISA`` picks one.

    Without it the table in ``native/src/entry.cpp`` does: Intel's processors run the dot products of ``avx512bf16`` at
    half the rate of float32, so those without AMX widen bfloat16 and take ``avx512vnni``.
    """
    return list(loaded_library().names)


def isa_index() -> int:
    """The set in use, as the library counts; -1 where there is none."""
    return loaded_library().index


def isa_name() -> str | None:
    """The set in use, or None."""
    loaded = loaded_library()
    return None if loaded.library is None else str(loaded.library.ch_isa_name(loaded.index).decode())


def in_memory(*tensors: torch.Tensor) -> bool:
    """Whether each tensor's memory holds its values."""
    # One loop: calls of a few microseconds check five tensors, and a generator would double the time.
    for tensor in tensors:
        if type(tensor) not in _KINDS or tensor.layout is not _STRIDED or tensor.is_nested or not has_memory(tensor):
            return False
    return True


def memory_bound() -> int | None:
    """The bytes of freed results that ``CLEARHEAD_KEEP_MEMORY`` lets the library cache, if it is set.

    Raises:
        UnsupportedError: it is not a number of MiB.
    """
    text = value_of("CLEARHEAD_KEEP_MEMORY")
    return int(text) * 2**20 if text else None


@cache
def loaded_library() -> _Loaded:
    _, _, isa = map(value_of, ("CLEARHEAD_NATIVE", "CLEARHEAD_KEEP_MEMORY", "CLEARHEAD_ISA"))
    handle, problem = binary.load()
    return _Loaded(None, problem) if handle is None else _chosen(handle, isa)


def _chosen(binary: ctypes.CDLL, asked: str) -> _Loaded:
    """Choose the set that ``CLEARHEAD_ISA`` names, or the table's.

    Raises:
        UnsupportedError: this processor, or this build, lacks the set.
    """
    built: list[str] = []
    while (name := binary.ch_isa_name(len(built))) is not None:
        built.append(name.decode())
    usable = tuple(name for index, name in enumerate(built) if binary.ch_isa_usable(index))
    bound = memory_bound()
    if bound is not None:
        binary.ch_keep_memory(bound)
    binary.ch_set_invariant(is_invariant())
    if asked and asked not in usable:
        must = f"be a set that was built and that this processor has, {' or '.join(usable)}"
        raise VARIABLES["CLEARHEAD_ISA"].error(repr(asked), must)
    index = built.index(asked) if asked else binary.ch_isa_best()
    if is_portable() and built[index] == UNFUSED_ISA:
        must = "be 0 or 1 where the kernels have no fused multiply-add"
        raise VARIABLES["CLEARHEAD_INVARIANT"].error(f"'portable' on the instruction set {UNFUSED_ISA}", must)
    if asked:
        binary.ch_use_isa(index)
    return _Loaded(binary, None, usable, index)


# Modules that call the operators import this one.
register()
ask_kernels(isa_names)
