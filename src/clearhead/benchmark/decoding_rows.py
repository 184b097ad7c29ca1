"""Decoding with a cache: a stack of layers generates tokens one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.benchmark.cases import Comparison, PlainRow
from clearhead.benchmark.peers import OURS, Call, Groups
from clearhead.nn import Decoder, DecoderBlock
from clearhead.projection import choice

__all__ = ["PLAIN_LAYERS", "DecodingRow", "decoding_rows"]

PLAIN_LAYERS: Final = "nn.Linear, SDPA and a cache"
#: Batch, cached tokens, width and heads.
_SIZES: Final = (
    (1, 32, 64, 4),
    (1, 64, 128, 4),
    (1, 256, 384, 6),
    (1, 512, 768, 12),
    (1, 2048, 768, 12),
    (8, 256, 384, 6),
    (16, 512, 512, 8),
)
#: Sizes that are also measured with rotary positions.
_ROTARY_SIZES: Final = ((1, 64, 128, 4), (1, 512, 768, 12), (8, 256, 384, 6))
_LAYERS: Final = 4
#: How many tokens are decoded one after the other.
_TOKENS: Final = 16
#: Positions in the table of angles.
_MOST_POSITIONS: Final = 4096


@dataclass(frozen=True, kw_only=True)
class DecodingRow(PlainRow):
    """Sixteen decoding steps through four layers with a filled cache.

    Args:
        size: batch, cached tokens, width and heads; the feedforward is four times as wide, with GELU.
        dtype: of weights and inputs.
        layers: number of layers.
        rotary: whether the layers use rotary positions.
    """

    size: tuple[int, int, int, int]
    dtype: torch.dtype
    layers: int = _LAYERS
    rotary: bool = False

    @property
    def title(self) -> str:
        """Description of the work."""
        batch, prompt_len, width, heads = self.size
        kind = " with rotary positions" if self.rotary else ""
        return f"decoding {batch}x{prompt_len}x{width}x{heads}, {self.layers} layers{kind} {self.group}"

    @property
    def operations(self) -> float:
        """Operations of the linear layers, and of each token's attention to the cached tokens."""
        batch, prompt_len, width, _ = self.size
        return self.layers * _TOKENS * batch * (24.0 * width**2 + 4.0 * width * (prompt_len + (_TOKENS + 1) / 2))

    @property
    def memory_read(self) -> float:
        """Bytes read: the weights once for each token, and the caches."""
        batch, prompt_len, width, _ = self.size
        numbers = 12.0 * width**2 + 2.0 * batch * width * (prompt_len + (_TOKENS + 1) / 2)
        return self.layers * _TOKENS * numbers * self.dtype.itemsize

    def comparison(self) -> Comparison:
        """The contenders; the error of torch's own layers sets the tolerance of the others."""
        batch, prompt_len, width, heads = self.size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            ours = Decoder(width, heads, self.layers, rotary=self.rotary).to(self.dtype).eval()
            x = torch.randn(batch, prompt_len + _TOKENS, width).to(self.dtype)
        theirs = _PlainLayers(ours)
        builders: dict[str, Callable[[], Call]] = {
            OURS: lambda: _our_call(ours, x),
            PLAIN_LAYERS: lambda: _their_call(theirs, x),
        }
        return Comparison(
            title=self.title,
            calls={name: build() for name, build in builders.items()},
            exact=_their_call(deepcopy(theirs).double(), x.double()),
            plain=_their_call(theirs, x),
            backend=lambda: choice("forward", self.dtype).path,
        )

    def small(self) -> Self:
        """Two layers of 32 channels on few tokens."""
        batch, prompt_len, _, _ = self.size
        return replace(self, size=(min(batch, 2), min(prompt_len, 20), 32, 4), layers=2)


def _our_call(decoder: Decoder, x: Tensor) -> Call:
    cache, prompt_len = decoder.new_cache(), x.shape[1] - _TOKENS
    with torch.no_grad():
        decoder(x[:, :prompt_len], cache=cache)

    @torch.no_grad()
    def call() -> Groups:
        tokens = [decoder(x[:, place : place + 1], cache=cache) for place in range(prompt_len, x.shape[1])]
        cache.truncate(prompt_len)
        return ((torch.cat(tokens, 1),),)

    return call


def _their_call(layers: _PlainLayers, x: Tensor) -> Call:
    prompt_len = x.shape[1] - _TOKENS
    caches = layers.new_caches(x)
    with torch.no_grad():
        layers(x[:, :prompt_len], caches, 0)

    @torch.no_grad()
    def call() -> Groups:
        tokens = [layers(x[:, place : place + 1], caches, place) for place in range(prompt_len, x.shape[1])]
        return ((torch.cat(tokens, 1),),)

    return call


class _PlainLayers(nn.Module):
    """The same layers with torch alone: packed projections, rotary positions from a table, SDPA, and preallocated
    caches of keys and values."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_PlainLayer(block) for block in decoder.blocks if isinstance(block, DecoderBlock))
        self.norm = deepcopy(decoder.norm)
        self.exact_angles = _angles(decoder)
        weight, *_ = decoder.parameters()
        self.angles = [part.to(weight.dtype) for part in self.exact_angles]

    def double(self) -> Self:
        """The layers in float64, with the angles in float64."""
        self.angles = [*self.exact_angles]
        return super().double()

    def new_caches(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Empty caches for the keys and values of the tokens of ``x``."""
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
    """One pre-norm layer."""

    def __init__(self, block: DecoderBlock) -> None:
        super().__init__()
        attention, fed, self.heads = block.attention, block.feedforward, block.attention.num_heads
        self.rotary = attention.rotary is not None
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
        if self.rotary:
            query, key = _rotate(query, *angles), _rotate(key, *angles)
        last = first + new
        keys[:, :, first:last], values[:, :, first:last] = key, value
        # One token attends to the whole cache; a prompt starts with an empty cache.
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


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Heads rotated by the angles of their positions."""
    x, y = heads.chunk(2, -1)
    return heads * cosine + torch.cat([-y, x], -1) * sine


def _plain(layer: nn.Module) -> nn.Linear:
    """A plain ``nn.Linear`` with the weights of ``layer``."""
    assert isinstance(layer, nn.Linear)
    copy = nn.Linear(layer.in_features, layer.out_features)
    copy.weight, copy.bias = deepcopy(layer.weight), deepcopy(layer.bias)
    return copy


def decoding_rows() -> Sequence[DecodingRow]:
    """Every size in both dtypes, and some with rotary positions."""
    kinds = [(size, False) for size in _SIZES] + [(size, True) for size in _ROTARY_SIZES]
    dtypes = (torch.float32, torch.bfloat16)
    return [DecodingRow(size=size, dtype=dtype, rotary=rotary) for dtype, (size, rotary) in product(dtypes, kinds)]
