"""The weight of a linear layer in the kernels' panels, and a parameter whose values are stored in them alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from clearhead.errors import UnsupportedError
from clearhead.ops.quantized_weight import QuantizedWeight
from clearhead.shapes import Float
from clearhead.torch_private import wrapper_tensor

__all__ = ["PackedParameter", "PackedWeight", "Weight", "as_stored"]


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight ``[out, in]`` as ``clearhead::pack_weight`` lays it out, for the instruction set in use.

    Attributes:
        panels: uint8 ``[panels, columns, bytes]``: a column has the inputs of one output, padded.
        like: a tensor of the weight's shape and dtype without elements of its own.
    """

    panels: Tensor
    like: Tensor

    @classmethod
    def of(cls, weight: Float[Tensor, "out in"]) -> Self:
        """A copy of a weight in panels."""
        panels = torch.ops.clearhead.pack_weight.default(weight.detach())
        return cls(panels, weight.detach().new_empty(1).expand(weight.shape))

    @property
    def shape(self) -> torch.Size:
        """``(out, in)``."""
        return self.like.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.like.dtype

    @property
    def columns(self) -> int:
        """Outputs that a panel has."""
        return self.panels.shape[1]

    def numel(self) -> int:
        """Elements of the weight."""
        return self.like.numel()

    def rows(self, first: int, last: int) -> Self:
        """The rows from ``first``, where a panel begins, to before ``last``, without a copy."""
        panels = self.panels[first // self.columns : -(-last // self.columns)]
        return replace(self, panels=panels, like=self.like[first:last])

    def dense(self) -> Float[Tensor, "out in"]:
        """A copy of the weight in its usual layout.

        >>> from clearhead.ops.library import library
        >>> weight = torch.arange(6.0).view(2, 3)
        >>> library() is None or torch.equal(PackedWeight.of(weight).dense(), weight)
        True
        """
        copy: Tensor = torch.ops.clearhead.unpack_weight.default(self.panels, self.like)
        return copy


#: A weight ``[out, in]``: in floating point, packed or as integers.
Weight: TypeAlias = Tensor | PackedWeight | QuantizedWeight


class PackedParameter(nn.Parameter):
    """A parameter ``[out, in]``, or ``[in, out]``, whose elements are in the kernels' panels and nowhere else.

    Operators of torch read a copy in the usual layout, made for the call. What they write in place is packed again;
    what is written through a view, ``detach()`` or a NumPy array is written to such a copy and lost. Copied or pickled
    it is an ordinary parameter.

    Attributes:
        packed: the weight ``[out, in]``.
        transposed: whether the parameter is ``[in, out]``.
        original: the parameter that it stands for, without elements.
    """

    packed: PackedWeight
    transposed: bool
    original: nn.Parameter

    def __new__(cls, packed: PackedWeight, transposed: bool, original: nn.Parameter) -> Self:
        shape = packed.shape[::-1] if transposed else packed.shape
        parameter = wrapper_tensor(cls, tuple(shape), packed.dtype, packed.panels.device)
        parameter.packed, parameter.transposed, parameter.original = packed, transposed, original
        return parameter

    @classmethod
    def in_place_of(cls, original: nn.Parameter, packed: PackedWeight, transposed: bool) -> Self:
        """The same values in panels; ``original`` loses its elements."""
        parameter = cls(packed, transposed, original)
        original.data = original.new_empty(0)
        return parameter

    def unpacked(self) -> Tensor:
        """A copy of the parameter in the usual layout."""
        weight = self.packed.dense()
        return weight.t().contiguous() if self.transposed else weight

    def restored(self) -> nn.Parameter:
        """The original with its elements."""
        self.original.data = self.unpacked()
        return self.original

    def write(self, values: Tensor) -> None:
        """Replace the elements."""
        self.packed.panels.copy_(PackedWeight.of(values.t() if self.transposed else values).panels)

    @property
    def data(self) -> Tensor:
        """A copy in the usual layout; assigning replaces the elements."""
        return self.unpacked()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape or values.dtype is not self.dtype or not values.is_cpu:
            raise UnsupportedError.about(
                "freeze",
                "a packed weight",
                must=f"stay {self.dtype} {tuple(self.shape)} on the CPU",
                got=f"{values.dtype} {tuple(values.shape)} on {values.device}",
                then="Call ch.unfreeze(model) first.",
            )
        self.write(values)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        copies: dict[int, tuple[PackedParameter, Tensor]] = {}

        def copied(part: Any) -> Any:
            if isinstance(part, (list, tuple)):
                return type(part)(map(copied, part))
            if not isinstance(part, PackedParameter):
                return part
            if id(part) not in copies:
                copies[id(part)] = part, part.unpacked()
            return copies[id(part)][1]

        result = func(*map(copied, args), **{name: copied(part) for name, part in (kwargs or {}).items()})
        for parameter, copy in copies.values():
            # Operators that write return what they wrote to; those that write to lists return nothing.
            if result is copy or result is None:
                parameter.write(copy)
                result = parameter if result is copy else None
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.unpacked(), requires_grad=False)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.unpacked(), requires_grad=False).__reduce_ex__(protocol)


def as_stored(weight: Weight) -> Weight:
    """A weight as fused operators read it."""
    return weight.packed if isinstance(weight, PackedParameter) else weight
