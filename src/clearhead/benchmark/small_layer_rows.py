"""One small transformer layer, where Python's overhead or narrow products dominate the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from clearhead.benchmark.cases import Comparison, PlainRow
from clearhead.benchmark.encoders import SWAPPED, dropping, our_parameters, their_parameters
from clearhead.benchmark.peers import OURS, Call, Groups
from clearhead.integrations.swap import swap
from clearhead.nn.blocks import DecoderBlock, EncoderBlock
from clearhead.projection import choice

__all__ = ["DECODER_LAYER", "ENCODER_LAYER", "SmallLayerRow", "decoder_layer_rows", "encoder_layer_rows"]

ENCODER_LAYER: Final = "nn.TransformerEncoderLayer"
DECODER_LAYER: Final = "nn.TransformerDecoderLayer"
#: Batch, tokens, width and heads; among them a digit classifier, and last a small sentence encoder.
_SIZES: Final = (
    (1, 8, 32, 4),
    (1, 32, 64, 4),
    (8, 32, 64, 4),
    (64, 64, 64, 4),
    (16, 64, 128, 4),
    (1, 32, 384, 12),
    (1, 128, 384, 12),
)
#: The same for decoder layers, and the tokens of the memory; last a translation model.
_DECODER_SIZES: Final = (
    ((1, 8, 32, 4), 8),
    ((1, 16, 128, 4), 32),
    ((16, 32, 64, 4), 32),
    ((16, 64, 128, 4), 64),
    ((4, 128, 256, 4), 128),
    ((32, 20, 256, 8), 30),
    ((8, 64, 512, 8), 64),
)


@dataclass(frozen=True, kw_only=True)
class SmallLayerRow(PlainRow):
    """A layer with GELU, forward in eval mode or a training step: an encoder's, or a decoder's under the causal mask.

    Args:
        size: batch, tokens, width and heads; the feedforward is four times as wide.
        memory_len: tokens of the memory of a decoder layer; 0 for an encoder layer.
        dtype: of weights and inputs.
        training: whether the backward pass is included.
        dropout: probability of dropping a weight or a channel.
    """

    size: tuple[int, int, int, int]
    memory_len: int = 0
    dtype: torch.dtype
    training: bool = False
    dropout: float = 0.0

    @property
    def title(self) -> str:
        """Description of the work."""
        work = "training step" if self.training else "forward"
        dropout = f" dropout {self.dropout:g}" if self.dropout else ""
        batch, length, width, heads = self.size
        kind, attended = ("decoder layer", f":{self.memory_len}") if self.memory_len else ("layer", "")
        return f"{kind} {batch}x{length}{attended}x{width}x{heads} {work} {self._dtype}{dropout}"

    @property
    def group(self) -> str:
        """The dtype, and whether the backward pass is included."""
        return f"{self._dtype}, training" if self.training else self._dtype

    @property
    def _dtype(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def operations(self) -> float:
        """Operations of the linear layers and of attention; three times as many with the backward pass."""
        batch, length, width, _ = self.size
        work = length * (24.0 * width**2 + 4.0 * width * length)
        if self.memory_len:
            work += (length + self.memory_len) * 4.0 * width**2 + 4.0 * width * length * self.memory_len
        return (3.0 if self.training else 1.0) * batch * work

    def comparison(self) -> Comparison:
        """The contenders; the error of torch's own layer sets the tolerance of the others."""
        batch, length, width, heads = self.size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            kind = nn.TransformerDecoderLayer if self.memory_len else nn.TransformerEncoderLayer
            theirs = kind(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, dtype=self.dtype)
            x, upstream = (torch.randn(batch, length, width).to(self.dtype) for _ in range(2))
            memory = [torch.randn(batch, self.memory_len, width).to(self.dtype)] if self.memory_len else []
        masks = _causal(length) if memory else {}

        def call(module: nn.Module, parameters: Sequence[Tensor], dtype: torch.dtype, masks: dict[str, Any]) -> Call:
            given = [each.to(dtype) for each in (x, *memory)]
            return self._call(partial(module.train(self.training), **masks), parameters, given, upstream.to(dtype))

        def torchs(dropout: float) -> Call:
            layer = dropping(theirs, dropout)
            return call(layer, their_parameters(layer), self.dtype, masks)

        def swapped(dropout: float) -> Call:
            layer = dropping(theirs, dropout)
            swap(layer)
            return call(layer, their_parameters(layer), self.dtype, masks)

        def ours(dropout: float) -> Call:
            layer = dropping(theirs, dropout)
            if isinstance(layer, nn.TransformerEncoderLayer):
                block = EncoderBlock.from_torch(layer)
                return call(block, our_parameters(block), self.dtype, {})
            decoder = DecoderBlock.from_torch(layer)
            return call(_MemoryBlock(decoder), our_parameters(decoder), self.dtype, {})

        def exact() -> Groups:
            layer = deepcopy(theirs).double()
            return call(layer, their_parameters(layer), torch.float64, masks)()

        peer = DECODER_LAYER if memory else ENCODER_LAYER
        builders: dict[str, Callable[[float], Call]] = {OURS: ours, SWAPPED: swapped, peer: torchs}
        return Comparison(
            title=self.title,
            calls={name: build(self.dropout) for name, build in builders.items()},
            exact=exact,
            plain=torchs(0.0),
            checked={name: _without_dropout(build) for name, build in builders.items()},
            noisy=tuple(builders) if self.dropout else (),
            backend=lambda: choice("forward", self.dtype).path,
        )

    def _call(
        self, run: Callable[..., Tensor], parameters: Sequence[Tensor], tokens: Sequence[Tensor], upstream: Tensor
    ) -> Call:
        def forward() -> Groups:
            return ((run(*tokens),),)

        learned = [each.clone().requires_grad_() for each in tokens]

        def training() -> Groups:
            output = run(*learned)
            gradients = torch.autograd.grad(output, (*learned, *parameters), upstream)
            return (output.detach(),), gradients[: len(learned)], gradients[len(learned) :]

        return training if self.training else torch.no_grad()(forward)

    def small(self) -> Self:
        """At most 3 tokens of 32 channels."""
        batch, length, _, _ = self.size
        return replace(self, size=(min(batch, 2), min(length, 3), 32, 4), memory_len=min(self.memory_len, 5))


def _without_dropout(build: Callable[[float], Call]) -> Call:
    return lambda: build(0.0)()


class _MemoryBlock(nn.Module):
    """A decoder block that takes the memory as its second positional argument, like torch's layer."""

    def __init__(self, block: DecoderBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        output: Tensor = self.block(x, memory=memory)
        return output


def _causal(length: int) -> dict[str, Any]:
    return {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(length), "tgt_is_causal": True}


def encoder_layer_rows() -> Sequence[SmallLayerRow]:
    """Forward, a training step, and a training step with dropout, for every size and both dtypes."""
    return [
        SmallLayerRow(size=size, dtype=dtype, training=training, dropout=dropout)
        for dtype, (training, dropout), size in product(_DTYPES, _WORKS, _SIZES)
    ]


def decoder_layer_rows() -> Sequence[SmallLayerRow]:
    """Rows of the decoder layer: forward, a training step, and a training step with dropout."""
    return [
        SmallLayerRow(size=size, memory_len=others, dtype=dtype, training=training, dropout=dropout)
        for dtype, (training, dropout), (size, others) in product(_DTYPES, _WORKS, _DECODER_SIZES)
    ]


_DTYPES: Final = (torch.float32, torch.bfloat16)
#: Whether the backward pass is included, and the dropout probability.
_WORKS: Final = ((False, 0.0), (True, 0.0), (True, 0.1))
