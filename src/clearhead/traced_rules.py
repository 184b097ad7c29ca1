"""A user's score function that caps the score, adds a bias, or both, found by tracing it: the CPU kernels know such
rules, not functions.

``score - slope[head] * (q_pos - k_pos).abs()`` adds what depends on the head and the distance alone: one number for
each of the two, whatever the lengths. The function is called once on stand-ins for the score and its place. Every torch
operation on them is looked up in a table and says what its result depends on: the score, which of the four indices, and
how it moves when both positions move by one. An operation that is not in the table, a decision taken in Python, a shape
that was asked for: then nothing is known, and the function stays a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.errors import ClearheadError
from clearhead.scores import DenseBias, RelativeBias, ScoreFunction, ScoreRule, SoftCap

__all__ = ["Extent", "traced_rules"]

#: float32 counts positions exactly below it, so that a difference of two tells their distance.
_MOST_POSITIONS: Final = 2**24
_BATCH, _HEAD, _QUERY, _KEY = range(4)
_EXACT: Final = (torch.int32, torch.int64, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The places of a call: sizes, and the absolute position of its first query."""

    batch: int
    heads: int
    q_len: int
    k_len: int
    query_offset: int


class _Unknown(BaseException):
    """What a function does to its arguments is not in the table; no ``except Exception`` of its own hides it."""


@dataclass(frozen=True)
class _Facts:
    """What a number depends on.

    Attributes:
        axes: indices of the place.
        shift: by how much it grows when both positions grow by one; None where that differs.
        score: which part of ``cap * tanh(score / cap)`` it has come to; "" where it is none.
        cap: the number there, if one was met.
        added: whether what is said above was added to the score.
    """

    axes: frozenset[int] = frozenset()
    shift: float | None = 0.0
    score: Literal["", "score", "score / cap", "tanh(score / cap)"] = ""
    cap: float | None = None
    added: bool = False


_CONSTANT: Final = _Facts()
_SCORE: Final = _Facts(score="score")
_Way: TypeAlias = Callable[..., _Facts]


class _StandIn(Tensor):
    """A number of one place with its facts; torch's operations on it come by ``__torch_function__``."""

    facts: _Facts

    @staticmethod
    def of(value: Tensor, facts: _Facts) -> _StandIn:
        stand_in: _StandIn = Tensor._make_subclass(_StandIn, value.detach())
        stand_in.facts = facts
        return stand_in

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _READ:
                return func(*args, **(kwargs or {}))
            way = _WAYS.get(func)
            if way is None:
                raise _Unknown(getattr(func, "__name__", func))
            return cls.of(func(*args, **(kwargs or {})), way(*args, **(kwargs or {})))


def _facts(value: object) -> _Facts:
    """Those of an operand: a stand-in, a number, or a tensor that broadcasts over batch entries and heads alone."""
    if isinstance(value, _StandIn):
        return value.facts
    if value is None or isinstance(value, (bool, int, float)):
        return _CONSTANT
    if not isinstance(value, Tensor) or value.ndim > 4:
        raise _Unknown(type(value).__name__)
    shape = (1,) * (4 - value.ndim) + tuple(value.shape)
    if shape[_QUERY] != 1 or shape[_KEY] != 1:
        raise _Unknown("a tensor of a tile's shape")
    return _Facts(frozenset(axis for axis in (_BATCH, _HEAD) if shape[axis] > 1))


def _joined(operands: Sequence[_Facts]) -> frozenset[int]:
    return frozenset().union(*(facts.axes for facts in operands))


def _scoreless(values: Sequence[object]) -> list[_Facts]:
    found = [_facts(value) for value in values]
    if any(facts.score for facts in found):
        raise _Unknown("a score that is not only added to")
    return found


def _any_function(*values: object, **options: object) -> _Facts:
    """Element by element: where nothing moves with the positions, the result does not either."""
    found = _scoreless([*values, *options.values()])
    return _Facts(_joined(found), 0.0 if all(facts.shift == 0.0 for facts in found) else None)


def _comparison(left: object, right: object) -> _Facts:
    """Two numbers that move alike compare as before."""
    one, other = _scoreless([left, right])
    return _Facts(_joined([one, other]), 0.0 if one.shift is not None and one.shift == other.shift else None)


def _sum(left: object, right: object, sign: float = 1.0) -> _Facts:
    one, other = _facts(left), _facts(right)
    if other.score and (one.score or sign < 0.0):
        raise _Unknown("two scores, or a score that is subtracted")
    if {one.score, other.score} - {"", "score"}:
        raise _Unknown("a score that is not capped yet")
    known = one.shift is not None and other.shift is not None
    shift = one.shift + sign * other.shift if known else None  # type: ignore[operator]
    score = one if one.score else other
    return _Facts(_joined([one, other]), shift, score.score, score.cap, added=bool(score.score))


def _difference(left: object, right: object) -> _Facts:
    return _sum(left, right, -1.0)


def _reversed_difference(left: object, right: object) -> _Facts:
    return _sum(right, left, -1.0)


def _product(left: object, right: object) -> _Facts:
    for moving, factor in ((left, right), (right, left)):
        own = _facts(moving)
        if not isinstance(factor, (int, float)):
            continue
        if own.score:
            return _scaled(own, factor)
        if own.shift is not None:
            return _Facts(own.axes, own.shift * factor)
    return _any_function(left, right)


def _scaled(score: _Facts, factor: float) -> _Facts:
    """A score on its way to a cap, times a number."""
    if score == _SCORE and factor > 0.0 and math.isfinite(1.0 / factor):
        return _Facts(score="score / cap", cap=1.0 / factor)
    if score.score == "tanh(score / cap)" and score.cap is not None and math.isclose(factor, score.cap, rel_tol=1e-12):
        return replace(score, score="score")
    raise _Unknown("a score that is multiplied")


def _quotient(left: object, right: object) -> _Facts:
    return _product(left, 1.0 / right) if isinstance(right, (int, float)) and right else _any_function(left, right)


def _tanh(value: object) -> _Facts:
    own = _facts(value)
    return replace(own, score="tanh(score / cap)") if own.score == "score / cap" else _any_function(value)


def _negated(value: object) -> _Facts:
    return _difference(0.0, value)


def _converted(value: _StandIn, *targets: object, **options: object) -> _Facts:
    """To another dtype; the score keeps its own, and what moves a dtype that counts positions exactly."""
    given = [*targets, *options.values()]
    facts, wanted = _facts(value), [one.dtype if isinstance(one, Tensor) else one for one in given]
    if any(not isinstance(one, torch.dtype) for one in wanted):
        raise _Unknown("a conversion that is not to a dtype")
    if facts.score and any(one != value.dtype for one in wanted):
        raise _Unknown("a score in another dtype")
    exact = all(one in _EXACT for one in wanted)
    return facts if exact or facts.shift == 0.0 else _Facts(facts.axes, None)


def _to(dtype: torch.dtype) -> _Way:
    return lambda value: _converted(value, dtype)


def _looked_up(table: Tensor, index: object) -> _Facts:
    """``table[head, distance]``: one index for each axis, a place or a number."""
    indices = index if isinstance(index, tuple) else (index,)
    places = [one for one in indices if isinstance(one, _StandIn)]
    whole = all(isinstance(one, (_StandIn, int)) and not isinstance(one, bool) for one in indices)
    if isinstance(table, _StandIn) or not whole or len(indices) != table.ndim or not places:
        raise _Unknown("an index that is not a place")
    if any(one.dtype not in (torch.int32, torch.int64) for one in places):
        raise _Unknown("an index that chooses by truth")
    return _any_function(*places)


def _bucket(value: object, boundaries: Tensor, **options: object) -> _Facts:
    if isinstance(boundaries, _StandIn):
        raise _Unknown("boundaries that depend on the place")
    return _any_function(value)


def _found(names: str, holders: Sequence[object] = (torch, Tensor, F)) -> Iterator[Callable[..., Any]]:
    """torch's functions and methods of these names, and the operators by which Python calls them."""
    for name in names.split():
        yield from (getattr(holder, name) for holder in holders if callable(getattr(holder, name, None)))


_ELEMENTWISE: Final = """
    abs absolute __abs__ square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh sigmoid
    relu softplus softsign elu gelu silu floor ceil round trunc sign sgn clamp clip clamp_min clamp_max pow __pow__
    __rpow__ floor_divide __floordiv__ __rfloordiv__ __rtruediv__ __rdiv__ remainder fmod __mod__ __rmod__ minimum
    maximum hypot atan2 where masked_fill logical_and logical_or logical_xor logical_not bitwise_and bitwise_or
    bitwise_xor bitwise_not __and__ __or__ __xor__ __rand__ __ror__ __rxor__ __invert__ __lshift__ __rshift__ isfinite
    isnan isinf nan_to_num zeros_like ones_like
"""


def _table() -> dict[Callable[..., Any], _Way]:
    ways: dict[str, _Way] = {
        "add __add__ __radd__": _sum,
        "sub subtract __sub__": _difference,
        "rsub __rsub__": _reversed_difference,
        "mul multiply __mul__ __rmul__": _product,
        "div divide true_divide __truediv__ __div__": _quotient,
        "neg negative __neg__": _negated,
        "eq ne lt le gt ge not_equal less less_equal greater greater_equal"
        " __eq__ __ne__ __lt__ __le__ __gt__ __ge__": _comparison,
        "to": _converted,
        "float": _to(torch.float32), "double": _to(torch.float64), "long": _to(torch.int64), "int": _to(torch.int32),
        "bool": _to(torch.bool),
        "__getitem__": _looked_up,
        "bucketize": _bucket,
        "tanh": _tanh,
        _ELEMENTWISE: _any_function,
    }  # fmt: skip
    return {func: way for names, way in ways.items() for func in _found(names)}


_WAYS: Final = _table()
#: What may be asked of a stand-in: a tile's answer would be the same.
_READ: Final = frozenset({Tensor.dtype.__get__, Tensor.device.__get__})  # type: ignore[attr-defined]


def _traced(rule: ScoreFunction, extent: Extent, like: Tensor) -> _Facts | None:
    """What the function's result depends on, from the call's last place; None where that cannot be told."""
    last = (extent.batch - 1, extent.heads - 1, extent.query_offset + extent.q_len - 1, extent.k_len - 1)
    place = [
        _StandIn.of(torch.full((1, 1, 1, 1), index, device=like.device), _Facts(frozenset({axis}), shift))
        for axis, (index, shift) in enumerate(zip(last, (0.0, 0.0, 1.0, 1.0), strict=True))
    ]
    try:
        with torch.no_grad():
            result = rule.fn(_StandIn.of(like.new_zeros(1, 1, 1, 1), _SCORE), *place)
    except (Exception, _Unknown):  # what is wrong with a function, a tile will tell
        return None
    return result.facts if isinstance(result, _StandIn) and result.facts.score == "score" else None


def _added(rule: ScoreFunction, like: Tensor, *places: Tensor) -> Tensor | None:
    """What a function adds to scores of 0 at some batch entries, heads, queries and keys."""
    sizes = [len(place) for place in places]
    indices = (place.to(like.device).view([-1 if axis == own else 1 for axis in range(4)])
               for own, place in enumerate(places))  # fmt: skip
    try:
        return rule.apply(like.new_zeros(sizes), *indices)
    except ClearheadError:
        return None


def traced_rules(rule: ScoreFunction, extent: Extent, like: Tensor) -> tuple[ScoreRule, ...] | None:
    """A function as a ``SoftCap``, a bias of the head and the distance or of all but the query, or one after the other.

    Args:
        rule: the function.
        extent: the call's places.
        like: a tensor of the scores' dtype and device.

    Returns:
        Rules that do the same, biases differentiable in what the function closes over; None where the function does
        something else, or that cannot be told.

    Cost: two calls of the function: on one place, and on ``heads * (q_len + k_len)`` or ``batch * heads * k_len``.
    """
    lengths = (extent.query_offset + extent.q_len, extent.k_len - extent.query_offset, extent.k_len)
    if min(extent.batch, extent.q_len, extent.k_len) == 0 or max(lengths) >= _MOST_POSITIONS:
        return None
    facts = _traced(rule, extent, like)
    if facts is None:
        return None
    cap = () if facts.cap is None else (SoftCap(facts.cap),)
    if not facts.added:
        return cap
    bias = _bias(rule, facts, extent, like)
    return None if bias is None else (*cap, bias)


def _bias(rule: ScoreFunction, facts: _Facts, extent: Extent, like: Tensor) -> ScoreRule | None:
    """What a function adds, in full for all that it depends on; None where that would be every place."""
    zero = torch.zeros(1, dtype=torch.int64)
    batch, head = (
        torch.arange(size) if axis in facts.axes else zero
        for axis, size in ((_BATCH, extent.batch), (_HEAD, extent.heads))
    )
    if facts.shift == 0.0 and _BATCH not in facts.axes:
        # Distances that do not occur are not asked for: a function may have no number there.
        low, high = extent.query_offset - extent.k_len + 1, extent.query_offset + extent.q_len - 1
        found, reach = _added(rule, like, zero, head, torch.arange(low, high + 1), zero), max(-low, high)
        return None if found is None else RelativeBias(F.pad(found[0, :, :, 0], (low + reach, reach - high)))
    if _QUERY not in facts.axes:
        found = _added(rule, like, batch, head, zero, torch.arange(extent.k_len))
        return None if found is None else DenseBias(found)
    return None
