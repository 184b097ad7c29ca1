"""Attention in graphs of ``torch.onnx.export``.

A call becomes torch's ``scaled_dot_product_attention``, which the exporter writes as ONNX's ``Attention`` from opset 23
on and as plain operators before. A call that ``Attention`` cannot express becomes the formula in plain operators.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from clearhead.errors import UnsupportedError
from clearhead.masks import Causal, Dense, Mask
from clearhead.masks.base import conjuncts, does_as
from clearhead.masks.parts import band_of
from clearhead.problem import Problem
from clearhead.scores import Alibi, DenseBias, RelativeBias, ScoreRule
from clearhead.torch_private import constant_when_compiled

__all__ = ["attention", "exporting", "output_of"]

_Indices = tuple[Tensor, Tensor, Tensor, Tensor]
#: Rules that add to scores. ``SoftCap`` is not among them: texts of the standard differ on whether Attention caps
#: scores before or after it masks them.
_ADDED: Final = (Alibi, RelativeBias, DenseBias)
_FUNCTION: Final = "attention"


@constant_when_compiled
def exporting() -> bool:
    """Whether ``torch.onnx.export`` records this call: it translates torch's operators alone."""
    # A process that has not imported the exporter does not export.
    exporter = sys.modules.get("torch.onnx")
    return exporter is not None and bool(exporter.is_in_onnx_export())


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None,
    scores: ScoreRule | Iterable[ScoreRule],
    scale: float | None,
    dropout: float,
    query_offset: int | None,
) -> Tensor:
    """``clearhead.attention`` in operators that the ONNX exporter translates.

    Args:
        query: ``[batch, heads, q_len, head_dim]``; leading axes may be missing.
        key: ``[batch, kv_heads, k_len, head_dim]``.
        value: ``[batch, kv_heads, k_len, value_dim]``.
        mask: which keys a query may attend to; None allows all.
        scores: score rules, applied in order.
        scale: factor on ``query @ key^T``; None for ``1 / sqrt(head_dim)``.
        dropout: must be 0.
        query_offset: absolute position of the first query; None for 0.

    Returns:
        The output, with as many leading axes as ``query``. An empty row is 0.

    Raises:
        UnsupportedError: there is dropout.
        ShapeError, MaskError: as ``clearhead.attention``, for what shapes tell; elements are not read.
    """
    problem = Problem.traced(
        _FUNCTION, query, key, value, mask=mask, scores=scores, scale=scale, dropout=dropout, query_offset=query_offset
    )
    if problem.dropout > 0.0:
        raise UnsupportedError.about(
            _FUNCTION,
            "dropout",
            must="be 0 under torch.onnx.export",
            got=problem.dropout,
            then="Call model.eval() first: ONNX's Attention has no dropout.",
        )
    output = output_of(problem)
    return output.reshape(output.shape[2 - problem.leading :])


def output_of(problem: Problem) -> Tensor:
    """The output of a call of ``Problem.traced`` without dropout, ``[batch, heads, q_len, value_dim]``, in operators
    that the ONNX exporter translates."""
    by_attention = all(type(rule) in _ADDED for rule in problem.scores)
    return (_by_attention if by_attention else _by_formula)(problem).to(problem.query.dtype)


def _by_attention(problem: Problem) -> Tensor:
    """The call as ``scaled_dot_product_attention``; rows that may be empty are set to 0 behind it."""
    query, key, value, scale = problem.query, problem.key, problem.value, problem.scale
    if problem.scores and query.dtype != problem.work_dtype:
        # A bias in 16 bits would lose digits.
        query, key, value = (part.to(problem.work_dtype) for part in (query, key, value))
    if scale <= 0.0 or query.dtype == torch.float64:
        # ONNX Runtime takes positive scales alone, and the attribute has float32.
        query, scale = query * _number(scale, query), 1.0
    causal = _is_upper_left(problem)
    table = None if causal else _table(problem)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=table, is_causal=causal, scale=scale, enable_gqa=_is_grouped(problem)
    )
    if table is None or not _may_be_empty(problem):
        return output
    empty = ~table.any(dim=-1, keepdim=True) if table.dtype == torch.bool else _is_forbidden(table).all(-1, True)
    return output.masked_fill(empty, 0.0)


def _table(problem: Problem) -> Tensor | None:
    """Mask and rules as one tensor ``[batch | 1, heads | 1, q_len, k_len]``: bool, or float to be added to scores."""
    indices = problem.indices()
    allowed = _allowed(problem, indices)
    if not problem.scores:
        return None if allowed is None else allowed.expand(-1, -1, problem.q_len, problem.k_len)
    bias = problem.query.new_zeros((1, 1, 1, 1), dtype=problem.work_dtype)
    for rule in problem.scores:
        bias = _apply(rule, bias, indices)
    if allowed is not None:
        bias = bias.masked_fill(~allowed, -torch.inf)
    return bias.expand(-1, -1, problem.q_len, problem.k_len)


def _by_formula(problem: Problem) -> Tensor:
    """``softmax(rules(scale * query @ key^T) where the mask allows) @ value``, in float32 or float64."""
    indices, dtype = problem.indices(), problem.work_dtype
    query, key, value = (part.to(dtype) for part in (problem.query, problem.key, problem.value))
    if _is_grouped(problem):
        group = problem.num_heads // problem.num_kv_heads
        key, value = (
            part.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(start_dim=1, end_dim=2) for part in (key, value)
        )
    scores = (query @ key.mT) * _number(problem.scale, query)
    for rule in problem.elementwise:
        scores = _apply(rule, scores, indices)
    allowed = _allowed(problem, indices)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    weights = _softmax(scores, problem)
    return weights.masked_fill(_is_forbidden(scores), 0.0) @ value


def _softmax(scores: Tensor, problem: Problem) -> Tensor:
    """Weights of the keys; a sink takes part in the sum. A row of -inf is NaN."""
    if problem.sink is None:
        return scores.softmax(dim=-1)
    logits = problem.sink.logits.to(scores.dtype).view(1, -1, 1, 1)
    logits = logits.expand(*scores.shape[:3], 1)
    return torch.cat([scores, logits], dim=-1).softmax(dim=-1)[..., :-1]


def _apply(rule: ScoreRule, scores: Tensor, indices: _Indices) -> Tensor:
    # A table of this call's queries and keys is added as it is, without looking up its elements.
    if isinstance(rule, DenseBias) and does_as(rule, DenseBias, "apply"):
        return scores + rule.bias.to(scores.dtype)
    return rule.apply(scores, *indices)


def _allowed(problem: Problem, indices: _Indices) -> Tensor | None:
    """The mask's values, of a shape that broadcasts to the scores; None without a mask."""
    allowed: Tensor | None = None
    for part in () if problem.mask is None else conjuncts(problem.mask):
        # A table of this call's queries and keys is read as it is, without looking up its elements.
        each = part.allowed if isinstance(part, Dense) and does_as(part, Dense) else part.allows(*indices)
        allowed = each if allowed is None else allowed & each
    return allowed


def _number(value: float, like: Tensor) -> Tensor:
    # The exporter rounds a number of Python's to float32.
    return torch.tensor(value, dtype=like.dtype, device=like.device)


def _is_forbidden(scores: Tensor) -> Tensor:
    return scores == -torch.inf


def _is_grouped(problem: Problem) -> bool:
    return bool(problem.num_heads != problem.num_kv_heads)


def _is_upper_left(problem: Problem) -> bool:
    """Whether the call is causal from the first key on, as ONNX's ``is_causal`` is, without rules."""
    return not problem.scores and type(problem.mask) is Causal and _is(problem.query_offset, 0)


def _may_be_empty(problem: Problem) -> bool:
    """Whether a query may have no key: not where each may attend to the first key or to itself."""
    if any(isinstance(rule, DenseBias) for rule in problem.scores):
        return True
    if problem.mask is None:
        return False
    band = band_of(problem.mask)
    if band is None:
        return True
    starts = band[0] is None and _is(problem.query_offset, 0)
    return not (starts or (_is(problem.query_offset, 0) and _is(problem.q_len, problem.k_len)))


def _is(size: int, other: int) -> bool:
    """Whether two sizes are equal, for every value of the symbols in them."""
    if isinstance(size, int) and isinstance(other, int):
        return size == other
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size == other)
