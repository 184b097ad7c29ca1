"""Checks: whether a tensor has memory, readable elements and separate rows, and whether calls are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

__all__ = ["has_memory", "is_hollow", "separate_rows", "traces"]

#: Whether ``torch.jit.trace`` records the calls of this thread: it cannot record an ``autograd.Function``.
traces: Final[Callable[[], bool]] = torch.jit.is_tracing  # type: ignore[attr-defined]


def has_memory(tensor: Tensor) -> bool:
    """Whether the tensor has memory of its own: False for wrappers of ``torch.func`` and ``is_grads_batched``.

    >>> has_memory(torch.zeros(2))
    True
    """
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def is_hollow(tensor: Tensor) -> bool:
    """Whether the tensor is a shape without elements: on the meta device, or a fake tensor.

    >>> is_hollow(torch.zeros(2, device="meta")), is_hollow(torch.zeros(2))
    (True, False)
    """
    if tensor.is_meta:
        return True
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    # A fake tensor has a device, but its storage is on the meta device.
    try:
        return tensor.untyped_storage().device.type == "meta"
    except (NotImplementedError, RuntimeError):
        return False


def separate_rows(tensor: Tensor) -> Tensor:
    """The tensor, copied if the rows of its last two axes share memory: other libraries' kernels misread such rows.

    Views of ``unfold``, ``as_strided`` and ``expand`` have such rows; overlapping heads or sequences are harmless.

    >>> windows = torch.arange(5.0).unfold(0, 3, 1)
    >>> windows.stride(), separate_rows(windows).stride()
    ((1, 1), (3, 1))
    """
    if tensor.ndim < 2:
        return tensor
    (rows, columns), (row_step, column_step) = tensor.shape[-2:], tensor.stride()[-2:]
    if column_step == 1 and row_step >= columns:
        return tensor
    # One axis must step over the whole extent of the other; an axis of size 1 has no step.
    axes = sorted((step, size) for step, size in ((row_step, rows), (column_step, columns)) if size > 1)
    inner_extent = 1
    for step, size in axes:
        if step < inner_extent:
            return tensor.contiguous()
        inner_extent = step * (size - 1) + 1
    return tensor
