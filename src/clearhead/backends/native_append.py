"""Rows put behind those that a cache holds, by the CPU kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.backends.native_header import DTYPES, MAX_THREADS, AppendDescription, TensorView, Verb
from clearhead.backends.native_library import new_description
from clearhead.backends.native_prepared import Counter
from clearhead.shapes import Float

__all__ = ["Append"]


class Append:
    """``target[:, :, first : first + new] = source``, written down.

    Args:
        source: ``[batch, heads, new, dim]``, its last axis contiguous, as that of ``target``.
        target: ``[batch, heads, room, dim]`` of the same dtype.
        first: rows of the target that are held.

    Attributes:
        call: what ``native_library.run`` takes.
        counter: the field that holds ``first``.
    """

    def __init__(
        self, source: Float[Tensor, "batch heads new dim"], target: Float[Tensor, "batch heads room dim"], first: int
    ) -> None:
        assert first + source.shape[2] <= target.shape[2]
        assert source.dtype is target.dtype
        own = new_description(AppendDescription)
        own.threads = min(torch.get_num_threads(), MAX_THREADS)
        own.dtype, own.first = DTYPES[source.dtype], first
        own.batch, own.heads, own.rows, own.columns = source.shape
        own.source = TensorView(source.data_ptr(), *source.stride()[:3])
        own.target = TensorView(target.data_ptr(), *target.stride()[:3])
        self.call: tuple[Verb, AppendDescription] = Verb.APPEND, own
        self.counter: Counter = (own, "first", 0)
        self._held = (source, target)
