"""Rotary positions by the CPU kernels: points of the plane turned by angles that a table holds."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from clearhead.backends.native_header import DTYPES, MAX_THREADS, Code, RotationDescription, TensorView, Verb
from clearhead.backends.native_library import library, message, new_description
from clearhead.backends.native_memory import room_like
from clearhead.backends.native_prepared import Counter
from clearhead.shapes import Float

__all__ = ["Rotation", "rotated"]


def rotated(
    x: Float[Tensor, "batch heads len dim"], table: Float[Tensor, "positions dim"], first: int, *, back: bool = False
) -> Float[Tensor, "batch heads len dim"]:
    """A new tensor that holds what ``Rotation`` writes, its heads side by side or in turn as those of ``x`` are.

    Cost: one pass over memory; the same bits whatever the number of threads is, and wherever a number lies.

    >>> rotated(torch.ones(1, 1, 1, 2), torch.tensor([[0.0, 1.0]]), 0)
    tensor([[[[-1.,  1.]]]])
    """
    kernels = library()
    assert kernels is not None
    x = x.detach().resolve_neg()
    x = x if x.stride(-1) == 1 else x.contiguous()
    found = room_like(x, x.shape[-1])
    own = Rotation(x, table, first, back=back, target=found)
    if (code := kernels.ch_rotate(ctypes.byref(own.call[1]))) != Code.OK:
        raise RuntimeError(f"clearhead: rotary positions failed: {message(code)}")
    return found


class Rotation:
    """``x`` turned in place, written down: channels ``c`` and ``c + dim / 2`` are a point, turned by the angle whose
    cosine and sine the table has for its position.

    Args:
        x: ``[batch, heads, len, dim]``, its last axis contiguous, of an even ``dim``.
        table: ``[positions, dim]``, float32, contiguous: of each ``dim / 2`` cosines and as many sines.
        first: position of the first token, ``first + len`` of which the table has.
        back: whether by the angle's opposite, as a gradient is.
        target: where it goes instead, of the same shape and dtype.

    Attributes:
        call: what ``native_library.run`` takes.
        counter: the field that holds ``first``.
        table: as it was given, which the call points into.
    """

    def __init__(
        self, x: Float[Tensor, "batch heads len dim"], table: Float[Tensor, "positions dim"], first: int, *,
        back: bool = False, target: Float[Tensor, "batch heads len dim"] | None = None,
    ) -> None:  # fmt: skip
        assert 0 <= first <= len(table) - x.shape[2]
        assert table.is_contiguous()
        assert table.shape[1] == x.shape[3]
        target = x if target is None else target
        own = new_description(RotationDescription)
        own.threads = min(torch.get_num_threads(), MAX_THREADS)
        own.dtype, own.back, own.first, own.positions = DTYPES[x.dtype], back, first, len(table)
        own.batch, own.heads, own.rows, own.columns = x.shape
        own.table = table.data_ptr()
        own.source = TensorView(x.data_ptr(), *x.stride()[:3])
        own.target = TensorView(target.data_ptr(), *target.stride()[:3])
        self.call: tuple[Verb, RotationDescription] = Verb.ROTATE, own
        self.counter: Counter = (own, "first", 0)
        self.table = table
        self._held = (x, target)
