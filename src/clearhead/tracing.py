"""Traces a user's function of a place: calls it once on stand-ins and derives what its result depends on.

``score - slope[head] * (q_pos - k_pos).abs()`` adds a value that depends on the head and the distance alone. Tracing
calls the function with stand-ins for the score and the four indices. A table gives the facts of each torch operation's
result: the indices that it depends on, the score, and its change if both positions grow by one. Tracing fails at an
operation that is not in the table, at a branch in Python and when the function reads a shape. A traced function can be
evaluated at other places, operation by operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "BATCH",
    "COMPARISONS",
    "HEAD",
    "INDICES",
    "KEY",
    "MOST_POSITIONS",
    "QUERY",
    "SCORE",
    "Facts",
    "StandIn",
    "evaluated",
    "facts_of",
    "few",
    "named",
    "takes_scalars",
    "trace",
]

#: Below it float32 represents positions exactly, so that the difference of two is their distance.
MOST_POSITIONS: Final = 2**24
BATCH, HEAD, QUERY, KEY = range(4)
_EXACT: Final = (torch.int32, torch.int64, torch.float32, torch.float64)
#: Binary digits of a fraction that float32 represents exactly in addition to a position.
_BINARY_PLACES: Final = 4
#: Largest depth of nested operations.
_DEEPEST: Final = 100


class _Unknown(BaseException):
    """Raised when the table has no facts for an operation."""


@dataclass
class _Look:
    """One call of a function on stand-ins.

    Attributes:
        recording: whether autograd was enabled at the start. If the function changes that, it cuts off a gradient or
            defines one of its own.
        failed: whether an unknown operation occurred, even if the function caught the exception.
    """

    recording: bool
    failed: bool = False


@dataclass(frozen=True)
class Facts:
    """The facts of a value.

    Attributes:
        axes: the indices of the place that it depends on.
        shift: by how much it grows if both positions grow by one; None if that differs between places.
        score: the part of ``cap * tanh(score / cap)`` that it is, "function" of the score if it is none; "" if it does
            not contain the score.
        cap: the cap, if there is one.
        added: whether a value with the facts above was added to the score.
        conditions: conditions on the place with the value that each must have; elsewhere the score is -infinity.
    """

    axes: frozenset[int] = frozenset()
    shift: float | None = 0.0
    score: Literal["", "score", "score / cap", "tanh(score / cap)", "function"] = ""
    cap: float | None = None
    added: bool = False
    conditions: tuple[tuple[StandIn, bool], ...] = field(default=(), compare=False)


_CONSTANT: Final = Facts()
SCORE: Final = Facts(score="score")
#: The facts of a batch entry, a head, a query's position and a key's.
INDICES: Final = tuple(Facts(frozenset({axis}), 1.0 if axis in (QUERY, KEY) else 0.0) for axis in range(4))
_FactsRule: TypeAlias = Callable[..., Facts]


class StandIn(Tensor):
    """A value at one place, with its facts and the operation that made it; intercepts torch's operations on it."""

    facts: Facts
    made_by: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]] | None
    #: The index of the function's argument that it stands for.
    argument: int | None
    depth: int
    look: _Look

    @staticmethod
    def of(value: Tensor, facts: Facts, look: _Look, *, made_by: Any = None, argument: int | None = None) -> StandIn:
        stand_in: StandIn = value.detach().as_subclass(StandIn)
        stand_in.facts, stand_in.made_by, stand_in.argument, stand_in.look = facts, made_by, argument, look
        operands = () if made_by is None else (*made_by[1], *made_by[2].values())
        stand_in.depth = 1 + max((part.depth for part in operands if isinstance(part, StandIn)), default=0)
        if stand_in.depth > _DEEPEST:
            raise _Unknown("too many nested operations")
        return stand_in

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Tensor.__torch_function__ converts stand-ins to plain tensors and calls _applied.
        return Tensor.__torch_function__(cls._applied, (), (func, args, kwargs or {}))  # type: ignore[no-untyped-call]

    @classmethod
    def _applied(cls, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        if func in _READ:
            return func(*args, **options)
        look = _look_of((*args, *options.values()))
        try:
            rule = _FACTS_RULES.get(func)
            if rule is None or options.get("inplace") or "out" in options:
                raise _Unknown(getattr(func, "__name__", func))
            if torch.is_grad_enabled() != look.recording:
                raise _Unknown("a gradient of its own")
            made, facts = func(*args, **options), rule(*args, **options)
            # Other dtypes do not represent positions exactly, so the shift is not constant.
            facts = facts if made.dtype in _EXACT or facts.shift == 0.0 else replace(facts, shift=None)
            return cls.of(made, facts, look, made_by=(func, args, options))
        except _Unknown:
            look.failed = True
            raise


def _look_of(values: Sequence[Any]) -> _Look:
    """The call that the operands of an operation belong to."""
    for value in values:
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, StandIn):
                return one.look
    raise _Unknown("operands that are nested")


def trace(fn: Callable[..., Any], arguments: Sequence[tuple[Tensor, Facts]]) -> StandIn | None:
    """Call a function on stand-ins for values at one place; None if tracing fails."""
    look = _Look(torch.is_grad_enabled())
    # Five axes distinguish tensors derived from stand-ins by code that bypasses __torch_function__ from the user's own.
    given = (StandIn.of(value[None], facts, look, argument=index) for index, (value, facts) in enumerate(arguments))
    try:
        result = fn(*given)
    except (Exception, _Unknown):  # if the function is wrong, the call on a tile raises the error
        return None
    return result if isinstance(result, StandIn) and not look.failed else None


def few(size: int) -> Tensor:
    """A few places of an axis, with both ends, at which the result of tracing is compared with the function."""
    return torch.tensor(
        sorted({place for place in (0, 1, size // 3, size * 5 // 8, size - 2, size - 1) if 0 <= place < size})
    )


def evaluated(result: StandIn, arguments: Sequence[Tensor | None], *, unmasked: bool = False) -> Tensor:
    """A traced function evaluated on other arguments; differentiable in the tensors that it closes over.

    Args:
        result: what the function returned on stand-ins.
        arguments: the arguments; None for one that the result does not depend on.
        unmasked: whether to leave out the steps that set a score to -infinity under a condition.
    """
    computed: dict[int, Tensor] = {}

    def value(part: Any) -> Any:
        if isinstance(part, tuple):
            return tuple(value(one) for one in part)
        if not isinstance(part, StandIn):
            return part
        if part.argument is not None:
            return arguments[part.argument]
        if id(part) not in computed:
            assert part.made_by is not None
            func, args, options = part.made_by
            if unmasked and func in _MASKING and (score := _masked_by(part)) is not None:
                return value(score)
            keywords = {name: value(one) for name, one in options.items()}
            computed[id(part)] = func(*(value(one) for one in args), **keywords)
        return computed[id(part)]

    output: Tensor = value(result)
    return output


def takes_scalars(result: StandIn) -> bool:
    """Whether a traced function combines places with scalars alone; of tensors with axes it may look up elements."""
    waiting, visited = [result], set()
    while waiting:
        part = waiting.pop()
        if part.made_by is None or id(part) in visited:
            continue
        visited.add(id(part))
        func, args, options = part.made_by
        flat = [
            one for given in (*args, *options.values()) for one in (given if isinstance(given, tuple) else (given,))
        ]
        stand_ins = [one for one in flat if isinstance(one, StandIn)]
        with_axes = (isinstance(one, Tensor) and one.numel() != 1 for one in flat if not isinstance(one, StandIn))
        if func not in _LOOK_UPS and any(with_axes):
            return False
        waiting += stand_ins
    return True


def _masked_by(part: StandIn) -> StandIn | None:
    """The score that an operation sets to -infinity under a condition; None for other operations."""
    assert part.made_by is not None
    scores = (one for one in part.made_by[1] if isinstance(one, StandIn) and one.facts.score)
    return next((one for one in scores if len(one.facts.conditions) < len(part.facts.conditions)), None)


def facts_of(value: object) -> Facts:
    """The facts of an operand: a stand-in, a number, or a tensor that depends on batch entries and heads alone."""
    if isinstance(value, StandIn):
        return value.facts
    if value is None or isinstance(value, (bool, int, float)):
        return _CONSTANT
    if not isinstance(value, Tensor) or value.ndim > 4:
        raise _Unknown(type(value).__name__)
    shape = (1,) * (4 - value.ndim) + tuple(value.shape)
    if shape[QUERY] != 1 or shape[KEY] != 1:
        raise _Unknown("a tensor of a tile's shape")
    return Facts(frozenset(axis for axis in (BATCH, HEAD) if shape[axis] > 1))


def _joined(operands: Sequence[Facts]) -> frozenset[int]:
    return frozenset().union(*(facts.axes for facts in operands))


def _of_scores(operands: Sequence[Facts]) -> Facts | None:
    """An elementwise function of the score that is no rule; None if no operand contains the score."""
    contains = any(facts.score for facts in operands)
    return Facts(_joined(operands), None, score="function") if contains else None


def _any_function(*values: object, **options: object) -> Facts:
    """An elementwise function: the result is constant under a shift if all operands are."""
    operands = [facts_of(value) for value in (*values, *options.values())]
    return _of_scores(operands) or Facts(
        _joined(operands), 0.0 if all(facts.shift == 0.0 for facts in operands) else None
    )


def _comparison(left: object, right: object) -> Facts:
    """A comparison: the result is constant under a shift if both operands shift by the same amount."""
    one, other = facts_of(left), facts_of(right)
    return _of_scores([one, other]) or Facts(
        _joined([one, other]), 0.0 if one.shift is not None and one.shift == other.shift else None
    )


def _sum(left: object, right: object, *, sign: float = 1.0) -> Facts:
    one, other = facts_of(left), facts_of(right)
    # Two scores, a score that is subtracted, and one that is not capped yet are no rules.
    if (other.score and (one.score or sign < 0.0)) or {one.score, other.score} - {"", "score"}:
        return Facts(_joined([one, other]), None, score="function")
    shifts_known = one.shift is not None and other.shift is not None
    shift = one.shift + sign * other.shift if shifts_known else None  # type: ignore[operator]
    # If adding a value to a position rounds, the sum's shift is not constant.
    still = [value for value, facts in ((left, one), (right, other)) if facts.shift == 0.0 and not facts.score]
    if shift != 0.0 and not all(map(_is_exact, still)):
        shift = None
    score = one if one.score else other
    return Facts(_joined([one, other]), shift, score.score, score.cap, bool(score.score), score.conditions)


def _difference(left: object, right: object) -> Facts:
    return _sum(left, right, sign=-1.0)


def _reversed_difference(left: object, right: object) -> Facts:
    return _sum(right, left, sign=-1.0)


def _is_exact(value: object) -> bool:
    """Whether a value can be added to positions without rounding, such as a multiple of 1/2."""
    if isinstance(value, Tensor):
        return not value.is_floating_point()
    return isinstance(value, (int, float)) and float(value * 2**_BINARY_PLACES).is_integer()


def _scales_exactly(moving: object, factor: float) -> bool:
    """Whether a position times a factor is exact."""
    whole = isinstance(factor, int) and isinstance(moving, Tensor) and not moving.is_floating_point()
    return whole or abs(math.frexp(factor)[0]) == 0.5


def _product(left: object, right: object) -> Facts:
    for moving, factor in ((left, right), (right, left)):
        facts = facts_of(moving)
        if not isinstance(factor, (int, float)):
            continue
        if facts.score:
            return _scaled(facts, factor)
        if facts.shift is not None:
            even = facts.shift == 0.0 or _scales_exactly(moving, factor)
            return Facts(facts.axes, facts.shift * factor if even else None)
    return _any_function(left, right)


def _scaled(score: Facts, factor: float) -> Facts:
    """A score times a factor: a step of ``cap * tanh(score / cap)``."""
    if score == SCORE and not score.conditions and factor > 0.0 and 0.0 < 1.0 / factor < math.inf:
        return Facts(score="score / cap", cap=1.0 / factor)
    if score.score == "tanh(score / cap)" and score.cap is not None and math.isclose(factor, score.cap, rel_tol=1e-12):
        return replace(score, score="score")
    return Facts(score.axes, None, score="function")


def _quotient(left: object, right: object) -> Facts:
    return _product(left, 1.0 / right) if isinstance(right, (int, float)) and right else _any_function(left, right)


def _tanh(value: object) -> Facts:
    facts = facts_of(value)
    return replace(facts, score="tanh(score / cap)") if facts.score == "score / cap" else _any_function(value)


def _negated(value: object) -> Facts:
    return _difference(0.0, value)


def _converted(value: StandIn, *targets: object, **options: object) -> Facts:
    """A conversion to another dtype: not of the score, and positions only to a dtype that represents them exactly."""
    given = [*targets, *options.values()]
    facts, wanted = facts_of(value), [one.dtype if isinstance(one, Tensor) else one for one in given]
    if any(not isinstance(one, torch.dtype) for one in wanted):
        raise _Unknown("a conversion that is not to a dtype")
    if facts.score and any(one != value.dtype for one in wanted):
        return Facts(facts.axes, None, score="function")
    # The shift of a float that is truncated to a whole number is not constant.
    exact = all(one in _EXACT and (one.is_floating_point or not value.is_floating_point()) for one in wanted)
    return facts if exact or facts.shift == 0.0 else Facts(facts.axes, None)


def _to(dtype: torch.dtype) -> _FactsRule:
    return lambda value: _converted(value, dtype)


def _looked_up(table: Tensor, index: object) -> Facts:
    """``table[head, distance]``: one index for each axis, a stand-in or an int."""
    indices = index if isinstance(index, tuple) else (index,)
    places = [one for one in indices if isinstance(one, StandIn)]
    whole = all(isinstance(one, (StandIn, int)) and not isinstance(one, bool) for one in indices)
    if isinstance(table, StandIn) or not whole or len(indices) != table.ndim or not places:
        raise _Unknown("an index that is not a place")
    if any(one.dtype not in (torch.int32, torch.int64) for one in places):
        raise _Unknown("an index that chooses by truth")
    return _any_function(*places)


def _bucket(value: object, boundaries: Tensor, **options: object) -> Facts:
    if isinstance(boundaries, StandIn):
        raise _Unknown("boundaries that depend on the place")
    return _any_function(value)


def _new(value: object, size: Sequence[int], *fill: object, **options: object) -> Facts:
    """A new scalar."""
    if tuple(size):
        raise _Unknown("a new tensor with axes")
    return _CONSTANT


def _where(condition: object, chosen: object, other: object) -> Facts:
    """A choice; of a score and -infinity, it masks the score."""
    if _is_masking(other):
        return _masked(chosen, condition, holds=True)
    return _masked(other, condition, holds=False) if _is_masking(chosen) else _any_function(condition, chosen, other)


def _masked_fill(value: object, condition: object, fill: object) -> Facts:
    return _masked(value, condition, holds=False) if _is_masking(fill) else _any_function(value, condition, fill)


def _masked(score: object, condition: object, *, holds: bool) -> Facts:
    facts, of_place = facts_of(score), facts_of(condition)
    if facts.score != "score" or of_place.score or not isinstance(condition, StandIn):
        return _any_function(score, condition)
    return replace(facts, conditions=(*facts.conditions, (condition, holds)))


def _is_masking(value: object) -> bool:
    """Whether a value is -infinity at every place."""
    scalar = isinstance(value, Tensor) and not isinstance(value, StandIn) and value.ndim == 0
    return (isinstance(value, float) or scalar) and float(value) == -math.inf  # type: ignore[arg-type]


def named(names: str) -> Iterator[Callable[..., Any]]:
    """torch's functions, methods and operators of these names."""
    for name in names.split():
        yield from (getattr(holder, name) for holder in (torch, Tensor, F) if callable(getattr(holder, name, None)))


#: The names of each comparison.
COMPARISONS: Final = {
    "==": "eq __eq__",
    "!=": "ne not_equal __ne__",
    "<": "lt less __lt__",
    "<=": "le less_equal __le__",
    ">": "gt greater __gt__",
    ">=": "ge greater_equal __ge__",
}


_ELEMENTWISE: Final = """
    abs absolute __abs__ square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh sigmoid
    relu softplus softsign elu gelu silu floor ceil round trunc sign sgn clamp clip clamp_min clamp_max pow __pow__
    __rpow__ floor_divide __floordiv__ __rfloordiv__ __rtruediv__ __rdiv__ remainder fmod __mod__ __rmod__ minimum
    maximum hypot atan2 logical_and logical_or logical_xor logical_not bitwise_and bitwise_or
    bitwise_xor bitwise_not __and__ __or__ __xor__ __rand__ __ror__ __rxor__ __invert__ __lshift__ __rshift__ isfinite
    isnan isinf nan_to_num zeros_like ones_like full_like
"""


def _table() -> dict[Callable[..., Any], _FactsRule]:
    rules: dict[str, _FactsRule] = {
        "add __add__ __radd__": _sum,
        "sub subtract __sub__": _difference,
        "rsub __rsub__": _reversed_difference,
        "mul multiply __mul__ __rmul__": _product,
        "div divide true_divide __truediv__ __div__": _quotient,
        "neg negative __neg__": _negated,
        " ".join(COMPARISONS.values()): _comparison,
        "to": _converted,
        "float": _to(torch.float32),
        "double": _to(torch.float64),
        "long": _to(torch.int64),
        "int": _to(torch.int32),
        "bool": _to(torch.bool),
        "__getitem__": _looked_up,
        "bucketize": _bucket,
        "tanh": _tanh,
        "where": _where,
        "masked_fill": _masked_fill,
        "new_ones new_zeros new_full": _new,
        _ELEMENTWISE: _any_function,
    }
    return {func: rule for names, rule in rules.items() for func in named(names)}


_FACTS_RULES: Final = _table()
_LOOK_UPS: Final = frozenset(named("__getitem__ bucketize"))
_MASKING: Final = frozenset(named("where masked_fill"))
#: Attributes of a stand-in that are equal to those of a tile.
_READ: Final = frozenset({Tensor.dtype.__get__, Tensor.device.__get__})  # type: ignore[attr-defined]
