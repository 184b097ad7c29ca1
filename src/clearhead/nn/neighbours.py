"""NeighbourMixing: a linear layer over each token and its neighbours, before attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clearhead.invariance import eager_if_invariant
from clearhead.nn.checks import positive
from clearhead.nn.linear import Linear
from clearhead.shapes import Float, Int

__all__ = ["NeighbourMixing"]


class NeighbourMixing(nn.Module):
    """Add a linear function of each token and its neighbours: ``x[t] + gelu(W [x[t - r], ..., x[t + r]] + b)``.

    Small data do not teach attention what an n-gram is; a linear layer over a few neighbours has it from the start
    (Kim 2014, section 2, whose filters these are; Gulati et al. 2020, section 2.2, beside attention).

    Args:
        embed_dim: width of a token.
        reach: neighbours on each side, ``r``.

    Cost: ``2 * (2 r + 1) * embed_dim**2`` operations a token.

    >>> import torch
    >>> NeighbourMixing(8, reach=1)(torch.zeros(1, 3, 8), torch.tensor([[0, 1, 0]])).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, embed_dim: int, reach: int) -> None:
        super().__init__()
        self.reach = positive("NeighbourMixing", "reach", reach)
        embed_dim = positive("NeighbourMixing", "embed_dim", embed_dim)
        self.mix = Linear((2 * self.reach + 1) * embed_dim, embed_dim)

    @eager_if_invariant
    def forward(
        self, x: Float[Tensor, "batch len embed_dim"], places: Int[Tensor, "#batch len"]
    ) -> Float[Tensor, "batch len embed_dim"]:
        """Mix tokens at positions ``places`` of their sequences; beyond a sequence's ends the input is 0."""
        around = [x if step == 0 else _shifted(x, places, step) for step in range(-self.reach, self.reach + 1)]
        mixed: Tensor = x + nn.functional.gelu(self.mix(torch.cat(around, dim=-1)))
        return mixed

    def extra_repr(self) -> str:
        return f"reach={self.reach}"


def _shifted(x: Tensor, places: Tensor, step: int) -> Tensor:
    """The token ``step`` further on in the same sequence, zero where there is none.

    In a packed row sequences follow each other; a neighbour is of the same one where places go on counting.
    """
    same = torch.roll(places, -step, dims=1) == places + step
    return torch.roll(x, -step, dims=1).masked_fill(~same[..., None], 0)
