"""Autocast under ``set_invariant(True)``: its casts are made before the kernels' calls, since torch's GEMMs add in an
order that depends on the sizes of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

from clearhead.choices import is_invariant
from clearhead.torch_private import differentiates_forward, transforms

__all__ = ["cast_operands", "noted_casts"]

_Part = TypeVar("_Part", Tensor, Tensor | None)

_NOTED: ContextVar[dict[int, torch.dtype] | None] = ContextVar("clearhead_noted_casts", default=None)


@contextmanager
def noted_casts() -> Iterator[dict[int, torch.dtype]]:
    """The dtypes of the gradients of cast parameters, by ``id``, of the calls in a ``with`` block.

    Such a gradient is rounded to the dtype, and so is each sum of several.

    >>> weight = torch.nn.Parameter(torch.ones(1, 1))
    >>> from clearhead.invariance import invariant
    >>> with noted_casts() as casts, invariant(), torch.autocast("cpu", torch.bfloat16):
    ...     operands = cast_operands([weight])
    >>> casts[id(weight)]
    torch.bfloat16
    """
    casts: dict[int, torch.dtype] = {}
    token = _NOTED.set(casts)
    try:
        yield casts
    finally:
        _NOTED.reset(token)


def cast_operands(operands: Sequence[_Part]) -> list[_Part] | None:
    """Operands of GEMMs as autocast casts them; None where it is off or does not decide, or outside of the setting.

    Args:
        operands: tensors on the CPU, or None.

    Returns:
        The operands, those in 32 and 16 bits in autocast's dtype, to be used with autocast off.
    """
    if not torch.is_autocast_enabled("cpu") or not is_invariant() or torch.compiler.is_compiling():
        return None
    if transforms() or differentiates_forward():
        return None
    dtype, noted = torch.get_autocast_dtype("cpu"), _NOTED.get()
    cast: list[_Part] = []
    for part in operands:
        if part is None or not part.is_cpu or not part.is_floating_point() or part.dtype is torch.float64:
            cast.append(part)
            continue
        if noted is not None and part.is_leaf and part.requires_grad:
            noted[id(part)] = dtype
        cast.append(part.to(dtype))
    return cast
