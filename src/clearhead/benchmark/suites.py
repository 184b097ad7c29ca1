"""What is measured, as data: suites of rows, and the floors that their ratios have to reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from clearhead.benchmark.encoders import STACK, SWAPPED
from clearhead.benchmark.onnx_runtime import ONNX_OPERATORS
from clearhead.benchmark.peers import MODULE, OURS, SDPA, SDPA_WINDOW
from clearhead.benchmark.rows import AttentionRow, EncoderRow, ModuleRow, Row

__all__ = ["SUITES", "Floor", "Suite"]

_DTYPES = (torch.float32, torch.bfloat16)
_BOTH = ("float32", "bfloat16")
_FORWARD = ((8, 12, 128, 64), (8, 12, 512, 64), (1, 12, 2048, 64), (1, 12, 8192, 64), (1, 8, 2048, 128))
_TRAINING = tuple((b, h, min(length, 4096), d) for b, h, length, d in _FORWARD)
_DROPPED = ((8, 12, 512, 64), (1, 12, 2048, 64))
_DECODED = ((1, 4096), (16, 2048))
_MODULES = ((32, 100, 512, 8), (8, 128, 768, 12), (8, 512, 768, 12), (1, 2048, 768, 12), (2, 1024, 1024, 16))


@dataclass(frozen=True, kw_only=True)
class Floor:
    """How many times as fast as its peers clearhead has to be; the fastest peer of a row counts.

    Args:
        group: the rows it speaks of.
        against: the peers.
        each: what every row has to reach.
        mean: what the geometric mean has to reach.
        share: what share of the machine's product rate every row has to reach.
        only: a part of the titles it speaks of.
        ours: which of clearhead's contenders.
    """

    group: str
    against: tuple[str, ...] = ()
    each: float | None = None
    mean: float | None = None
    share: float | None = None
    only: str = ""
    ours: str = OURS


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Rows measured together."""

    about: str
    rows: Callable[[], Sequence[Row]]
    floors: tuple[Floor, ...]


def _forward() -> list[Row]:
    return [
        AttentionRow(
            shape=shape, causal=causal, dtype=dtype, yardstick=True,
            peers=(SDPA, *ONNX_OPERATORS) if dtype == torch.float32 else (SDPA,),
        )
        for dtype, shape, causal in product(_DTYPES, _FORWARD, (False, True))
    ]  # fmt: skip


def _training() -> list[Row]:
    return [
        AttentionRow(shape=shape, causal=causal, dtype=dtype, training=True, yardstick=True)
        for dtype, shape, causal in product(_DTYPES, _TRAINING, (False, True))
    ]


def _dropout() -> list[Row]:
    return [
        AttentionRow(shape=shape, dtype=dtype, training=True, dropout=0.1)
        for dtype, shape in product(_DTYPES, _DROPPED)
    ]


def _decode() -> list[Row]:
    return [
        AttentionRow(shape=(batch, 32, 1, 128), kv_heads=8, k_len=k_len, dtype=dtype)
        for dtype, (batch, k_len) in product(_DTYPES, _DECODED)
    ]


def _window() -> list[Row]:
    return [
        AttentionRow(shape=(1, 12, 8192, 64), causal=True, window=255, dtype=dtype, peers=(SDPA, SDPA_WINDOW))
        for dtype in _DTYPES
    ]


def _module() -> list[Row]:
    return [ModuleRow(size=size, dtype=dtype) for dtype, size in product(_DTYPES, _MODULES)]


def _module_training() -> list[Row]:
    return [
        ModuleRow(size=size, dtype=dtype, training=True, dropout=dropout)
        for dtype, dropout, size in product(_DTYPES, (0.0, 0.1), _MODULES)
    ]


def _encoder() -> list[Row]:
    return [
        EncoderRow(
            batch=16, longest=256, embed_dim=512, num_heads=8, num_layers=4, feedforward_dim=2048, dtype=dtype,
            dropout=dropout,
        )
        for dtype, dropout in product(_DTYPES, (0.0, 0.1))
    ]  # fmt: skip


SUITES: dict[str, Suite] = {
    "forward": Suite(
        about="attention forward, full and causal, against SDPA and ONNX Runtime",
        rows=_forward,
        floors=(
            Floor(group="float32", against=(SDPA,), each=2.0, mean=2.4),
            Floor(group="bfloat16", against=(SDPA,), each=3.5, mean=4.5),
            Floor(group="float32", against=ONNX_OPERATORS, each=1.1),
            Floor(group="float32", share=0.85, only="1x12x8192x64 full"),
            Floor(group="bfloat16", share=0.78, only="1x12x8192x64 full"),
        ),
    ),
    "training": Suite(
        about="attention forward and backward, full and causal, against SDPA",
        rows=_training,
        floors=(
            Floor(group="float32", against=(SDPA,), mean=2.3),
            Floor(group="bfloat16", against=(SDPA,), mean=3.0),
        ),
    ),
    "dropout": Suite(
        about="attention forward and backward with dropout 0.1, against SDPA",
        rows=_dropout,
        floors=(
            Floor(group="float32", against=(SDPA,), each=6.0),
            Floor(group="bfloat16", against=(SDPA,), each=9.0),
        ),
    ),
    "decode": Suite(
        about="one query over a long cache, grouped heads, against SDPA",
        rows=_decode,
        floors=(
            Floor(group="float32", against=(SDPA,), each=2.0),
            Floor(group="bfloat16", against=(SDPA,), each=10.0),
        ),
    ),
    "window": Suite(
        about="Causal & Window(255) at 8192 tokens, against SDPA doing all that is causal",
        rows=_window,
        floors=tuple(Floor(group=group, against=(SDPA,), each=20.0) for group in _BOTH),
    ),
    "module": Suite(
        about="MultiHeadAttention forward, against nn.MultiheadAttention without weights",
        rows=_module,
        floors=(
            Floor(group="float32", against=(MODULE,), each=1.8, mean=2.5),
            Floor(group="bfloat16", against=(MODULE,), mean=1.6),
        ),
    ),
    "module-training": Suite(
        about="MultiHeadAttention forward and backward, dropout 0 and 0.1, against nn.MultiheadAttention",
        rows=_module_training,
        floors=(
            Floor(group="float32", against=(MODULE,), mean=2.2),
            Floor(group="float32, dropout 0.1", against=(MODULE,), mean=3.5),
            Floor(group="bfloat16", against=(MODULE,), mean=2.3),
            Floor(group="bfloat16, dropout 0.1", against=(MODULE,), mean=4.0),
        ),
    ),
    "encoder": Suite(
        about="training step of four encoder layers on a half-filled batch, against nn.TransformerEncoder",
        rows=_encoder,
        floors=tuple(
            Floor(group=group, against=(STACK,), each=3.0, ours=ours) for group in _BOTH for ours in (OURS, SWAPPED)
        ),
    ),
}
"""Every suite by its name."""
