"""``clearhead::attention_compiled_gradients``: gradients of attention in graphs of the compiler.

The operator has a Python body: if there are NaNs or infinities under a mask, gradients are computed a second time
without them, and a graph cannot contain that branch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.backends import native_gradients
from clearhead.masks import Causal, Window
from clearhead.ops.attention import DENSE, RELATIVE, SLOPE, SOFTCAP, Saved
from clearhead.ops.fakes import register_flops
from clearhead.problem import Problem
from clearhead.scores import Alibi, DenseBias, RelativeBias, ScoreRule, Sink, SoftCap

__all__ = ["gradients"]

#: A window of this size has no limit.
_FAR: Final = 2**30


def gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: list[Tensor],
    scale: float,
    before: int | None,
    after: int | None,
    query_offset: int,
    rule_kinds: list[int],
    rule_values: list[float],
    rule_tables: list[Tensor],
    sink: Tensor | None,
    learned: list[bool],
) -> list[Tensor]:
    """Gradients of query, key, value and of the rules' learned tensors."""
    softmax, exact = rows[-2:]
    lse = rows[0] if sink is not None else None
    tables = [table.detach().requires_grad_(each) for table, each in zip(rule_tables, learned, strict=False)]
    logits = None if sink is None else sink.detach().requires_grad_(learned[-1])
    mask = Causal() if before is None else Window(before, _FAR if after is None else after)
    problem = Problem.of(
        "attention",
        query.detach(),
        key.detach(),
        value.detach(),
        mask=None if before is None and after is None else mask,
        scores=[*_rules(rule_kinds, rule_values, tables), *([] if logits is None else [Sink(logits)])],
        scale=scale,
        query_offset=query_offset,
    )
    # The rules' parameters in their order, a sink's last.
    saved, arrived = Saved(exact, lse, softmax), native_gradients.Arrived(grad)
    return [part.contiguous() for part in native_gradients.gradients(problem, saved, arrived)]


def _without_elements(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, rows: list[Tensor], *others: Any
) -> list[Tensor]:
    *_, rule_tables, sink, learned = others
    parts = [*rule_tables, *([] if sink is None else [sink])]
    flags = learned if sink is not None else learned[:-1]
    wanted = [part for part, each in zip(parts, flags, strict=True) if each]
    return [part.new_empty(tuple(part.shape)) for part in (query, key, value, *wanted)]


def _rules(kinds: Iterable[int], values: Iterable[float], tables: Iterable[Tensor]) -> list[ScoreRule]:
    caps, tensors = iter(values), iter(tables)
    made: dict[int, Any] = {
        SLOPE: lambda: Alibi(slopes=next(tensors)),
        RELATIVE: lambda: RelativeBias(next(tensors)),
        DENSE: lambda: DenseBias(next(tensors)),
        SOFTCAP: lambda: SoftCap(next(caps)),
    }
    return [made[kind]() for kind in kinds]


_NAME: Final = "attention_compiled_gradients"
torch.library.custom_op(f"clearhead::{_NAME}", gradients, mutates_args=()).register_fake(_without_elements)
register_flops(_NAME, list(inspect.signature(gradients).parameters))
