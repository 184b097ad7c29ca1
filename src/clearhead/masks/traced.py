"""A user's predicate converted to intervals of keys by tracing, so that empty tiles are skipped without evaluating it.

A part that depends on ``q_pos - k_pos`` alone is a few intervals of distances, a part that depends on the key alone a
few intervals of keys. A comparison of a value of the query with a value of the key gives intervals if the keys' values
are sorted (by binary search), or if equal ones are neighbours (as document ids are). ``& | ~`` combine intervals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.masks.intervals import MAX_INTERVALS, Intervals
from clearhead.shapes import Bool, Int
from clearhead.tracing import (
    COMPARISONS,
    INDICES,
    KEY,
    MOST_POSITIONS,
    QUERY,
    StandIn,
    evaluated,
    facts_of,
    few,
    named,
    trace,
)

__all__ = ["traced_intervals"]

_MIRRORED: Final = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_SYMBOLS: Final = {func: symbol for symbol, names in COMPARISONS.items() for func in named(names)}
_AND, _OR, _NOT = (
    frozenset(named(names))
    for names in (
        "logical_and bitwise_and __and__ __rand__",
        "logical_or bitwise_or __or__ __ror__",
        "logical_not bitwise_not __invert__",
    )
)


class _Places:
    """The places of a call: batch entries, heads and queries as index tensors, and the number of keys."""

    def __init__(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> None:
        self.batch, self.head, self.q_pos, self.k_len = batch, head, q_pos, k_len
        self.zero = q_pos.new_zeros(1, 1, 1, 1)
        self.k_pos = torch.arange(k_len, device=q_pos.device).view(1, 1, 1, -1)

    def of(self, part: Any, *, q_pos: Tensor | None = None, k_pos: Tensor | None = None) -> Tensor:
        """A part of the predicate evaluated at some queries and keys; position 0 stands for those not given."""
        places = (self.batch, self.head, self.zero if q_pos is None else q_pos, self.zero if k_pos is None else k_pos)
        values = (
            evaluated(part, places) if isinstance(part, StandIn) else torch.as_tensor(part, device=self.zero.device)
        )
        # An operand has as many axes as it needs.
        return values.reshape((1,) * (4 - values.ndim) + tuple(values.shape))


def traced_intervals(
    fn: Callable[..., Any],
    batch: Tensor,
    head: Tensor,
    q_pos: Int[Tensor, "1 1 q_len 1"],
    k_len: int,
    *,
    evaluate: Callable[..., Tensor] | None = None,
) -> Intervals | None:
    """The intervals of keys that a predicate ``fn(batch, head, q_pos, k_pos)`` allows each query.

    Args:
        fn: the predicate, which is called on stand-ins.
        batch: batch indices, ``[batch, 1, 1, 1]``.
        head: head indices, ``[1, heads, 1, 1]``.
        q_pos: absolute positions of the queries.
        k_len: number of keys.
        evaluate: evaluates the predicate on index tensors that broadcast; by default ``fn`` itself.

    Returns:
        The intervals; None if tracing cannot show that they are few.

    Cost: one call of the function on one place and one on a few, and its operations on ``q_len + k_len`` places for
    each batch entry and head that it distinguishes.
    """
    if min(q_pos.numel(), k_len, batch.numel(), head.numel()) == 0:
        return None
    places = _Places(batch, head, q_pos, k_len)
    last = [index.flatten()[-1:].view(1, 1, 1, 1) for index in (batch, head, q_pos, places.k_pos)]
    # A predicate has no gradient; functions may use torch.no_grad.
    with torch.no_grad():
        result = trace(fn, list(zip(last, INDICES, strict=True)))
    if result is None or result.dtype != torch.bool or max(int(q_pos.max()), k_len) >= MOST_POSITIONS:
        return None
    try:
        intervals = _intervals(result, places)
        return intervals if intervals is not None and _holds(evaluate or fn, intervals, places) else None
    except Exception:  # a function may fail at places outside the call
        return None


def _holds(fn: Callable[..., Any], intervals: Intervals, places: _Places) -> bool:
    """Whether intervals equal the function's result at a few places: tracing misses a constant made from a stand-in."""
    rows, keys = few(places.q_pos.shape[2]), few(places.k_len)
    right = fn(places.batch, places.head, places.q_pos[:, :, rows], places.k_pos[..., keys])
    start, stop = (
        bound if bound.shape[2] == 1 else bound[:, :, rows]
        for bound in torch.broadcast_tensors(intervals.start, intervals.stop)
    )
    within = (places.k_pos[..., keys, None] >= start[..., None, :]) & (
        places.k_pos[..., keys, None] < stop[..., None, :]
    )
    inside = within.any(dim=-1)
    return bool((inside == right).all())


def _intervals(part: Any, places: _Places) -> Intervals | None:
    """The intervals of a part of the predicate."""
    facts = facts_of(part)
    if KEY not in facts.axes:
        allowed = places.of(part, q_pos=places.q_pos)
        stop = allowed.to(torch.int64) * places.k_len
        return Intervals(torch.zeros_like(stop), stop)
    if QUERY not in facts.axes:
        return _intervals_of_true(places.of(part, k_pos=places.k_pos))
    if facts.shift == 0.0:
        return _by_distance(part, places)
    func, operands, _ = part.made_by
    if part.dtype != torch.bool or any(getattr(one, "dtype", torch.bool) != torch.bool for one in operands):
        return _compared(_SYMBOLS.get(func), operands, places)
    operand_intervals = [_intervals(one, places) for one in operands] if func in _AND | _OR | _NOT else [None]
    if any(one is None for one in operand_intervals):
        return None
    first, *others = operand_intervals
    assert first is not None
    if func in _NOT:
        return first.complement(places.k_len)
    (other,) = others
    assert other is not None
    return first.intersect(other) if func in _AND else first.union(other)


def _by_distance(part: Any, places: _Places) -> Intervals | None:
    """Intervals of distances, converted to intervals of keys at each query."""
    low, high = int(places.q_pos.min()) - places.k_len + 1, int(places.q_pos.max())
    distances = torch.arange(low, high + 1, device=places.zero.device).view(1, 1, -1, 1)
    intervals = _intervals_of_true(places.of(part, q_pos=distances).transpose(2, 3))
    if intervals is None:
        return None
    # The distances from start to stop are the keys from q_pos - (stop - 1) to q_pos - start.
    start, stop = (places.q_pos - (bound + low) + 1 for bound in (intervals.stop.flip(-1), intervals.start.flip(-1)))
    return Intervals(start.clamp(0, places.k_len), stop.clamp(0, places.k_len))


def _compared(symbol: str | None, operands: tuple[Any, ...], places: _Places) -> Intervals | None:
    """The intervals of a comparison of a value of the query with a value of the key."""
    if symbol is None or len(operands) != 2:
        return None
    left, right = operands
    if KEY in facts_of(left).axes:
        left, right, symbol = right, left, _MIRRORED[symbol]
    if KEY in facts_of(left).axes or QUERY in facts_of(right).axes:
        return None
    of_query, of_key = places.of(left, q_pos=places.q_pos), places.of(right, k_pos=places.k_pos)
    dtype = torch.promote_types(of_query.dtype, of_key.dtype)
    shape = torch.broadcast_shapes(of_query.shape[:2], of_key.shape[:2])
    query = of_query.to(dtype).expand(*shape, places.q_pos.shape[2], 1)[..., 0].contiguous()
    key = of_key.to(dtype).expand(*shape, 1, places.k_len)[..., 0, :].contiguous()
    if symbol in ("==", "!="):
        same = _equal_intervals(query, key)
        return same if same is None or symbol == "==" else same.complement(places.k_len)
    return _ordered(symbol, query, key)


def _ordered(symbol: str, query: Tensor, key: Tensor) -> Intervals | None:
    """``query symbol key`` for sorted values of keys: all keys before a place, or all from it on."""
    steps = key[..., 1:] >= key[..., :-1]
    if not bool(steps.all()):
        if not bool((key[..., 1:] <= key[..., :-1]).all()):
            return None
        query, key, symbol = -query, -key, _MIRRORED[symbol]
    if query.is_floating_point() and bool(query.isnan().any() | key.isnan().any()):
        return None
    # query >= key and query < key split the keys at one place, query > key and query <= key at another.
    place = torch.searchsorted(key, query, right=symbol in (">=", "<"))[..., None]
    before = symbol in (">", ">=")
    limit = torch.zeros_like(place) if before else torch.full_like(place, key.shape[-1])
    return Intervals(limit, place) if before else Intervals(place, limit)


def _equal_intervals(query: Tensor, key: Tensor) -> Intervals | None:
    """``query == key`` where keys of equal value are neighbours, as those of one document are."""
    # NaN has no place among sorted values.
    if key.is_floating_point() and bool(key.isnan().any()):
        return None
    count = key.shape[-1]
    new = torch.ones_like(key, dtype=torch.bool)
    new[..., 1:] = key[..., 1:] != key[..., :-1]
    start = torch.where(new, torch.arange(count, device=key.device), count).sort(dim=-1).values
    start = start[..., : int(new.sum(dim=-1).max())].contiguous()
    stop = torch.cat([start[..., 1:], torch.full_like(start[..., :1], count)], dim=-1)
    largest = torch.inf if key.is_floating_point() else torch.iinfo(key.dtype).max
    value = key.gather(-1, start.clamp(max=count - 1)).masked_fill(start == count, largest)
    # Sort the intervals by value, stably: those of one query are then neighbours.
    value, order = value.sort(dim=-1, stable=True)
    first, last = (torch.searchsorted(value, query, right=right) for right in (False, True))
    if int((last - first).max()) > MAX_INTERVALS:
        return None
    place = first[..., None] + torch.arange(MAX_INTERVALS, device=key.device)
    chosen = order.gather(-1, place.clamp(max=order.shape[-1] - 1).flatten(-2))
    start, stop = (bound.gather(-1, chosen).view(place.shape) for bound in (start, stop))
    return Intervals(start, torch.where(place < last[..., None], stop, start)).bounded()


def _intervals_of_true(allowed: Bool[Tensor, "*rows keys"]) -> Intervals | None:
    """The intervals of True in each row; None if there are too many."""
    outside = torch.zeros_like(allowed[..., :1])
    previous, following = (
        torch.cat([outside, allowed[..., :-1]], dim=-1),
        torch.cat([allowed[..., 1:], outside], dim=-1),
    )
    first, last, count = allowed & ~previous, allowed & ~following, allowed.shape[-1]
    most = int(first.sum(dim=-1).max())
    if most > MAX_INTERVALS:
        return None
    places = torch.arange(count, device=allowed.device)
    start, stop = (
        torch.where(edges, places + shift, count).sort(dim=-1).values[..., : max(1, most)]
        for edges, shift in ((first, 0), (last, 1))
    )
    return Intervals(start, stop)
