"""Tensors that models of transformers carry in the place of others: of masks, and of cached keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from clearhead.int8_rows import channels_of, dequantize
from clearhead.shapes import Float, Int
from clearhead.torch_private import no_torch_function, wrapper_tensor

__all__ = ["DeferredTensor", "RowsTensor"]


class DeferredTensor(Tensor):
    """A tensor with the shape, dtype and device of the one that it stands for, but no elements.

    The first operation that reads them calls ``elements``.
    """

    def elements(self) -> Float[Tensor, "..."]:
        """The tensor that this one stands for."""
        raise NotImplementedError

    # What is computed from it is an ordinary tensor.
    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*map(_with_elements, args), **{name: _with_elements(each) for name, each in (kwargs or {}).items()})


def _with_elements(argument: Any) -> Any:
    """An operator's argument with tensors in place of those that stand for them, in lists too."""
    if isinstance(argument, (list, tuple)):
        return type(argument)(map(_with_elements, argument))
    return argument.elements() if isinstance(argument, DeferredTensor) else argument


class RowsTensor(DeferredTensor):
    """Keys or values ``[batch, kv_heads, length, dim]`` of an int8 cache.

    ``clearhead``'s attention reads its rows where they are.

    Attributes:
        rows: int8 ``[batch, kv_heads, length, dim + 4]``, as ``KVCache`` has them.
    """

    rows: Tensor

    @staticmethod
    def __new__(cls, rows: Int[Tensor, "batch kv_heads length bytes"], dtype: torch.dtype) -> RowsTensor:
        made = wrapper_tensor(cls, (*rows.shape[:3], channels_of(rows)), dtype, rows.device)
        made.rows = rows
        return made

    def elements(self) -> Float[Tensor, "batch kv_heads length dim"]:
        """The elements, dequantized."""
        return dequantize(self.rows).to(self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RowsTensor(shape={tuple(self.shape)}, dtype={self.dtype})"
