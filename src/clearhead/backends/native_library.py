"""The compiled CPU kernels: found, loaded on first use, and held against the C header they were built from.

``CLEARHEAD_NATIVE=0`` leaves them out; ``CLEARHEAD_ISA`` names the instruction set to use instead of the best.
Both are read once, when something first asks.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, Self

# Its OpenMP must be in the process before the kernels are: they bring none of their own.
import torch as torch
from torch._C._functorch import is_functorch_wrapped_tensor

from clearhead.backends import openmp
from clearhead.backends.dropout import LEVELS as LEVELS

__all__ = [
    "ABI", "DTYPES", "LEVELS", "LINEAR_PAD", "MAX_AXES", "MAX_BLOCK", "MAX_CHUNK", "MAX_HEAD_DIM", "MAX_RULES",
    "MAX_RUNS", "MAX_TERMS", "MAX_THREADS", "TILE", "UNBOUNDED",
    "Activation", "AppendDescription", "Call", "Code", "Description", "DropoutDescription", "Dtype", "Feature", "Gate",
    "LinearDescription", "NormDescription", "NormKind", "ProjectionDescription", "RotationDescription", "Rule",
    "RuleKind", "Statistics", "Table", "TensorView", "Term", "Verb", "in_memory", "isa_index", "isa_name", "isa_names",
    "library", "message", "quick", "reason", "run",
]  # fmt: skip

PATH: Final = Path(__file__).resolve().parent.parent / "_native" / "libclearhead_native.so"
ABI: Final = 18
MAX_HEAD_DIM: Final = 256
MAX_RUNS: Final = 4
MAX_RULES: Final = 8
#: Positions of a block: the field has 32 bits.
MAX_BLOCK: Final = 2**31 - 1
MAX_CHUNK: Final = 256
MAX_TERMS: Final = 4
MAX_AXES: Final = 5
#: Keys that backward works through at a time.
TILE: Final = 256
#: More than the library takes would be refused.
MAX_THREADS: Final = 4096
#: States of the linear family that lie between calls are padded to a multiple of this.
LINEAR_PAD: Final = 16
#: ``before`` and ``after`` of a description that bounds nothing on that side.
UNBOUNDED: Final = 2**63 - 1


class Dtype(IntEnum):
    """``ch_dtype``."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


#: What the kernels read.
DTYPES: Final = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16, torch.float16: Dtype.FLOAT16}


class RuleKind(IntEnum):
    """``ch_rule_kind``."""

    SLOPE = 1
    RELATIVE = 2
    DENSE = 3
    SOFTCAP = 4


class Feature(IntEnum):
    """``ch_feature_map``."""

    IDENTITY = 0
    ELU = 1
    RELU = 2


class Activation(IntEnum):
    """``ch_activation``: of a product's sums on their way out."""

    PLAIN = 0
    RELU = 1
    GELU = 2
    GELU_TANH = 3
    SILU = 4
    QUICK_GELU = 5


class Gate(IntEnum):
    """``ch_gate``: what forward left for the way back through an activation."""

    OUTPUT = 0
    SLOPE = 1


class NormKind(IntEnum):
    """``ch_norm_kind``."""

    LAYER = 0
    RMS = 1
    RMS_FROM_ONE = 2


class Code(IntEnum):
    """``ch_code``: what a call came to; ``message`` has the words."""

    OK = 0
    BAD_SIZE = 1
    BAD_SHAPE = 2
    BAD_DTYPE = 3
    BAD_POINTER = 4
    BAD_STRIDE = 5
    BAD_MASK = 6
    BAD_RULE = 7
    BAD_OPTION = 8
    BAD_ISA = 9
    NO_MEMORY = 10
    NOT_FINITE = 11
    BAD_STATISTIC = 12


class Verb(IntEnum):
    """``ch_verb``: the calls that ``run`` makes one after the other."""

    FORWARD = 1
    BACKWARD = 2
    PROJECT = 3
    DROP = 4
    NORM = 5
    NORM_BACKWARD = 6
    APPEND = 7
    ROTATE = 8


_int32, _int64, _float, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class TensorView(ctypes.Structure):
    """``ch_tensor``: ``[batch, heads, rows, last axis contiguous]``, strides in elements."""

    _fields_ = (("data", _pointer), ("batch", _int64), ("head", _int64), ("row", _int64))


class Table(ctypes.Structure):
    """``ch_table``: ``[batch, heads, rows, columns]``, any stride may be 0."""

    _fields_ = (("data", _pointer), ("batch", _int64), ("head", _int64), ("row", _int64), ("column", _int64))


class Rule(ctypes.Structure):
    """``ch_rule``."""

    _fields_ = (
        ("kind", _int32), ("reserved", _int32), ("value", _float), ("reach", _int32), ("table", Table),
        ("grad", _pointer), ("grad_batch", _int64), ("grad_head", _int64), ("grad_row", _int64),
    )  # fmt: skip


class Statistics(ctypes.Structure):
    """``ch_statistics``: what forward gathers besides the output; null asks for nothing."""

    _fields_ = (
        ("max_score", _pointer), ("ties", _pointer), ("entropy", _pointer), ("distance", _pointer),
        ("sink", _pointer), ("sink_keys", _int64),
        ("top_weights", _pointer), ("top_indices", _pointer), ("top_k", _int64),
        ("received", _pointer), ("weighted", _pointer), ("row_weights", _pointer),
        ("num_weights", _int64), ("weight_batch", _int64), ("weight_head", _int64),
        ("heatmap_max", _pointer), ("heatmap_mean", _pointer), ("heatmap", _int64),
        ("rows", _pointer), ("row_slots", _pointer), ("num_rows", _int64),
        ("grad_max", _pointer), ("grad_entropy", _pointer), ("grad_distance", _pointer), ("grad_sink", _pointer),
        ("grad_received", _pointer),
    )  # fmt: skip


class _Described(ctypes.Structure):
    """What every description begins with. Each field starts at zero."""

    _fields_: ClassVar[Sequence[tuple[str, type[Any]]]] = (
        ("size", ctypes.c_uint32), ("abi", ctypes.c_uint32), ("isa", _int32), ("threads", _int32)
    )  # fmt: skip

    @classmethod
    def new(cls, **others: Any) -> Self:
        """One thread and the instruction set that was chosen; sizes and tensors are the caller's."""
        return cls(size=ctypes.sizeof(cls), abi=ABI, isa=isa_index(), threads=1, **others)


class Description(_Described):
    """``ch_attention``: one call."""

    _fields_ = (
        ("dtype", _int32), ("num_rules", _int32),
        ("batch", _int64), ("heads", _int64), ("kv_heads", _int64), ("q_len", _int64), ("k_len", _int64),
        ("head_dim", _int64), ("value_dim", _int64), ("query_offset", _int64),
        ("scale", ctypes.c_double), ("dropout", ctypes.c_double), ("seed", ctypes.c_uint64),
        ("query", TensorView), ("key", TensorView), ("value", TensorView), ("output", TensorView),
        ("output32", _pointer), ("lse", _pointer), ("softmax", _pointer),
        ("before", _int64), ("after", _int64),
        ("start", _pointer), ("stop", _pointer), ("run_batch", _int64), ("run_head", _int64), ("run_row", _int64),
        ("runs", _int32), ("block_size", _int32), ("allowed", Table), ("blocks", Table),
        ("block_rows", _int64), ("block_columns", _int64),
        ("rules", Rule * MAX_RULES), ("sink", _pointer), ("sink_head", _int64),
        ("grad_output", TensorView), ("grad_lse", _pointer),
        ("grad_query", TensorView), ("grad_key", TensorView), ("grad_value", TensorView), ("delta", _pointer),
        ("statistics", _pointer),
    )  # fmt: skip

    @classmethod
    def new(cls, **others: Any) -> Self:
        """No mask either."""
        return super().new(before=UNBOUNDED, after=UNBOUNDED, **others)


class LinearDescription(_Described):
    """``ch_linear``: one call of the linear family."""

    _fields_ = (
        ("feature_map", _int32), ("reserved", _int32),
        ("batch", _int64), ("heads", _int64), ("kv_heads", _int64), ("length", _int64), ("features", _int64),
        ("value_dim", _int64), ("chunk", _int64), ("gates", _int64), ("scale", ctypes.c_double),
        ("query", TensorView), ("key", TensorView), ("value", TensorView), ("output", TensorView),
        ("log_decay", _pointer), ("rate", _pointer), ("state", _pointer), ("normalizer", _pointer),
        ("last_state", _pointer), ("last_normalizer", _pointer), ("shares", _pointer), ("states", _pointer),
        ("sums", _pointer),
        ("grad_output", TensorView), ("grad_last_state", _pointer), ("grad_last_normalizer", _pointer),
        ("grad_query", TensorView), ("grad_key", TensorView), ("grad_value", TensorView),
        ("grad_state", _pointer), ("grad_normalizer", _pointer), ("grad_decay", _pointer), ("grad_rate", _pointer),
        ("later", _pointer), ("later_sums", _pointer),
    )  # fmt: skip


class Term(ctypes.Structure):
    """``ch_term``: one product of a sum, strides in elements from row to row as it lies."""

    _fields_ = (
        ("left", _pointer), ("right", _pointer), ("left_row", _int64), ("right_row", _int64), ("steps", _int64),
    )  # fmt: skip


class ProjectionDescription(_Described):
    """``ch_projection``: one product of a linear layer."""

    _fields_ = (
        ("dtype", _int32), ("num_terms", _int32), ("left_turned", _int32), ("right_turned", _int32),
        ("activation", _int32), ("dropped", _int32), ("seed", ctypes.c_uint64), ("rows", _int64), ("columns", _int64),
        ("terms", Term * MAX_TERMS), ("bias", _pointer), ("output", _pointer), ("output_row", _int64),
        ("slope", _pointer), ("slope_row", _int64), ("gate", _pointer), ("gate_row", _int64),
        ("gate_kind", _int32), ("reserved", _int32), ("slope_gate", _pointer), ("slope_gate_row", _int64),
        ("row_sums", _pointer),
    )  # fmt: skip


class DropoutDescription(_Described):
    """``ch_dropout``: dropout of activations."""

    _fields_ = (
        ("dtype", _int32), ("dropped", _int32), ("seed", ctypes.c_uint64), ("rows", _int64), ("columns", _int64),
        ("input", _pointer), ("added", _pointer), ("output", _pointer),
    )  # fmt: skip


class NormDescription(_Described):
    """``ch_norm``: the norm of a sum, or its way back."""

    _fields_ = (
        ("dtype", _int32), ("dropped", _int32), ("seed", ctypes.c_uint64), ("rows", _int64), ("columns", _int64),
        ("epsilon", ctypes.c_double), ("kind", _int32), ("reserved", _int32),
        ("input", _pointer), ("added", _pointer), ("weight", _pointer), ("bias", _pointer), ("sum", _pointer),
        ("output", _pointer), ("moments", _pointer),
        ("grad_output", _pointer), ("grad_more", _pointer), ("grad_arrived", _pointer), ("grad_sum", _pointer),
        ("grad_input", _pointer), ("grad_weight", _pointer), ("grad_bias", _pointer),
    )  # fmt: skip


class AppendDescription(_Described):
    """``ch_append``: rows put behind those that a cache holds."""

    _fields_ = (
        ("dtype", _int32), ("reserved", _int32),
        ("batch", _int64), ("heads", _int64), ("rows", _int64), ("columns", _int64), ("first", _int64),
        ("source", TensorView), ("target", TensorView),
    )  # fmt: skip


class RotationDescription(_Described):
    """``ch_rotation``: rotary positions of heads."""

    _fields_ = (
        ("dtype", _int32), ("back", _int32),
        ("batch", _int64), ("heads", _int64), ("rows", _int64), ("columns", _int64), ("first", _int64),
        ("positions", _int64), ("table", _pointer), ("source", TensorView), ("target", TensorView),
    )  # fmt: skip


#: The library's functions that say how large a description is, and what Python takes each to be.
_SIZES: Final[dict[str, type[_Described]]] = {
    "ch_description_size": Description,
    "ch_linear_description_size": LinearDescription,
    "ch_projection_description_size": ProjectionDescription,
    "ch_dropout_description_size": DropoutDescription,
    "ch_norm_description_size": NormDescription,
    "ch_append_description_size": AppendDescription,
    "ch_rotation_description_size": RotationDescription,
}


class Call(ctypes.Structure):
    """``ch_call``: a description and what is to be done with it."""

    _fields_ = (("verb", _int32), ("reserved", _int32), ("description", _pointer))


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

    Without it the kernels measure once whether the products of the widest run as fast as the next one's: Intel's
    Emerald Rapids runs bfloat16 in vectors at half the rate of float32.
    """
    return list(_loaded().names)


def isa_index() -> int:
    """The set in use, as the library counts; -1 where there is none."""
    return _loaded().index


def isa_name() -> str | None:
    """The set in use, or None."""
    found = _loaded()
    return None if found.library is None else str(found.library.ch_isa_name(found.index).decode())


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
    sizes = tuple(int(getattr(found, name)()) for name in _SIZES)
    if sizes != (expected := tuple(map(ctypes.sizeof, _SIZES.values()))):
        return _Loaded(None, f"is of another version of clearhead ({sizes} instead of {expected}): install again")
    return _chosen(found, os.environ.get("CLEARHEAD_ISA", "").strip())


def _chosen(found: ctypes.CDLL, asked: str) -> _Loaded:
    """Settle on the set that was asked for, or on the best."""
    built: list[str] = []
    while (name := found.ch_isa_name(len(built))) is not None:
        built.append(name.decode())
    usable = tuple(name for index, name in enumerate(built) if found.ch_isa_usable(index))
    if not asked:
        return _Loaded(found, None, usable, found.ch_isa_best(), _quick())
    if asked not in usable:
        lacks = "names a set that this processor lacks" if asked in built else "names no instruction set"
        return _Loaded(None, f"cannot run: CLEARHEAD_ISA={asked!r} {lacks}; here there are {', '.join(usable)}", usable)
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
    for name in _SIZES:
        getattr(found, name).restype = _int64
    found.ch_isa_best.restype = ctypes.c_int
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
