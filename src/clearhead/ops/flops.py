"""FLOPs of the operators for ``torch.utils.flop_counter.FlopCounterMode``: two for each multiplication of a GEMM.

Attention counts the pairs of query and key that ``before`` and ``after`` allow, so a causal call counts half of a full
one. Masks given as tensors count as full: their elements are not looked at. Element-wise work counts nothing, as in
torch's own formulas.

A formula takes the arguments that it reads by the names of the operator's schema; a tensor is its shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from clearhead.ops.block_shapes import Shape
from clearhead.ops.kinds import Side

__all__ = ["FLOPS", "pairs"]


def pairs(q_len: int, k_len: int, before: int | None, after: int | None, offset: int) -> int:
    """Pairs of query and key with ``-after <= q_pos - k_pos <= before``."""

    def keys_before(first: int) -> int:
        """The sum over queries ``i`` of ``first + i`` cut to 0 and ``k_len``."""
        return _cut_sum(first + q_len, k_len) - _cut_sum(first, k_len)

    stop = q_len * k_len if after is None else keys_before(offset + after + 1)
    start = 0 if before is None else keys_before(offset - before)
    return max(0, stop - start)


def _cut_sum(count: int, most: int) -> int:
    """The sum of all integers below ``count``, negative ones as 0 and large ones as ``most``."""
    if count <= 0:
        return 0
    within = min(count, most + 1)
    return within * (within - 1) // 2 + (count - within) * most


def _channels(query: Shape, key: Shape, value: Shape) -> int:
    """Channels of a value: int8 rows of keys and values are longer by their scale than the query's."""
    return value[3] - (key[3] - query[3])


def _attention(head_dims: int, value_dims: int) -> Callable[..., int]:
    """A formula of so many GEMMs with each of the two head sizes, between the queries and keys that may meet."""

    def flops(
        query: Shape,
        key: Shape,
        value: Shape,
        before: int | None = None,
        after: int | None = None,
        query_offset: int = 0,
        **others: Any,
    ) -> int:
        batch, heads, q_len, head_dim = query
        count = batch * heads * pairs(q_len, key[2], before, after, query_offset)
        return 2 * count * (head_dims * head_dim + value_dims * _channels(query, key, value))

    return flops


def _attention_paged(query: Shape, key: Shape, value: Shape, block_table: Shape, **others: Any) -> int:
    """Every query with all keys that its row of the table holds: lengths are elements, which are not looked at."""
    batch, heads, q_len, head_dim = query
    return 2 * batch * heads * q_len * block_table[1] * key[1] * (head_dim + _channels(query, key, value))


#: ``Q K^T`` and ``P V``.
_FORWARD: Final = _attention(1, 1)
#: ``Q K^T`` once more, ``dO V^T``, ``P^T dO``, ``dS K`` and ``dS^T Q``.
_GRADIENTS: Final = _attention(3, 2)
#: Those that the gradients of queries, or of keys and values, need.
_SIDES: Final = {Side.BOTH: _GRADIENTS, Side.QUERIES: _attention(2, 1), Side.KEYS: _attention(2, 2)}


def _attention_gradients(side: int = Side.BOTH, **others: Any) -> int:
    return _SIDES[Side(side)](**others)


class _Chunks:
    """Multiplications of a linear attention's GEMMs, for each head of a batch entry."""

    def __init__(self, length: int, chunk: int, features: int, value_dim: int) -> None:
        full, rest = divmod(length, chunk)
        self.state = length * features * value_dim
        #: Pairs of tokens within chunks: a token with itself and earlier ones, and with earlier ones alone.
        self.pairs = full * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2
        self.earlier = self.pairs - length
        self.features, self.value_dim = features, value_dim


def _linear_attention_forward(
    query: Shape, key: Shape, value: Shape, rate: Shape | None, chunk: int, **others: Any
) -> int:
    """Per query head ``Q S``, ``Q K^T`` and ``P V``; per key head ``K^T V``, and the delta rule's triangular system."""
    batch, kv_heads, length, features = key
    work = _Chunks(length, chunk, features, value[3])
    per_head = work.state + work.pairs * (features + value[3])
    per_kv_head = work.state + (0 if rate is None else _correction(work))
    return 2 * batch * (query[1] * per_head + kv_heads * per_kv_head)


def _correction(work: _Chunks) -> int:
    """``K S``, ``K K^T`` and the solution of the triangular system."""
    return work.state + work.earlier * (work.features + work.value_dim)


def _linear_attention_gradients(
    query: Shape, key: Shape, value: Shape, rate: Shape | None, chunk: int, **others: Any
) -> int:
    """Per query head ``dO S^T``, ``Q^T dO``, ``dO V^T``, ``P^T dO``, ``Q K^T``, ``D K`` and ``D^T Q``; per key head
    ``K dS`` and ``V dS^T``; under the delta rule its system, the transposed one, and their gradients."""
    batch, kv_heads, length, features = key
    work = _Chunks(length, chunk, features, value[3])
    per_head = 2 * work.state + work.pairs * (3 * features + 2 * value[3])
    per_kv_head = 2 * work.state
    if rate is not None:
        per_kv_head += _correction(work) + 2 * work.state + work.earlier * (2 * features + 2 * value[3])
    return 2 * batch * (query[1] * per_head + kv_heads * per_kv_head)


FLOPS: Final[dict[str, Callable[..., int]]] = {
    "attention_forward": _FORWARD,
    "attention_compiled": _FORWARD,
    "attention_gradients": _attention_gradients,
    "attention_paged": _attention_paged,
    "attention_compiled_gradients": _GRADIENTS,
    "linear_attention_forward": _linear_attention_forward,
    "linear_attention_gradients": _linear_attention_gradients,
}
"""Every operator's FLOPs by its name, from the shapes of its arguments."""
