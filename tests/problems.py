"""Problems that tests share: named masks and rules, each with its definition in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import clearhead as ch

BATCH, HEADS, LEN = 2, 4, 13
_generator = torch.Generator().manual_seed(7)
BLOCK_TABLE = torch.rand(4, 4, generator=_generator) > 0.5
DENSE = torch.rand(BATCH, HEADS, LEN, LEN, generator=_generator) > 0.6
TABLE = torch.randn(HEADS, 7, generator=_generator, dtype=torch.float64)
BIAS = torch.randn(HEADS, LEN, LEN, generator=_generator, dtype=torch.float64)
SINKS = torch.randn(HEADS, generator=_generator, dtype=torch.float64)
SLOPES = [0.25, 0.0625, 0.015625, 0.00390625]
IDS = torch.tensor([[0] * 5 + [1] * 8, [0, 1] * 6 + [-1]])


@dataclass(frozen=True)
class NamedMask:
    mask: ch.Mask | None
    plain: Callable[[int, int, int, int], bool]


@dataclass(frozen=True)
class NamedRule:
    rules: tuple[ch.ScoreRule, ...]
    plain: tuple[Callable[..., float], ...] = ()
    sink: Tensor | None = None


def _document(lengths: list[int]) -> list[int]:
    return [number for number, length in enumerate(lengths) for _ in range(length)]


_doc = _document([5, 1, 7])

MASKS: dict[str, NamedMask] = {
    "none": NamedMask(None, lambda b, h, i, j: True),
    "causal": NamedMask(ch.Causal(), lambda b, h, i, j: j <= i),
    "window": NamedMask(ch.Window(3, 2), lambda b, h, i, j: i - 3 <= j <= i + 2),
    "causal window": NamedMask(ch.Causal() & ch.Window(2), lambda b, h, i, j: i - 2 <= j <= i),
    "prefix": NamedMask(ch.Prefix(4) | ch.Causal(), lambda b, h, i, j: j < 4 or j <= i),
    "padding": NamedMask(ch.Padding([LEN, 5]), lambda b, h, i, j: j < (LEN, 5)[b]),
    "padding to nothing": NamedMask(ch.Padding([0, 5]) & ch.Causal(), lambda b, h, i, j: j < (0, 5)[b] and j <= i),
    "documents": NamedMask(ch.Documents(lengths=[5, 1, 7]), lambda b, h, i, j: _doc[i] == _doc[j]),
    "causal documents": NamedMask(
        ch.Documents(lengths=[5, 1, 7]) & ch.Causal(), lambda b, h, i, j: _doc[i] == _doc[j] and j <= i
    ),
    "document ids": NamedMask(
        ch.Documents(ids=IDS), lambda b, h, i, j: IDS[b, i] >= 0 and bool(IDS[b, i] == IDS[b, j])
    ),
    "global": NamedMask(ch.Global(2) | ch.Window(1), lambda b, h, i, j: i < 2 or j < 2 or i - 1 <= j <= i),
    "strided": NamedMask(ch.Strided(3) & ch.Causal(), lambda b, h, i, j: (i - j) % 3 == 0 and j <= i),
    "blocks": NamedMask(ch.Blocks(BLOCK_TABLE, 4), lambda b, h, i, j: bool(BLOCK_TABLE[i // 4, j // 4])),
    "dense": NamedMask(ch.Dense(DENSE), lambda b, h, i, j: bool(DENSE[b, h, i, j])),
    "function": NamedMask(
        ch.MaskFunction(lambda b, h, i, j: (i + j + h) % 3 != 0), lambda b, h, i, j: (i + j + h) % 3 != 0
    ),
    "not causal": NamedMask(~ch.Causal(), lambda b, h, i, j: j > i),
    "not either": NamedMask(~(ch.Window(2) | ch.Prefix(3)), lambda b, h, i, j: not (i - 2 <= j <= i or j < 3)),
    "nothing": NamedMask(ch.Dense(torch.zeros(1, 1, dtype=torch.bool)), lambda b, h, i, j: False),
}


def _capped(score: float, *_: Any) -> float:
    return float(2.0 * torch.tanh(torch.tensor(score / 2.0, dtype=torch.float64)))


RULES: dict[str, NamedRule] = {
    "none": NamedRule(()),
    "alibi": NamedRule((ch.Alibi(HEADS),), (lambda s, b, h, i, j: s - SLOPES[h] * abs(i - j),)),
    "relative, then cap": NamedRule(
        (ch.RelativeBias(TABLE), ch.SoftCap(2.0)),
        (lambda s, b, h, i, j: s + float(TABLE[h, min(max(i - j, -3), 3) + 3]), _capped),
    ),
    "cap, then dense bias": NamedRule(
        (ch.SoftCap(2.0), ch.DenseBias(BIAS)), (_capped, lambda s, b, h, i, j: s + float(BIAS[h, i, j]))
    ),
    "sink": NamedRule((ch.Sink(SINKS),), (), SINKS),
    "function": NamedRule(
        (ch.ScoreFunction(lambda s, b, h, i, j: 1.5 * s - 0.125 * (i - j).abs() * (h + 1)),),
        (lambda s, b, h, i, j: 1.5 * s - 0.125 * abs(i - j) * (h + 1),),
    ),
}


def tensors(
    *, dtype: torch.dtype = torch.float32, batch: int = BATCH, heads: int = HEADS, kv_heads: int = 2,
    q_len: int = LEN, k_len: int = LEN, head_dim: int = 8, value_dim: int = 6, seed: int = 0, size: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Random query, key and value that want gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (size * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()

    return (
        draw(batch, heads, q_len, head_dim),
        draw(batch, kv_heads, k_len, head_dim),
        draw(batch, kv_heads, k_len, value_dim),
    )
