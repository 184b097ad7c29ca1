"""One encoder layer that is small: where what Python does takes longer than the kernels, or products are narrow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, Self

import torch
from torch import Tensor, nn

from clearhead.benchmark.cases import Case
from clearhead.benchmark.encoders import SWAPPED, dropping, our_parameters, their_parameters
from clearhead.benchmark.peers import OURS, Call, Groups
from clearhead.bridges.swap import swap
from clearhead.nn.blocks import EncoderBlock
from clearhead.projection import choice

__all__ = ["LAYER", "EncoderLayerRow", "encoder_layer_rows"]

LAYER: Final = "nn.TransformerEncoderLayer"
#: Batch, tokens, width and heads; a classifier of digits' is among them, and last a small sentence encoder's.
_SIZES: Final = (
    (1, 8, 32, 4), (1, 32, 64, 4), (8, 32, 64, 4), (64, 64, 64, 4), (16, 64, 128, 4), (1, 32, 384, 12),
    (1, 128, 384, 12),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EncoderLayerRow:
    """A layer with GELU, forward in eval mode or a training step.

    Args:
        size: batch, tokens, width and heads; the feedforward is four times as wide.
        dtype: of weights and inputs.
        training: whether with backward.
        dropout: probability of dropping a weight or a channel.
    """

    size: tuple[int, int, int, int]
    dtype: torch.dtype
    training: bool = False
    dropout: float = 0.0
    memory: bool = False

    @property
    def title(self) -> str:
        """What the work is."""
        work = "training step" if self.training else "forward"
        dropout = f" dropout {self.dropout:g}" if self.dropout else ""
        return f"layer {'x'.join(map(str, self.size))} {work} {self._dtype}{dropout}"

    @property
    def group(self) -> str:
        """The dtype, and whether with backward."""
        return f"{self._dtype}, training" if self.training else self._dtype

    @property
    def _dtype(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def operations(self) -> float:
        """Of its twelve products by width, and the attention's two; three times that with backward."""
        batch, length, width, _ = self.size
        return (3.0 if self.training else 1.0) * batch * length * (24.0 * width**2 + 4.0 * width * length)

    @property
    def memory_read(self) -> None:
        """Nobody asks."""

    def case(self) -> Case:
        """The contenders; torch's own layer sets how far off the others may be."""
        batch, length, width, heads = self.size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            theirs = nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, dtype=self.dtype
            )
            x, upstream = (torch.randn(batch, length, width).to(self.dtype) for _ in range(2))

        def call(module: nn.Module, parameters: Sequence[Tensor], given: Tensor) -> Call:
            return self._call(module.train(self.training), parameters, given, upstream.to(given.dtype))

        def torchs(dropout: float) -> Call:
            own = dropping(theirs, dropout)
            return call(own, their_parameters(own), x)

        def swapped(dropout: float) -> Call:
            own = dropping(theirs, dropout)
            swap(own)
            return call(own, their_parameters(own), x)

        def ours(dropout: float) -> Call:
            own = EncoderBlock.from_torch(dropping(theirs, dropout))
            return call(own, our_parameters(own), x)

        def exact() -> Groups:
            own = deepcopy(theirs).double()
            return call(own, their_parameters(own), x.double())()

        builders: dict[str, Callable[[float], Call]] = {OURS: ours, SWAPPED: swapped, LAYER: torchs}
        return Case(
            title=self.title, calls={name: build(self.dropout) for name, build in builders.items()}, exact=exact,
            plain=torchs(0.0), checked={name: _without_dropout(build) for name, build in builders.items()},
            noisy=tuple(builders) if self.dropout else (), backend=lambda: choice("forward", self.dtype).path,
        )  # fmt: skip

    def _call(self, module: nn.Module, parameters: Sequence[Tensor], x: Tensor, upstream: Tensor) -> Call:
        def forward() -> Groups:
            return ((module(x),),)

        learned = x.clone().requires_grad_()

        def training() -> Groups:
            output = module(learned)
            found = torch.autograd.grad(output, (learned, *parameters), upstream)
            return (output.detach(),), found[:1], found[1:]

        return training if self.training else torch.no_grad()(forward)

    def small(self) -> Self:
        """At most 3 tokens of 32 channels."""
        batch, length, _, _ = self.size
        return replace(self, size=(min(batch, 2), min(length, 3), 32, 4))


def _without_dropout(build: Callable[[float], Call]) -> Call:
    return lambda: build(0.0)()


def encoder_layer_rows() -> Sequence[EncoderLayerRow]:
    """Forward, a training step, and one with dropout, of every size in both dtypes."""
    works = ((False, 0.0), (True, 0.0), (True, 0.1))
    return [
        EncoderLayerRow(size=size, dtype=dtype, training=training, dropout=dropout)
        for dtype, (training, dropout), size in product((torch.float32, torch.bfloat16), works, _SIZES)
    ]
