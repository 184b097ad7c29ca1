"""What users give: numbers, choices and texts, taken where they mean something and refused in one sentence elsewhere.

numpy's numbers and torch's whole ones are numbers; ``True`` is none. Each rule stands here once, so that every
function takes the same and says the same.
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
    "FARTHEST", "dense", "flag", "number", "one_of", "probability", "real_number", "seed_of", "seen", "several",
    "tensor_of", "texts_of", "whole", "whole_number",
]  # fmt: skip

#: The farthest position or distance that anything takes, as the CPU kernels have it.
FARTHEST: Final = 2**48


def seen(value: object) -> str:
    """A value as an error names it."""
    if isinstance(value, Tensor) and (kind := _kind_but_dense(value)) is not None:
        return f"a {kind} tensor"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    try:
        return repr(value)[:80]
    except Exception:
        # A number of more digits than Python writes, or an object that cannot say what it is.
        return f"one {type(value).__name__}"


def several(given: object) -> tuple[object, ...]:
    """What users give where one thing or several may stand; a text is one."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        return (given,)
    try:
        return tuple(given)
    except TypeError:
        # Arrays without an axis say that they can be walked along.
        return (given,)


def tensor_of(
    value: object, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Tensor | None:
    """What a user gave as one dense tensor; None where it is none. A tensor stays on its device."""
    if isinstance(value, Tensor) and _kind_but_dense(value) is not None:
        return None
    if device is None and isinstance(value, Tensor):
        device = value.device
    try:
        return torch.as_tensor(value, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def dense(function: str, argument: str, tensor: Tensor) -> None:
    """Raise where a tensor is nested or sparse, or lies in an order of a library's own.

    Raises:
        UnsupportedError: it is one of these. Nested ones of the older kind would end the process further on.
    """
    kind = _kind_but_dense(tensor)
    if kind is not None:
        raise UnsupportedError.about(
            function, argument, must="be a dense tensor", got=f"a {kind} one", then=_DENSE.get(kind, "Use .to_dense().")
        )


#: What makes one dense tensor of those of several lengths.
_DENSE: Final = {
    "jagged": "Its .values()[None] under ch.Documents(its .offsets().diff()) is attention over each sequence alone.",
    "nested": "Pad it with .to_padded_tensor(0.0), and mask with ch.Padding or lay it end to end with ch.pack.",
}


def _kind_but_dense(tensor: Tensor) -> str | None:
    """None of a dense tensor, else ``jagged``, ``nested`` (of the older kind, without a shape), ``sparse_coo`` ..."""
    if tensor.layout is torch.strided:
        return "nested" if tensor.is_nested else None
    return str(tensor.layout).removeprefix("torch.").lstrip("_")


def whole_number(value: object) -> int | None:
    """A whole number, numpy's and torch's among them; None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        # Tensors without storage hold no number.
        return None


def whole(function: str, argument: str, value: object, *, low: int, high: int = FARTHEST, then: str = "") -> int:
    """A whole number from ``low`` to ``high``.

    Raises:
        ShapeError: it is none, or lies elsewhere.
    """
    # A compiler's number stays one, so that its graph serves others too.
    found = value if isinstance(value, torch.SymInt) else whole_number(value)
    if found is None or found < low:
        raise ShapeError.about(
            function,
            argument,
            must=f"be a whole number of at least {low}",
            got=seen(value),
            then=then or "Pass an int.",
        )
    if isinstance(found, int) and found > high:
        raise ShapeError.about(
            function,
            argument,
            must=f"be at most {_power(high)}",
            got=seen(value),
            then="No position lies farther away." if high == FARTHEST else "Pass a smaller one.",
        )
    return found  # type: ignore[return-value]


def _power(limit: int) -> str:
    exponent = limit.bit_length() - 1
    return f"2**{exponent}" if exponent >= 10 and limit == 2**exponent else str(limit)


def seed_of(function: str, value: object) -> int:
    """A seed for torch's generators, 0 to ``2**64 - 1``."""
    found = whole_number(value)
    if found is None or not 0 <= found < 2**64:
        raise ShapeError.about(
            function, "seed", must="be a whole number from 0 to 2**64 - 1", got=seen(value), then="Pass e.g. 0."
        )
    return found


def real_number(value: object) -> float | None:
    """A number as a float, numpy's among them; None for anything else, and for what no float holds."""
    # Most are; asking an abstract class takes far longer.
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
    """A finite number that fits what it must.

    Raises:
        ShapeError: it is none, or does not.
    """
    found = real_number(value)
    if found is None or not math.isfinite(found) or not fits(found):
        raise ShapeError.about(function, argument, must=must, got=seen(value), then=then)
    return found


def probability(function: str, argument: str, value: object) -> float:
    """A probability below 1."""
    found = real_number(value)
    if found is None or not 0.0 <= found < 1.0:
        raise ShapeError.about(
            function,
            argument,
            must="be a probability from 0 up to, but not, 1",
            got=seen(value),
            then="0.0 switches it off.",
        )
    return found


def flag(function: str, argument: str, value: object) -> bool:
    """True or False, numpy's among them, or 1 or 0."""
    if isinstance(value, bool):
        return value
    numpys = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    if not numpys and whole_number(value) not in (0, 1):
        raise ShapeError.about(function, argument, must="be True or False", got=seen(value), then="Pass one of them.")
    return bool(value)


def one_of(function: str, argument: str, value: object, known: Collection[str], then: str) -> str:
    """One of the names that are known.

    Raises:
        UnsupportedError: it is none of them; the text lists them.
    """
    if not isinstance(value, str) or value not in known:
        raise UnsupportedError.about(
            function, argument, must=f"be one of {', '.join(known)}", got=seen(value), then=then
        )
    return value


def texts_of(function: str, argument: str, given: object, count: int, then: str) -> tuple[str, ...]:
    """One text for each of ``count`` tokens.

    Raises:
        ShapeError: there are more or fewer, or it is no list.
    """
    try:
        # Of what never ends, only so many as tell that they are too many.
        found = tuple(islice(given, count + 1))  # type: ignore[call-overload]
    except TypeError:
        found = None
    if found is None or len(found) != count:
        lengths = getattr(given, "__len__", None)
        got = seen(given) if found is None else str(lengths()) if lengths else f"{len(found)} or more"
        raise ShapeError.about(function, argument, must=f"have one text for each of {count} tokens", got=got, then=then)
    return tuple(map(str, found))
