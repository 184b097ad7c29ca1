"""Calls of attention over a sharded sequence, each with the tensors of its rules that learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

import clearhead as ch

__all__ = ["CASES", "Case"]

#: Options of the call for so many heads and tokens, and the learned tensors.
Case = Callable[[int, int], tuple[dict[str, Any], list[Tensor]]]


def _rules(heads: int, length: int) -> tuple[dict[str, Any], list[Tensor]]:
    table, logits = torch.randn(heads, 21).requires_grad_(), torch.randn(heads).requires_grad_()
    return {"mask": ch.Causal(), "scores": [ch.RelativeBias(table), ch.SoftCap(3.0), ch.Sink(logits)]}, [table, logits]


def _dense(heads: int, length: int) -> tuple[dict[str, Any], list[Tensor]]:
    bias = torch.randn(heads, length, length).requires_grad_()
    return {"mask": ch.Dense(torch.rand(length, length) > 0.5), "scores": ch.DenseBias(bias)}, [bias]


def _functions(heads: int, length: int) -> tuple[dict[str, Any], list[Tensor]]:
    table = torch.randn(heads, length).requires_grad_()
    rule = ch.ScoreFunction(lambda score, b, h, q, k: score + table[h, k] * 0.3 * torch.cos(0.1 * q))
    return {"scores": rule, "mask": ch.MaskFunction(lambda b, h, q, k: (q + k + h) % 3 != 0)}, [table]


def _documents(heads: int, length: int) -> tuple[dict[str, Any], list[Tensor]]:
    third = length // 3
    return {"mask": ch.Causal() & ch.Documents(lengths=[third, third + 1, length - 2 * third - 1])}, []


def _slopes(heads: int, length: int) -> tuple[dict[str, Any], list[Tensor]]:
    slopes = torch.rand(heads).requires_grad_()
    return {"scores": ch.Alibi(slopes=slopes), "scale": 0.2}, [slopes]


CASES: Final[Mapping[str, Case]] = {
    "full": lambda heads, length: ({}, []),
    "causal": lambda heads, length: ({"mask": ch.Causal()}, []),
    "window": lambda heads, length: ({"mask": ch.Window(9, after=2)}, []),
    "prefix or window": lambda heads, length: ({"mask": ch.Prefix(5) | (ch.Causal() & ch.Window(4))}, []),
    "documents": _documents,
    "padding": lambda heads, length: ({"mask": ch.Padding([length // 4, 0])}, []),
    "blocks": lambda heads, length: (
        {"mask": ch.Blocks(torch.rand(2, 1, length // 8 + 1, length // 8 + 1) > 0.4, 8)},
        [],
    ),
    "blocks by head": lambda heads, length: (
        {"mask": ch.Blocks(torch.rand(1, heads, length // 8 + 1, length // 8 + 1) > 0.4, 8)},
        [],
    ),
    "dropout": lambda heads, length: ({"mask": ch.Causal(), "dropout": 0.3, "seed": 7}, []),
    "rules": _rules,
    "learned slopes": _slopes,
    "dense": _dense,
    "functions": _functions,
}
