"""The file of the compiled CPU kernels and operators, which ``import clearhead`` loads, and what torch asks of it.

Loading registers the operators with torch, so that a program that names them runs: one of ``torch.export.load`` or
``torch._inductor.aoti_load_package``. ``CLEARHEAD_NATIVE=0`` leaves the file out. A wrong value of the variable leaves
it out too, and raises at the first call that asks for the kernels.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Final

# Its OpenMP and its library must be in the process before the kernels are: they bring none of their own.
import torch as torch

from clearhead.environment import value_of
from clearhead.errors import UnsupportedError
from clearhead.ops import elf, openmp

__all__ = ["ABI", "PATH", "load", "signatures"]

PATH: Final = Path(__file__).resolve().parent.parent / "_native" / "libclearhead_native.so"
#: ``CH_ABI`` of the header that the library was built from.
ABI: Final = 33


@cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """The library, whose operators torch has, or None; and why there is none."""
    try:
        if value_of("CLEARHEAD_NATIVE") == "0":
            return None, "is switched off by CLEARHEAD_NATIVE=0"
    except UnsupportedError as wrong:
        return None, str(wrong)
    if not PATH.exists():
        return None, "is not built (it takes GCC or Clang: install again, or make native in a checkout)"
    try:
        if (damage := elf.damage_of(PATH)) is not None:
            return None, f"{damage}: install again"
        openmp.share()
        handle = ctypes.CDLL(str(PATH))
        # Another version may lack other functions, so this one is asked first.
        if (theirs := handle.ch_abi()) != ABI:
            return None, f"is of another version of clearhead ({theirs} instead of {ABI}): install again"
        _declare(handle)
    except (OSError, AttributeError) as problem:
        return None, f"was built for another machine or another torch ({' '.join(str(problem).split())})"
    if refused := handle.ch_operators_problem().decode():
        return None, f"was built for another torch ({refused})"
    return handle, ""


def signatures() -> dict[str, tuple[str, ...]]:
    """The names of each operator's arguments, in the order of its schema; empty without the library."""
    library, _ = load()
    names: dict[str, tuple[str, ...]] = {}
    while library is not None and (schema := library.ch_operator_schema(len(names))) is not None:
        name, _, rest = schema.decode().partition("(")
        arguments = rest.rpartition(") ->")[0].split(", ")
        names[name] = tuple(each.partition("=")[0].rpartition(" ")[2] for each in arguments)
    return names


def _declare(handle: ctypes.CDLL) -> None:
    """Give the functions the types of the header."""
    int32, int64 = ctypes.c_int32, ctypes.c_int64
    for function, arguments, result in (
        (handle.ch_isa_best, [], ctypes.c_int),
        (handle.ch_isa_name, [ctypes.c_int], ctypes.c_char_p),
        (handle.ch_isa_usable, [ctypes.c_int], ctypes.c_int),
        (handle.ch_use_isa, [int32], None),
        (handle.ch_operators_problem, [], ctypes.c_char_p),
        (handle.ch_operator_schema, [int32], ctypes.c_char_p),
        (handle.ch_product_rate, [int32] * 3, ctypes.c_double),
        (handle.ch_kept_memory, [], int64),
        (handle.ch_keep_memory, [int64], int64),
        (handle.ch_set_invariant, [int32], None),
    ):
        function.argtypes, function.restype = arguments, result
