"""Limits of the operators, and the kinds that they take as numbers; tests hold them against clearhead_native.h."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import torch

__all__ = [
    "DTYPES",
    "FORWARD_TILE",
    "KEY_TILE",
    "MAX_BLOCK",
    "MAX_CHUNK",
    "MAX_HEAD_DIM",
    "MAX_RULES",
    "QUERY_BLOCK",
    "Activation",
    "Feature",
    "Gate",
    "NormKind",
    "Rounding",
    "Side",
    "Stored",
]

MAX_HEAD_DIM: Final = 256
MAX_RULES: Final = 8
#: Positions of a mask's block: the field has 32 bits.
MAX_BLOCK: Final = 2**31 - 1
#: Queries that the kernels process at a time: ``ROWS`` of forward.h and ``BLOCK`` of backward.h.
QUERY_BLOCK: Final = 96
#: Keys that backward processes at a time, ``CH_TILE``: with as many or fewer it needs no output of forward.
KEY_TILE: Final = 256
#: The most keys that forward processes at a time, ``MAX_TILE`` of forward.h, which is a multiple of all other tiles.
FORWARD_TILE: Final = 512
#: Tokens of a chunk of linear attention.
MAX_CHUNK: Final = 256
#: What the kernels read, in the order of ``ch_dtype``.
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class Activation(IntEnum):
    """``ch_activation``: applied in a GEMM's epilogue."""

    PLAIN = 0
    RELU = 1
    GELU = 2
    GELU_TANH = 3
    SILU = 4
    QUICK_GELU = 5


class Gate(IntEnum):
    """``ch_gate``: what forward saves for the backward pass of an activation."""

    OUTPUT = 0
    SLOPE = 1


class NormKind(IntEnum):
    """``ch_norm_kind``: layer norm, RMS norm, and RMS norm whose factor is ``1 + weight``."""

    LAYER = 0
    RMS = 1
    RMS_FROM_ONE = 2


class Rounding(IntEnum):
    """``ch_rounding``: how a quantised linear layer reads its input.

    As it is; or as 8-bit integers with a scale for each row, with a scale and a zero for each row, or with one scale
    and zero for all rows.
    """

    NONE = 0
    SYMMETRIC = 1
    ASYMMETRIC = 2
    TENSOR = 3


class Stored(IntEnum):
    """How the block operator reads a weight: from its tensor, from panels, as 8-bit or 4-bit integers, or as 8-bit
    integers from panels."""

    PLAIN = 0
    PANELS = 1
    INT8 = 2
    INT4 = 3
    INT8_PANELS = 4


class Feature(IntEnum):
    """``ch_feature_map``."""

    IDENTITY = 0
    ELU = 1
    RELU = 2


class Side(IntEnum):
    """Which gradients attention's backward computes: all, those of queries, or those of keys and values."""

    BOTH = 0
    QUERIES = 1
    KEYS = 2
