"""The weight of a linear layer as 8-bit or 4-bit integers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clearhead.ops.kinds import Rounding
from clearhead.shapes import Float

__all__ = ["QuantizedWeight"]


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight ``[out, in]`` of integers: ``scale * integer + offset``, with a scale and an offset for each group.

    Attributes:
        codes: int8 ``[out, in]``; or uint8 ``[out, in / 2]``, two integers of 0 to 15 a byte, the lower half first.
        scale: float32 ``[out, groups]``.
        offset: the same; None for 0.
        rounding: how the layer's input is rounded to integers.
        bounds: least and largest integer of a rounded input.
        panels: the codes as ``clearhead::pack_weight`` lays them out for the instruction set in use, uint8
            ``[panels, columns, bytes]``; None where the codes are read. Only with rounding.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None
    rounding: Rounding = Rounding.NONE
    bounds: tuple[int, int] = (-128, 127)
    panels: Tensor | None = None

    @property
    def bits(self) -> int:
        """Bits of an integer."""
        return 4 if self.codes.dtype is torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    def numel(self) -> int:
        """Number of integers."""
        return self.shape[0] * self.shape[1]

    def rows(self, first: int, last: int) -> QuantizedWeight:
        """The rows from ``first`` to before ``last``, without a copy; without panels unless one begins at ``first``."""
        offset = None if self.offset is None else self.offset[first:last]
        panels = self.panels
        if panels is not None:
            columns = panels.shape[1]
            begins = first % columns == 0 and (last % columns == 0 or last == self.shape[0])
            panels = panels[first // columns : -(-last // columns)] if begins else None
        return replace(self, codes=self.codes[first:last], scale=self.scale[first:last], offset=offset, panels=panels)

    @property
    def read(self) -> Tensor:
        """What the kernels read: the panels, or else the codes."""
        return self.codes if self.panels is None else self.panels

    def packed(self) -> QuantizedWeight:
        """The same with panels, where inputs are rounded.

        >>> weight = QuantizedWeight(torch.tensor([[1, -2]], dtype=torch.int8), torch.tensor([[0.5]]))
        >>> weight.packed() is weight
        True
        """
        if self.rounding is Rounding.NONE:
            return self
        return replace(self, panels=torch.ops.clearhead.pack_weight.default(self.codes))

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.shape[1] // max(1, self.scale.shape[1])

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "out in"]:
        """The weight in floating point, computed in float32, or in float64 for that dtype.

        >>> weight = QuantizedWeight(torch.tensor([[1, -2]], dtype=torch.int8), torch.tensor([[0.5]]))
        >>> weight.dequantized()
        tensor([[ 0.5000, -1.0000]])
        """
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        grouped = codes.to(wide).unflatten(1, (self.scale.shape[1], -1)) * self.scale.to(wide)[..., None]
        if self.offset is not None:
            grouped = grouped + self.offset.to(wide)[..., None]
        dense: Tensor = grouped.flatten(1).to(dtype)
        return dense
