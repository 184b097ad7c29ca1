"""The formulas of linear attention in NumPy float64, independent of the library: loops over queries and keys.

A token's gate is an array of one number per feature; what a document or a padded batch is, the caller says by
``present``: for each query the keys it may read, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def elu(x: Array) -> Array:
    return np.where(x > 0, x + 1.0, np.exp(np.minimum(x, 0.0)))


def relu(x: Array) -> Array:
    return np.maximum(x, 0.0)


def identity(x: Array) -> Array:
    return x


def unit(x: Array) -> Array:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True))


def weighted(
    query: Array,
    key: Array,
    value: Array,
    present: Callable[[int], Sequence[int]],
    *,
    phi: Callable[[Array], Array],
    normalized: bool,
    gate: Array | None = None,
    scale: float = 1.0,
) -> Array:
    """One head as attention: every weight of every pair, decays multiplied up between the two tokens.

    ``query [q_len, dim]``, ``gate [k_len, features]`` in place of its logarithm.
    """
    output = np.zeros((query.shape[0], value.shape[1]))
    for i in range(query.shape[0]):
        total = 0.0
        for j in present(i):
            faded = phi(key[j])
            if gate is not None:
                for step in present(i):
                    if j < step <= i:
                        faded = faded * gate[step]
            weight = scale * float(np.dot(phi(query[i]), faded))
            total += weight
            output[i] += weight * value[j]
        if normalized:
            output[i] = output[i] / total if total != 0.0 else 0.0
    return output


def fast_weights(
    query: Array,
    key: Array,
    value: Array,
    rate: Array,
    *,
    phi: Callable[[Array], Array],
    gate: Array | None = None,
    scale: float = 1.0,
) -> Array:
    """One head under the delta rule as a memory that is rewritten: its matrix moved along one key at a time."""
    features = phi(key[0]).shape[0]
    memory = np.zeros((features, value.shape[1]))
    output = np.zeros((query.shape[0], value.shape[1]))
    for i in range(query.shape[0]):
        k = phi(key[i])
        if gate is not None:
            memory = np.diag(gate[i]) @ memory
        old = k @ memory
        new = rate[i] * value[i] + (1.0 - rate[i]) * old
        memory = memory + np.outer(k, new) - np.outer(k, old)
        output[i] = scale * (phi(query[i]) @ memory)
    return output
