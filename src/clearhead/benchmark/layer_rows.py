"""A linear layer on few tokens, as in decoding, where memory bandwidth bounds the speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, Self

import torch
from torch.nn import functional

from clearhead.benchmark.cases import Comparison, PlainRow
from clearhead.benchmark.peers import OURS, Call, Groups
from clearhead.projection import choice, project

__all__ = ["LINEAR", "LinearLayerRow", "layer_rows"]

LINEAR: Final = "functional.linear"
#: Widths in and out: a feedforward's halves, a large model's projection, GPT-2's vocabulary.
_WIDTHS: Final = ((768, 3072), (3072, 768), (4096, 4096), (768, 50257))
_TOKENS: Final = (1, 4, 16, 64, 256)


@dataclass(frozen=True, kw_only=True)
class LinearLayerRow(PlainRow):
    """``project`` against ``torch.nn.functional.linear``.

    Args:
        tokens: number of rows.
        width: input features.
        out: output features.
        dtype: of weight and input.
    """

    tokens: int
    width: int
    out: int
    dtype: torch.dtype

    @property
    def title(self) -> str:
        """Description of the work."""
        return f"{self.tokens} tokens through {self.width}x{self.out} {str(self.dtype).removeprefix('torch.')}"

    @property
    def operations(self) -> float:
        """Operations of the product."""
        return 2.0 * self.tokens * self.width * self.out

    @property
    def memory_read(self) -> float:
        """Bytes of the weight."""
        return float(self.width * self.out * self.dtype.itemsize)

    def comparison(self) -> Comparison:
        """The contenders."""
        generator = torch.Generator().manual_seed(0)
        sizes = ((self.tokens, self.width), (self.out, self.width), (self.out,))
        x, weight, bias = (torch.randn(size, generator=generator).to(self.dtype) for size in sizes)

        def ours() -> Groups:
            return ((project(x, weight, bias),),)

        def theirs() -> Groups:
            return ((functional.linear(x, weight, bias),),)

        def exact() -> Groups:
            return ((functional.linear(x.double(), weight.double(), bias.double()),),)

        calls: dict[str, Call] = {OURS: torch.no_grad()(ours), LINEAR: torch.no_grad()(theirs)}
        return Comparison(
            title=self.title, calls=calls, exact=exact, plain=theirs, backend=lambda: choice("forward", self.dtype).path
        )

    def small(self) -> Self:
        """Widths below 64."""
        return replace(self, tokens=min(self.tokens, 3), width=min(self.width, 48), out=min(self.out, 40))


def layer_rows() -> Sequence[LinearLayerRow]:
    """Rows of every width and number of tokens, in both dtypes."""
    return [
        LinearLayerRow(tokens=tokens, width=width, out=out, dtype=dtype)
        for dtype, (width, out), tokens in product((torch.float32, torch.bfloat16), _WIDTHS, _TOKENS)
    ]
