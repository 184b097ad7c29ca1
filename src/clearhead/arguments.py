"""Checks of arguments: numbers, choices and texts are converted or refused with one sentence.

NumPy scalars and integer tensors of one element count as numbers, booleans do not. Every public function uses these
checks, so that all accept the same values and raise the same errors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from numbers import Real
from typing import Final

import torch
from torch import Tensor

from clearhead.errors import ShapeError, UnsupportedError

__all__ = [
    "FARTHEST",
    "dense",
    "flag",
    "number",
    "one_of",
    "probability",
    "real_number",
    "repr_of",
    "seed_of",
    "several",
    "tensor_of",
    "texts_of",
    "whole",
    "whole_number",
]

#: The largest position or distance that the CPU kernels take.
FARTHEST: Final = 2**48


def repr_of(value: object) -> str:
    """A value as text for an error message."""
    if isinstance(value, Tensor) and (kind := _kind_but_dense(value)) is not None:
        return f"a {kind} tensor"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    try:
        return repr(value)[:80]
    except Exception:
        # An int of more digits than Python prints, or an object whose __repr__ raises.
        return f"one {type(value).__name__}"


def several(given: object) -> tuple[object, ...]:
    """An argument that is one value or several, as a tuple; a string is one value."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        return (given,)
    try:
        return tuple(given)
    except TypeError:
        # Arrays without an axis define __iter__ and raise when it is called.
        return (given,)


def tensor_of(
    value: object, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Tensor | None:
    """An argument as a dense tensor, on its own device by default; None if it cannot be one."""
    if isinstance(value, Tensor) and _kind_but_dense(value) is not None:
        return None
    if device is None and isinstance(value, Tensor):
        device = value.device
    try:
        return torch.as_tensor(value, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def dense(function: str, argument: str, tensor: Tensor) -> None:
    """Check that a tensor is dense.

    Raises:
        UnsupportedError: the tensor is nested, sparse, or has a layout of a library. Operators on nested tensors of
            the older kind would crash the process.
    """
    kind = _kind_but_dense(tensor)
    if kind is not None:
        raise UnsupportedError.about(
            function,
            argument,
            must="be a dense tensor",
            got=f"a {kind} one",
            then=_TO_DENSE.get(kind, "Use .to_dense()."),
        )


#: How to convert nested tensors to dense ones.
_TO_DENSE: Final = {
    "jagged": "Its .values()[None] under ch.Documents(its .offsets().diff()) is attention over each sequence alone.",
    "nested": "Make it with layout=torch.jagged, which attention and modules take, or pad it with "
    ".to_padded_tensor(0.0) and mask with ch.Padding.",
}


def _kind_but_dense(tensor: Tensor) -> str | None:
    """None for a dense tensor, else ``jagged``, ``nested`` (the older kind, without a shape), ``sparse_coo`` ..."""
    if tensor.layout is torch.strided:
        return "nested" if tensor.is_nested else None
    return str(tensor.layout).removeprefix("torch.").lstrip("_")


def whole_number(value: object) -> int | None:
    """An integer of Python, NumPy or torch as an int; None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        # Meta tensors have no elements.
        return None


def whole(function: str, argument: str, value: object, *, low: int, high: int = FARTHEST, then: str = "") -> int:
    """A whole number from ``low`` to ``high``.

    Raises:
        ShapeError: ``value`` is no whole number, or out of range.
    """
    # A symbolic integer of the compiler remains symbolic, so that one graph serves all sizes.
    integer = value if isinstance(value, torch.SymInt) else whole_number(value)
    if integer is None or integer < low:
        raise ShapeError.about(
            function,
            argument,
            must=f"be a whole number of at least {low}",
            got=repr_of(value),
            then=then or "Pass an int.",
        )
    if isinstance(integer, int) and integer > high:
        raise ShapeError.about(
            function,
            argument,
            must=f"be at most {_power(high)}",
            got=repr_of(value),
            then="Positions and distances are limited." if high == FARTHEST else "Pass a smaller one.",
        )
    return integer  # type: ignore[return-value]


def _power(limit: int) -> str:
    exponent = limit.bit_length() - 1
    return f"2**{exponent}" if exponent >= 10 and limit == 2**exponent else str(limit)


def seed_of(function: str, value: object) -> int:
    """A seed for torch's generators, 0 to ``2**64 - 1``."""
    seed = whole_number(value)
    if seed is None or not 0 <= seed < 2**64:
        raise ShapeError.about(
            function, "seed", must="be a whole number from 0 to 2**64 - 1", got=repr_of(value), then="Pass e.g. 0."
        )
    return seed


def real_number(value: object) -> float | None:
    """A number of Python or NumPy as a float; None for anything else, and for integers too large for a float."""
    # The common case first: isinstance with an abstract class takes far longer.
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def number(
    function: str, argument: str, value: object, *, must: str, fits: Callable[[float], bool], then: str
) -> float:
    """A finite number for which ``fits`` is true.

    Raises:
        ShapeError: ``value`` is no finite number, or does not fit; ``must`` says the rule.
    """
    real = real_number(value)
    if real is None or not math.isfinite(real) or not fits(real):
        raise ShapeError.about(function, argument, must=must, got=repr_of(value), then=then)
    return real


def probability(function: str, argument: str, value: object) -> float:
    """A probability below 1."""
    real = real_number(value)
    if real is None or not 0.0 <= real < 1.0:
        raise ShapeError.about(
            function,
            argument,
            must="be a probability of at least 0 and below 1",
            got=repr_of(value),
            then="0.0 switches it off.",
        )
    return real


def flag(function: str, argument: str, value: object) -> bool:
    """A boolean of Python or NumPy, or 1 or 0, as a bool."""
    if isinstance(value, bool):
        return value
    is_numpy_bool = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    if not is_numpy_bool and whole_number(value) not in (0, 1):
        raise ShapeError.about(
            function, argument, must="be True or False", got=repr_of(value), then="Pass one of them."
        )
    return bool(value)


def one_of(function: str, argument: str, value: object, names: Collection[str], then: str) -> str:
    """One of ``names``.

    Raises:
        UnsupportedError: ``value`` is none of them; the text lists them.
    """
    if not isinstance(value, str) or value not in names:
        raise UnsupportedError.about(
            function, argument, must=f"be one of {', '.join(names)}", got=repr_of(value), then=then
        )
    return value


def texts_of(function: str, argument: str, given: object, count: int, then: str) -> tuple[str, ...]:
    """One text for each of ``count`` tokens.

    Raises:
        ShapeError: there are more or fewer texts, or ``given`` is not iterable.
    """
    try:
        # At most one more than needed: the iterable may be endless.
        texts = tuple(islice(given, count + 1))  # type: ignore[call-overload]
    except TypeError:
        texts = None
    if texts is None or len(texts) != count:
        lengths = getattr(given, "__len__", None)
        got = repr_of(given) if texts is None else str(lengths()) if lengths else f"{len(texts)} or more"
        raise ShapeError.about(function, argument, must=f"have one text for each of {count} tokens", got=got, then=then)
    return tuple(map(str, texts))
