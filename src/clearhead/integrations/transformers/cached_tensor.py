"""Tensors that models of transformers carry in the place of cached keys and values, which are elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from clearhead.int8_rows import channels_of, dequantize
from clearhead.shapes import Float, Int
from clearhead.torch_private import no_torch_function, wrapper_tensor

__all__ = ["CachedTensor", "RowsTensor"]


class CachedTensor(Tensor):
    """Keys or values that a model carries as the tensor ``[batch, kv_heads, length, dim]`` they stand for.

    It has that shape, dtype and device, but no elements: the first operation that reads them calls ``read``.
    """

    def read(self) -> Float[Tensor, "batch kv_heads length dim"]:
        """The elements, as a copy."""
        raise NotImplementedError

    # What is computed from it is an ordinary tensor.
    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*map(_copied, args), **{name: _copied(each) for name, each in (kwargs or {}).items()})


def _copied(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return type(argument)(map(_copied, argument))
    return argument.read() if isinstance(argument, CachedTensor) else argument


class RowsTensor(CachedTensor):
    """Keys or values of an int8 cache. ``clearhead``'s attention reads its rows where they are.

    Attributes:
        rows: int8 ``[batch, kv_heads, length, dim + 4]``, as ``KVCache`` has them.
    """

    rows: Tensor

    @staticmethod
    def __new__(cls, rows: Int[Tensor, "batch kv_heads length bytes"], dtype: torch.dtype) -> RowsTensor:
        made = wrapper_tensor(cls, (*rows.shape[:3], channels_of(rows)), dtype, rows.device)
        made.rows = rows
        return made

    def read(self) -> Float[Tensor, "batch kv_heads length dim"]:
        """The elements, dequantized."""
        return dequantize(self.rows).to(self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RowsTensor(shape={tuple(self.shape)}, dtype={self.dtype})"
