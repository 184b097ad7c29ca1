"""The small parts of torch's transformer layers that take time beside attention: products and dropout."""

from __future__ import annotations

from torch import Tensor, nn

from clearhead.nn.dropout import Dropout, is_plain
from clearhead.projection import project

__all__ = ["SwappedDropout", "SwappedLinear", "is_plain"]


class SwappedLinear(nn.Linear):
    """``nn.Linear`` through the faster product; put in place by ``swap``, not made directly."""

    def forward(self, input: Tensor) -> Tensor:
        return project(input, self.weight, self.bias) if is_plain(input) else super().forward(input)


class SwappedDropout(Dropout):
    """``nn.Dropout``, faster; put in place by ``swap``, not made directly."""
