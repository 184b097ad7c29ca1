"""The small parts of torch's transformer layers that take time beside attention: linear layers and dropout."""

from __future__ import annotations

import warnings
from typing import Final

from torch import Tensor, nn
from torch.nn import functional

from clearhead.integrations.recast import stands_for
from clearhead.nn.dropout import Dropout, is_plain
from clearhead.projection import project

__all__ = ["SwappedDropout", "SwappedLinear", "is_plain"]


#: Elements of an input below which the choice of a GEMM takes longer than it saves.
_FEW_ELEMENTS: Final = 2**10


@stands_for(nn.Linear)
class SwappedLinear(nn.Linear):
    """``nn.Linear`` on clearhead's GEMM."""

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() < _FEW_ELEMENTS:
            return functional.linear(input, self.weight, self.bias)
        # Subclasses, traced tensors and the like are computed by torch there.
        return project(input, self.weight, self.bias)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "qconfig" and value is None:
            warnings.warn(
                "swapped linear layers are not quantised: torch.ao.quantization looks for the class torch.nn.Linear. "
                "Call clearhead.unswap(model) first, or quantise before swap.",
                stacklevel=2,
            )
        super().__setattr__(name, value)  # type: ignore[arg-type]


@stands_for(nn.Dropout)
class SwappedDropout(Dropout):
    """``nn.Dropout`` on clearhead's kernel."""
