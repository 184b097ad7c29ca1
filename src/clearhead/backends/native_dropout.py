"""Dropout of activations by the CPU kernels: which are kept is a function of a seed, a row and a column alone."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from clearhead.backends.native_header import DTYPES, LEVELS, MAX_THREADS, Code, DropoutDescription, Verb
from clearhead.backends.native_library import library, message, new_description
from clearhead.backends.native_memory import new_tensor
from clearhead.shapes import Float

__all__ = ["LEVELS", "Drop", "dropped", "takes"]


def takes(x: Tensor) -> bool:
    """Whether there are kernels, for numbers such as these."""
    return x.dtype in DTYPES and x.is_cpu and library() is not None


def dropped(
    x: Float[Tensor, "*batch width"], levels: int, seed: int, added: Float[Tensor, "*batch width"] | None = None
) -> Float[Tensor, "*batch width"]:
    """``x`` with some of its numbers 0 and the others divided by what is kept, plus ``added``.

    A number is kept where its 16 bits are at least ``levels``: those that ``backends.dropout.bits`` has for its
    column in the row ``(row, 0, 2**32 - 1)``. Rows are counted over all leading axes.

    Args:
        x: ``[*batch, width]``, float32, bfloat16 or float16.
        levels: of ``LEVELS`` numbers so many are dropped on average, below ``LEVELS``.
        seed: below ``2**64``.
        added: of the same shape and dtype.

    Cost: one pass over memory; the same bits whatever the number of threads is.

    >>> dropped(torch.ones(1, 4), 0, 0, torch.ones(1, 4))
    tensor([[2., 2., 2., 2.]])
    """
    kernels = library()
    assert kernels is not None
    columns = x.shape[-1] if x.dim() > 0 else 1
    size = (x.numel() // max(1, columns), columns)
    rows = _dense(x).view(size)
    own = Drop(rows, levels, seed, None if added is None else _dense(added).view(size))
    if (code := kernels.ch_drop(ctypes.byref(own.call[1]))) != Code.OK:
        raise RuntimeError(f"clearhead: dropout failed: {message(code)}")
    # Not a view: autograd would refuse to let it be changed in place.
    found: Tensor = torch.ops.aten._unsafe_view(own.output, x.shape)
    return found


class Drop:
    """Dropout written down: it writes ``output``.

    Args:
        x: ``[rows, columns]``, contiguous, as all here.
        levels: as in ``dropped``.
        seed: see there.
        added: see there.
        output: where it goes; a new tensor when left out.

    Attributes:
        output: ``[rows, columns]``.
        call: what ``native_library.run`` takes.
    """

    def __init__(
        self, x: Float[Tensor, "rows columns"], levels: int, seed: int, added: Float[Tensor, "rows columns"] | None,
        output: Float[Tensor, "rows columns"] | None = None,
    ) -> None:  # fmt: skip
        own = new_description(DropoutDescription)
        own.threads = min(torch.get_num_threads(), MAX_THREADS)
        own.dtype, own.dropped, own.seed = DTYPES[x.dtype], levels, seed
        own.rows, own.columns = x.shape
        self.output = new_tensor(x, tuple(x.shape)) if output is None else output
        own.input, own.output = x.data_ptr(), self.output.data_ptr()
        own.added = None if added is None else added.data_ptr()
        self.call: tuple[Verb, DropoutDescription] = Verb.DROP, own
        self._held = (x, added)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_neg().contiguous()
