"""Decoding with a cache: a stack of layers that takes tokens one by one, as a text is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.benchmark.cases import Case
from clearhead.benchmark.peers import OURS, Call, Groups
from clearhead.nn import Decoder, DecoderBlock
from clearhead.projection import choice

__all__ = ["PLAIN_LAYERS", "DecodingRow", "decoding_rows"]

PLAIN_LAYERS: Final = "nn.Linear, SDPA and a cache"
#: Batch, tokens held, width and heads.
_SIZES: Final = (
    (1, 32, 64, 4),
    (1, 64, 128, 4),
    (1, 256, 384, 6),
    (1, 512, 768, 12),
    (1, 2048, 768, 12),
    (8, 256, 384, 6),
    (16, 512, 512, 8),
)
#: Those with rotary positions besides.
_TURNED: Final = ((1, 64, 128, 4), (1, 512, 768, 12), (8, 256, 384, 6))
_LAYERS: Final = 4
#: How many tokens are decoded one after the other.
_TOKENS: Final = 16
#: For which angles are there beforehand.
_MOST_POSITIONS: Final = 4096


@dataclass(frozen=True, kw_only=True)
class DecodingRow:
    """Sixteen tokens, one after the other, through four layers whose caches hold some already.

    Args:
        size: batch, tokens that are held, width and heads; the feedforward is four times as wide, with GELU.
        dtype: of weights and inputs.
        layers: how many there are.
        rotary: whether queries and keys are turned by their positions.
    """

    size: tuple[int, int, int, int]
    dtype: torch.dtype
    layers: int = _LAYERS
    rotary: bool = False
    memory: bool = False

    @property
    def title(self) -> str:
        """What the work is."""
        batch, held, width, heads = self.size
        kind = " with rotary positions" if self.rotary else ""
        return f"decoding {batch}x{held}x{width}x{heads}, {self.layers} layers{kind} {self.group}"

    @property
    def group(self) -> str:
        """The dtype."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def operations(self) -> float:
        """Of the products by width, and of each token with those before it."""
        batch, held, width, _ = self.size
        return self.layers * _TOKENS * batch * (24.0 * width**2 + 4.0 * width * (held + (_TOKENS + 1) / 2))

    @property
    def memory_read(self) -> float:
        """Weights once for each token, and what the caches hold."""
        batch, held, width, _ = self.size
        numbers = 12.0 * width**2 + 2.0 * batch * width * (held + (_TOKENS + 1) / 2)
        return self.layers * _TOKENS * numbers * self.dtype.itemsize

    def case(self) -> Case:
        """The contenders; torch's own layers set how far off the others may be."""
        batch, held, width, heads = self.size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            ours = Decoder(width, heads, self.layers, rotary=self.rotary).to(self.dtype).eval()
            x = torch.randn(batch, held + _TOKENS, width).to(self.dtype)
        theirs = _PlainLayers(ours)
        builders: dict[str, Callable[[], Call]] = {
            OURS: lambda: _our_call(ours, x),
            PLAIN_LAYERS: lambda: _their_call(theirs, x),
        }
        return Case(
            title=self.title,
            calls={name: build() for name, build in builders.items()},
            exact=_their_call(deepcopy(theirs).double(), x.double()),
            plain=_their_call(theirs, x),
            backend=lambda: choice("forward", self.dtype).path,
        )

    def small(self) -> Self:
        """Two layers of 32 channels on few tokens."""
        batch, held, _, _ = self.size
        return replace(self, size=(min(batch, 2), min(held, 20), 32, 4), layers=2)


def _our_call(decoder: Decoder, x: Tensor) -> Call:
    cache, held = decoder.new_cache(), x.shape[1] - _TOKENS
    with torch.no_grad():
        decoder(x[:, :held], cache=cache)

    @torch.no_grad()
    def call() -> Groups:
        tokens = [decoder(x[:, place : place + 1], cache=cache) for place in range(held, x.shape[1])]
        cache.truncate(held)
        return ((torch.cat(tokens, 1),),)

    return call


def _their_call(layers: _PlainLayers, x: Tensor) -> Call:
    held = x.shape[1] - _TOKENS
    caches = layers.new_caches(x)
    with torch.no_grad():
        layers(x[:, :held], caches, 0)

    @torch.no_grad()
    def call() -> Groups:
        tokens = [layers(x[:, place : place + 1], caches, place) for place in range(held, x.shape[1])]
        return ((torch.cat(tokens, 1),),)

    return call


class _PlainLayers(nn.Module):
    """What one writes with torch alone: packed projections, rotary positions from a table, SDPA, and keys and values
    written into memory that is there beforehand."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_PlainLayer(block) for block in decoder.blocks if isinstance(block, DecoderBlock))
        self.norm = deepcopy(decoder.norm)
        self.exact_angles = _angles(decoder)
        weight, *_ = decoder.parameters()
        self.angles = [part.to(weight.dtype) for part in self.exact_angles]

    def double(self) -> Self:
        """In float64, with angles that nothing has rounded."""
        self.angles = [*self.exact_angles]
        return super().double()

    def new_caches(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Room for the keys and values of as many tokens."""
        heads = [layer.heads for layer in self.layers if isinstance(layer, _PlainLayer)]
        shapes = [(len(x), count, x.shape[1], x.shape[2] // count) for count in heads]
        return [(x.new_empty(shape), x.new_empty(shape)) for shape in shapes]

    def forward(self, x: Tensor, caches: Sequence[tuple[Tensor, Tensor]], first: int) -> Tensor:
        angles = [part[first : first + x.shape[1]] for part in self.angles]
        for layer, (keys, values) in zip(self.layers, caches, strict=True):
            x = layer(x, keys, values, first, angles)
        output: Tensor = self.norm(x)
        return output


class _PlainLayer(nn.Module):
    """One of them, norms first."""

    def __init__(self, block: DecoderBlock) -> None:
        super().__init__()
        attention, fed, self.heads = block.attention, block.feedforward, block.attention.num_heads
        self.turned = attention.rotary is not None
        parts = (attention.query_projection, attention.key_projection, attention.value_projection)
        self.packed = nn.Linear(attention.embed_dim, 3 * attention.embed_dim)
        with torch.no_grad():
            self.packed.weight = nn.Parameter(torch.cat([part.weight for part in parts]))
            self.packed.bias = nn.Parameter(torch.cat([part.bias for part in parts]))
        last = attention.output_projection
        assert last is not None
        self.mixed, self.expand, self.contract = (_plain(layer) for layer in (last, fed.expand, fed.contract))
        self.attention_norm, self.feedforward_norm = deepcopy(block.attention_norm), deepcopy(block.feedforward_norm)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, first: int, angles: Sequence[Tensor]) -> Tensor:
        batch, new, width = x.shape
        packed = self.packed(self.attention_norm(x)).view(batch, new, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        if self.turned:
            query, key = _turned(query, *angles), _turned(key, *angles)
        last = first + new
        keys[:, :, first:last], values[:, :, first:last] = key, value
        # One token sees all that is there; a prompt has nothing before it.
        heads = F.scaled_dot_product_attention(query, keys[:, :, :last], values[:, :, :last], is_causal=new > 1)
        x = x + self.mixed(heads.transpose(1, 2).reshape(batch, new, width))
        output: Tensor = x + self.contract(F.gelu(self.expand(self.feedforward_norm(x))))
        return output


def _angles(decoder: Decoder) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[positions, head_dim]`` of rotary positions."""
    (block, *_) = decoder.blocks
    assert isinstance(block, DecoderBlock)
    half, rotary = block.attention.head_dim // 2, block.attention.rotary
    rates = (1.0 if rotary is None else rotary.base) ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(_MOST_POSITIONS, dtype=torch.float64), rates).repeat(1, 2)
    return angles.cos(), angles.sin()


def _turned(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Heads at their positions."""
    x, y = heads.chunk(2, -1)
    return heads * cosine + torch.cat([-y, x], -1) * sine


def _plain(layer: nn.Module) -> nn.Linear:
    """torch's own layer with the weights of one."""
    assert isinstance(layer, nn.Linear)
    own = nn.Linear(layer.in_features, layer.out_features)
    own.weight, own.bias = deepcopy(layer.weight), deepcopy(layer.bias)
    return own


def decoding_rows() -> Sequence[DecodingRow]:
    """Every size in both dtypes, and some with rotary positions."""
    kinds = [(size, False) for size in _SIZES] + [(size, True) for size in _TURNED]
    dtypes = (torch.float32, torch.bfloat16)
    return [DecodingRow(size=size, dtype=dtype, rotary=turned) for dtype, (size, turned) in product(dtypes, kinds)]
