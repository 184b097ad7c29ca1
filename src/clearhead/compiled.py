"""Attention in graphs of torch.compile and torch.export by one C++ operator, which AOTInductor runs without Python.

``clearhead::attention_compiled`` is ``attention_forward`` with autograd registered (docs/adr/0005).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

# Defines the operator of the gradients.
from clearhead import compiled_gradients as compiled_gradients
from clearhead.backends import native
from clearhead.choices import covers
from clearhead.masks import Mask
from clearhead.masks.parts import band_of
from clearhead.ops.attention import DENSE, RELATIVE, SLOPE, SOFTCAP
from clearhead.ops.kinds import DTYPES, MAX_HEAD_DIM, MAX_RULES
from clearhead.ops.library import reason
from clearhead.scores import Alibi, DenseBias, RelativeBias, ScoreRule, Sink, SoftCap
from clearhead.torch_private import constant_when_compiled

__all__ = ["attention"]

_LSE, _SOFTMAX, _OUTPUT32 = 1, 2, 4
_FLOAT32: Final = torch.finfo(torch.float32)
#: Limit of the kernels for lengths and positions.
_MOST: Final = 2**30
_KINDS: Final = {Alibi: SLOPE, RelativeBias: RELATIVE, DenseBias: DENSE, SoftCap: SOFTCAP}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None,
    scores: Sequence[ScoreRule],
    scale: float | None,
    dropout: float,
    query_offset: int | None,
    backend: str,
) -> Tensor | None:
    """``clearhead.attention`` under the compiler, as one C++ operator.

    Args:
        query: ``[batch, heads, q_len, head_dim]``; leading axes may be missing.
        key: ``[batch, kv_heads, k_len, head_dim]``.
        value: ``[batch, kv_heads, k_len, value_dim]``.
        mask: which keys a query may attend to; None allows all.
        scores: score rules, applied in order.
        scale: factor on ``query @ key^T``; None for ``1 / sqrt(head_dim)``.
        dropout: probability of dropping a weight.
        query_offset: absolute position of the first query; None for 0.
        backend: name of the backend.

    Returns:
        The output; None if the mask is no band of positions, there is dropout, a rule is a user's function, or an
        argument is wrong: the operators of ``torch_op`` then compute the call or raise the error.
    """
    band = (None, None) if mask is None else band_of(mask)
    if band is None or backend not in ("auto", native.BACKEND.name) or dropout or not _has_operator():
        return None
    if not all(2 <= part.ndim <= 4 for part in (query, key, value)):
        return None
    leading = query.ndim - 2
    query, key, value = (
        part if part.ndim == 4 else part.reshape((1,) * (4 - part.ndim) + part.shape) for part in (query, key, value)
    )
    reads_positions = mask is not None or any(rule.position_dependent for rule in scores)
    if not (_fit(query, key, value) and _rules_fit(scores, query, key)):
        return None
    if query_offset is None and reads_positions and query.shape[2] != key.shape[2]:
        return None
    offset = 0 if query_offset is None else query_offset
    factor = query.shape[3] ** -0.5 if scale is None else scale
    if not (_is_position(offset) and isinstance(factor, float)):
        return None
    if not (factor == 0.0 or _FLOAT32.tiny <= abs(factor) <= _FLOAT32.max):
        return None
    output = _call(query, key, value, factor, band, offset, scores)
    return output if leading == 2 else output.reshape(output.shape[2 - leading :])


def _is_position(offset: object) -> bool:
    """Whether the kernels take an offset. A symbolic one must have bounds that say so: to ask it would add a guard."""
    if isinstance(offset, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(offset > -_MOST) and statically_known_true(offset < _MOST)
    return isinstance(offset, int) and -_MOST < offset < _MOST


@constant_when_compiled
def _has_operator() -> bool:
    return reason() is None


def _fit(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels take these tensors, ``[batch, heads, len, channels]`` each."""
    for part in (query, key, value):
        if part.device.type != "cpu" or part.layout is not torch.strided or part.is_nested:
            return False
        if part.dtype is not query.dtype or part.shape[0] != query.shape[0] or not 1 <= part.shape[3] <= MAX_HEAD_DIM:
            return False
    if query.dtype not in DTYPES or not covers(query.dtype):
        return False
    if key.shape[3] != query.shape[3] or key.shape[1:3] != value.shape[1:3]:
        return False
    return key.shape[1] > 0 and query.shape[1] % key.shape[1] == 0


def _rules_fit(rules: Sequence[ScoreRule], query: Tensor, key: Tensor) -> bool:
    """Whether the kernels take the rules, and have gradients for the learned ones."""
    if len(rules) > MAX_RULES or any(type(rule) is not Sink and type(rule) not in _KINDS for rule in rules):
        return False
    for kind in (Sink, SoftCap):
        if sum(type(rule) is kind for rule in rules) > 1:
            return False
    heads = query.shape[1]
    for rule in rules:
        if isinstance(rule, SoftCap) and not _FLOAT32.tiny <= rule.cap <= _FLOAT32.max:
            return False
        for tensor in rule.tensors():
            if tensor.device.type != "cpu" or tensor.dtype not in DTYPES:
                return False
            learned = torch.is_grad_enabled() and tensor.requires_grad
            if isinstance(rule, DenseBias):
                sizes = (query.shape[0], heads, query.shape[2], key.shape[2])
                if any(length not in (1, size) for length, size in zip(tensor.shape, sizes, strict=True)):
                    return False
                if learned and tensor.shape[3] != key.shape[2]:
                    return False
            elif tensor.shape[0] not in (1, heads) or (learned and isinstance(rule, Alibi)):
                return False
    return True


def _call(
    query: Tensor, key: Tensor, value: Tensor, scale: float, band: tuple[int | None, int | None], query_offset: int,
    rules: Sequence[ScoreRule],
) -> Tensor:  # fmt: skip
    kinds: list[int] = []
    values: list[float] = []
    tables: list[Tensor] = []
    sink = None
    for rule in rules:
        wide = [part if part.dtype is torch.float32 else part.to(torch.float32) for part in rule.tensors()]
        if isinstance(rule, Sink):
            (sink,) = wide
            continue
        kinds.append(_KINDS[type(rule)])
        if isinstance(rule, SoftCap):
            values.append(rule.cap)
        # A bias may be expanded.
        strided = isinstance(rule, DenseBias) and wide[0].stride(3) == 1
        tables += wide if strided else [part.contiguous() for part in wide]
    learned = torch.is_grad_enabled() and any(
        part.requires_grad for part in (query, key, value, *tables, *([] if sink is None else [sink]))
    )
    returns = (_SOFTMAX | _OUTPUT32 | (0 if sink is None else _LSE)) if learned else 0
    results: list[Tensor] = torch.ops.clearhead.attention_compiled.default(
        query, key, value, scale, returns, *band, query_offset=query_offset, rule_kinds=kinds or None,
        rule_values=values or None, rule_tables=tables or None, sink=sink,
    )  # fmt: skip
    return results[0]
