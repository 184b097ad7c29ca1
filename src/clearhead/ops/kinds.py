"""Kinds that the operators take as numbers: activations, what their backward reads, and norms."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Activation", "Gate", "NormKind"]


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
