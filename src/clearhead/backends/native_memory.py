"""New tensors that the kernels write: large ones in memory that an earlier result has left.

The C library maps large memory anew each time, and a page that a process has not had yet costs a microsecond or two: a
training step of a few dozen large results waits longer for pages than for some of its products. So what large results
leave behind is kept by the kernels' library for others of the same size: an eighth of the machine's memory at most, of
which all but 256 MiB is the system's to take back whenever it needs some (``MADV_FREE``). ``CLEARHEAD_KEEP_MEMORY``
bounds it, in MiB; 0 keeps nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Final, cast

import torch
from torch import Tensor

from clearhead.backends.native_header import DTYPES, MAX_AXES
from clearhead.backends.native_library import library, quick
from clearhead.errors import UnsupportedError

__all__ = ["LEAST", "kept_memory", "limit", "maker_like", "new_tensor", "release_memory", "room_like"]

_VARIABLE: Final = "CLEARHEAD_KEEP_MEMORY"
#: Bytes from which a tensor's memory is kept. Below, the C library has some ready more often than not.
LEAST: Final = 2**20

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_axes: Final = tuple(ctypes.c_int64 * axes for axes in range(MAX_AXES + 1))


def new_tensor(
    like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None, strides: tuple[int, ...] | None = None
) -> Tensor:
    """A CPU tensor about to be written: ``like.new_empty``, in memory that is kept where it is large.

    Args:
        like: whose dtype it has, unless one is given.
        shape: its sizes.
        dtype: one that the kernels read.
        strides: in elements, those of rows that lie densely in some order of the axes; contiguous when left out.
    """
    dtype = like.dtype if dtype is None else dtype
    elements = 1
    for size in shape:
        elements *= size
    if elements * dtype.itemsize >= LEAST and (make := _maker()) is not None:
        places = _axes[len(shape)]
        found = make(DTYPES[dtype], len(shape), places(*shape), places(*(strides or _dense(shape))))
        if found:
            return torch._C._from_dlpack(_capsule(found, b"dltensor", None))
    return (
        like.new_empty(shape, dtype=dtype) if strides is None else like.new_empty_strided(shape, strides, dtype=dtype)
    )


def room_like(tensor: Tensor, dim: int) -> Tensor:
    """An empty ``[batch, heads, len, dim]`` whose heads lie as the tensor does: side by side, or in turn."""
    batch, heads, length, _ = tensor.shape
    if tensor.stride(1) < tensor.stride(2):
        row = heads * dim
        return new_tensor(tensor, (batch, heads, length, dim), strides=(length * row, dim, row, 1))
    return new_tensor(tensor, (batch, heads, length, dim))


def maker_like(tensor: Tensor) -> Callable[[], Tensor]:
    """What makes CPU tensors about to be written that lie as this one does, at every call a new one."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    if tensor.nbytes < LEAST:
        return partial(_small_maker(), shape, strides, tensor.dtype)
    return partial(new_tensor, tensor.new_empty(0), shape, strides=strides)


def kept_memory() -> int:
    """Bytes that are kept for results to come."""
    found = library()
    return 0 if found is None else int(found.ch_kept_memory())


def release_memory() -> int:
    """Give the system back what is kept for results to come.

    The CPU kernels keep the memory of large results that are gone, an eighth of the machine's at most, for results to
    come; the system may take back all but 256 MiB of it at any time.

    Returns:
        The bytes that were kept.

    >>> import clearhead as ch
    >>> ch.release_memory() >= 0
    True
    >>> ch.release_memory()
    0
    """
    kept = kept_memory()
    if (found := library()) is not None:
        found.ch_keep_memory(found.ch_keep_memory(0))
    return kept


def limit() -> int:
    """The most bytes that are kept for results to come.

    Raises:
        UnsupportedError: ``CLEARHEAD_KEEP_MEMORY`` is no number of MiB.
    """
    found = library()
    if found is None or _maker() is None:
        return 0
    return int(found.ch_keep_memory(-1))


def _variable() -> int | None:
    """The bytes that ``CLEARHEAD_KEEP_MEMORY`` allows, if it is set."""
    text = os.environ.get(_VARIABLE, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise UnsupportedError.about(
            "clearhead", _VARIABLE, must="be a whole number of MiB, 0 or more", got=repr(text)[:80],
            then="Unset it to keep up to an eighth of the machine's memory.",
        )  # fmt: skip
    return int(text) * 2**20


@cache
def _maker() -> Callable[..., int | None] | None:
    """The library's function, bounded as the variable says; None where nothing is to be kept."""
    found, most = quick(), _variable()
    if found is None or most == 0:
        return None
    if most is not None:
        found.ch_keep_memory(most)
    make: Callable[..., int | None] = found.ch_new_tensor
    return make


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@cache
def _small_maker() -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """``torch.empty_strided`` as compiled functions call it, in half the time; the usual way where torch has it not."""
    try:
        from torch._C._dynamo.guards import _empty_strided_cpu as make  # type: ignore[attr-defined]

        if make((1, 2), (2, 1), torch.bfloat16).stride() != (2, 1):
            return _small
    except (ImportError, TypeError):
        return _small
    return cast(Callable[..., Tensor], make)


def _small(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
