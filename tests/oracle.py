"""The formula in NumPy float64, independent of the library: loops over rows, masks as Python functions.

A mask here is a function ``(batch, head, i, j) -> bool`` of absolute positions, a rule a function
``(score, batch, head, i, j) -> score``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    allowed: Callable[..., bool] = lambda b, h, i, j: True,
    rules: tuple[Callable[..., float], ...] = (),
    scale: float | None = None,
    sink: Array | None = None,
    offset: int = 0,
) -> tuple[Array, Array, Array]:
    """Output, weights and log-sum-exp of ``[batch, heads, len, dim]`` arrays.

    NaN and infinity count by IEEE arithmetic over allowed keys; a row whose every score is -inf is empty.
    """
    batch, heads, q_len, head_dim = query.shape
    kv_heads, k_len = key.shape[1], key.shape[2]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    output = np.zeros((batch, heads, q_len, value.shape[3]))
    weights = np.zeros((batch, heads, q_len, k_len))
    lse = np.full((batch, heads, q_len), -np.inf)
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            for i in range(q_len):
                row = []
                for j in range(k_len):
                    if not allowed(b, h, i + offset, j):
                        continue
                    score = scale * float(_dot(query[b, h, i], key[b, kv, j]))
                    for rule in rules:
                        score = rule(score, b, h, i + offset, j)
                    row.append((j, score))
                terms = [score for _, score in row] + ([] if sink is None else [float(sink[h])])
                if all(term == -math.inf for term in terms):
                    # Weights of 0 still meet the values.
                    output[b, h, i] = sum((0.0 * value[b, kv, j] for j, _ in row), np.zeros(value.shape[3]))
                    continue
                top = float(np.max(terms))
                total = sum(math.exp(term - top) for term in terms)
                lse[b, h, i] = top + math.log(total)
                for j, score in row:
                    weights[b, h, i, j] = math.exp(score - lse[b, h, i])
                    with np.errstate(invalid="ignore"):
                        output[b, h, i] += weights[b, h, i, j] * value[b, kv, j]
    return output, weights, lse


def _dot(one: Array, other: Array) -> np.float64:
    with np.errstate(invalid="ignore"):
        return np.float64(np.sum(one * other))
