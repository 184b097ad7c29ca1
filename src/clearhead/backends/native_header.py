"""``clearhead_native.h`` in Python: limits, enumerations and descriptions; the tests hold them against the header."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, ClassVar, Final, Self

import torch

from clearhead.backends.dropout import LEVELS as LEVELS
from clearhead.ops.kinds import Activation as Activation
from clearhead.ops.kinds import Gate as Gate
from clearhead.ops.kinds import NormKind as NormKind

__all__ = [
    "ABI", "DTYPES", "LEVELS", "LINEAR_PAD", "MAX_AXES", "MAX_BLOCK", "MAX_CHUNK", "MAX_HEAD_DIM", "MAX_RULES",
    "MAX_RUNS", "MAX_TERMS", "MAX_THREADS", "SIZES", "TILE", "UNBOUNDED", "Activation", "AppendDescription",
    "Call", "Code", "Described", "Description", "DropoutDescription", "Dtype", "Feature", "Gate",
    "LinearDescription", "NormDescription", "NormKind", "ProjectionDescription", "RotationDescription", "Rule",
    "RuleKind", "Statistics", "Table", "TensorView", "Term", "Verb",
]  # fmt: skip

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


class Described(ctypes.Structure):
    """What every description begins with. Each field starts at zero."""

    _fields_: ClassVar[Sequence[tuple[str, type[Any]]]] = (
        ("size", ctypes.c_uint32), ("abi", ctypes.c_uint32), ("isa", _int32), ("threads", _int32)
    )  # fmt: skip

    @classmethod
    def new(cls, isa: int, **others: Any) -> Self:
        """One thread and an instruction set, as the library counts; sizes and tensors are the caller's."""
        return cls(size=ctypes.sizeof(cls), abi=ABI, isa=isa, threads=1, **others)


class Description(Described):
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
    def new(cls, isa: int, **others: Any) -> Self:
        """No mask either."""
        return super().new(isa, before=UNBOUNDED, after=UNBOUNDED, **others)


class LinearDescription(Described):
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


class ProjectionDescription(Described):
    """``ch_projection``: one product of a linear layer."""

    _fields_ = (
        ("dtype", _int32), ("num_terms", _int32), ("left_turned", _int32), ("right_turned", _int32),
        ("activation", _int32), ("dropped", _int32), ("seed", ctypes.c_uint64), ("rows", _int64), ("columns", _int64),
        ("terms", Term * MAX_TERMS), ("bias", _pointer), ("output", _pointer), ("output_row", _int64),
        ("slope", _pointer), ("slope_row", _int64), ("gate", _pointer), ("gate_row", _int64),
        ("gate_kind", _int32), ("reserved", _int32), ("slope_gate", _pointer), ("slope_gate_row", _int64),
        ("row_sums", _pointer),
    )  # fmt: skip


class DropoutDescription(Described):
    """``ch_dropout``: dropout of activations."""

    _fields_ = (
        ("dtype", _int32), ("dropped", _int32), ("seed", ctypes.c_uint64), ("rows", _int64), ("columns", _int64),
        ("input", _pointer), ("added", _pointer), ("output", _pointer),
    )  # fmt: skip


class NormDescription(Described):
    """``ch_norm``: the norm of a sum, or its way back."""

    _fields_ = (
        ("dtype", _int32), ("dropped", _int32), ("seed", ctypes.c_uint64), ("rows", _int64), ("columns", _int64),
        ("epsilon", ctypes.c_double), ("kind", _int32), ("reserved", _int32),
        ("input", _pointer), ("added", _pointer), ("weight", _pointer), ("bias", _pointer), ("sum", _pointer),
        ("output", _pointer), ("moments", _pointer),
        ("grad_output", _pointer), ("grad_more", _pointer), ("grad_arrived", _pointer), ("grad_sum", _pointer),
        ("grad_input", _pointer), ("grad_weight", _pointer), ("grad_bias", _pointer),
    )  # fmt: skip


class AppendDescription(Described):
    """``ch_append``: rows put behind those that a cache holds."""

    _fields_ = (
        ("dtype", _int32), ("reserved", _int32),
        ("batch", _int64), ("heads", _int64), ("rows", _int64), ("columns", _int64), ("first", _int64),
        ("source", TensorView), ("target", TensorView),
    )  # fmt: skip


class RotationDescription(Described):
    """``ch_rotation``: rotary positions of heads."""

    _fields_ = (
        ("dtype", _int32), ("back", _int32),
        ("batch", _int64), ("heads", _int64), ("rows", _int64), ("columns", _int64), ("first", _int64),
        ("positions", _int64), ("table", _pointer), ("source", TensorView), ("target", TensorView),
    )  # fmt: skip


#: The library's functions that say how large a description is, and what Python takes each to be.
SIZES: Final[dict[str, type[Described]]] = {
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
