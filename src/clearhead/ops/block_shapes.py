"""The shapes of blocks, read from the operators' lists in the order of native/torch/block_read.cpp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

import torch

from clearhead.choices import is_invariant
from clearhead.ops.kinds import Activation, Stored

__all__ = ["AttentionShapes", "BlockShapes", "FeedForwardShapes", "LinearShape", "read_blocks", "saved_shapes"]

Shape: TypeAlias = Sequence[int]
#: Keys that attention's backward processes at a time: with as many or fewer it needs no output of forward.
_TILE: Final = 256
#: ``ch_rule_kind`` of the rule without a tensor.
_SOFTCAP: Final = 4


class LinearShape(NamedTuple):
    """A linear layer: its widths, and the places of its weight and bias among the tensors; -1 for no bias."""

    outputs: int
    inputs: int
    weight: int
    bias: int


@dataclass(frozen=True)
class AttentionShapes:
    """An attention with its projections.

    Attributes:
        sources: layers of queries, keys and values; or one that computes all three.
        last: the output projection.
        heads: of queries.
        kv_heads: of keys and values.
        rotary: whether queries and keys are rotated.
        cache: 0 for none, 1 for one that grows, 2 for a cached memory, 3 for a paged one.
        cached: tokens in the cache.
        query_offset: position of the first query.
        before: keys before a query that a window allows; None for all.
        after: keys after a query that a window allows; None for all.
        table: whether the mask is given as a table or as blocks.
    """

    sources: tuple[LinearShape, ...]
    last: LinearShape
    heads: int
    kv_heads: int
    rotary: bool
    cache: int = 0
    cached: int = 0
    query_offset: int = 0
    before: int | None = None
    after: int | None = None
    table: bool = False

    @property
    def head_dim(self) -> int:
        return self.last.inputs // self.heads

    def gemms(self, memory: bool) -> list[tuple[LinearShape, bool]]:
        """The GEMMs of the projections in order, and whether each reads the memory."""
        queries_alone = self.cache == 2
        if len(self.sources) == 1 and (memory or queries_alone):
            (layer,) = self.sources
            queries = layer._replace(outputs=self.heads * self.head_dim)
            rest = layer._replace(outputs=layer.outputs - queries.outputs)
            return [(queries, False)] if queries_alone else [(queries, False), (rest, True)]
        layers = self.sources[:1] if queries_alone else self.sources
        return [(layer, memory and place > 0) for place, layer in enumerate(layers)]


@dataclass(frozen=True)
class FeedForwardShapes:
    """A feedforward: layers of the gate, where there is one, of what expands and of what contracts."""

    layers: tuple[LinearShape, ...]
    activation: int

    @property
    def gated(self) -> bool:
        return len(self.layers) == 3

    @property
    def saves_slopes(self) -> bool:
        return self.gated or self.activation != Activation.RELU


@dataclass(frozen=True)
class BlockShapes:
    """A block: its sublayers in order, and the places of each sublayer's norm among the tensors."""

    residual: bool
    pre_norm: bool
    sublayers: tuple[AttentionShapes | FeedForwardShapes, ...]
    norms: tuple[tuple[int, int], ...]

    def reads_memory(self, place: int, sequences: int) -> bool:
        """Whether the sublayer's keys and values are of the memory: those of the last attention are."""
        attentions = sum(isinstance(one, AttentionShapes) for one in self.sublayers)
        return sequences > 1 and place + 1 == attentions

    @property
    def outputs(self) -> int:
        """Channels of the result."""
        last = self.sublayers[-1]
        return last.last.outputs if isinstance(last, AttentionShapes) else last.layers[-1].outputs


class _ListReader:
    """Walks along the list of integers; of the tensors it tells shapes. Floats say nothing about shapes."""

    def __init__(self, tensors: Sequence[Shape], integers: Sequence[int]) -> None:
        self._tensors, self._integers = tensors, integers
        self._next_tensor = self._next_integer = 0

    def integer(self) -> int:
        self._next_integer += 1
        return self._integers[self._next_integer - 1]

    def each(self, count: int, *, other_tensors: bool) -> Iterator[int]:
        """The places of the blocks that come next. A flag says whether the first one's integers are read for each of
        them; ``other_tensors`` whether each has tensors of its own then."""
        same = self.integer()
        integer, tensor = self._next_integer, self._next_tensor
        for place in range(count):
            if same:
                self._next_integer = integer
                self._next_tensor = self._next_tensor if other_tensors else tensor
            yield place

    def optional_integer(self) -> int | None:
        return self.integer() if self.integer() else None

    def tensor(self) -> int:
        """The next tensor's place."""
        self._next_tensor += 1
        return self._next_tensor - 1

    def optional_tensor(self) -> int:
        return self.tensor() if self.integer() else -1

    def linears(self, count: int) -> tuple[LinearShape, ...]:
        return tuple(self._linear() for _ in range(count))

    def _linear(self) -> LinearShape:
        weight = self.tensor()
        bias, stored = self.optional_tensor(), self.integer()
        if stored == Stored.PANELS:
            return LinearShape(self.integer(), self.integer(), weight, bias)
        if stored == Stored.PLAIN:
            outputs, inputs = self._tensors[weight]
            return LinearShape(outputs, inputs, weight, bias)
        outputs, _groups = self._tensors[self.tensor()]
        if stored == Stored.INT8_PANELS:
            inputs = self.integer()
        else:
            inputs = self._tensors[weight][1] * (2 if stored == Stored.INT4 else 1)
        self.optional_tensor()
        _rounding, _low, _high = self.integer(), self.integer(), self.integer()
        return LinearShape(outputs, inputs, weight, bias)

    def norm(self) -> tuple[int, int]:
        self.integer()
        return self.optional_tensor(), self.optional_tensor()

    def attention(self) -> AttentionShapes:
        together, heads, kv_heads = (self.integer() for _ in range(3))
        *sources, last = self.linears(2 if together else 4)
        if self.integer():
            self.norm(), self.norm()
        return AttentionShapes(tuple(sources), last, heads, kv_heads, rotary=bool(self.integer()))

    def attention_call(self, shapes: AttentionShapes) -> AttentionShapes:
        if shapes.rotary:
            self.tensor()
        cache = self.integer()
        cached = self.integer() if cache in (1, 2) else 0
        if cache == 3:
            self.tensor(), self.tensor(), self.tensor()
        self.integer()
        offset = self.integer()
        for _ in ("first_batch", "first_head", "first_key", "first_position"):
            self.integer()
        self.optional_tensor()
        before, after, table = self._mask()
        self._rules()
        offset = cached if cache == 1 else offset
        return replace(shapes, cache=cache, cached=cached, query_offset=offset, before=before, after=after, table=table)

    def _mask(self) -> tuple[int | None, int | None, bool]:
        before, after = self.optional_integer(), self.optional_integer()
        if self.integer():
            self.tensor(), self.tensor()
        allowed = self.integer()
        if allowed:
            self.tensor()
        blocks = self.integer()
        if blocks:
            self.tensor(), self.integer()
        return before, after, bool(allowed or blocks)

    def _rules(self) -> None:
        for _ in range(self.integer()):
            if self.integer() != _SOFTCAP:
                self.tensor()
        self.optional_tensor()

    def feedforward(self) -> FeedForwardShapes:
        layers = self.linears(self.integer())
        activation, _ = self.integer(), self.integer()
        return FeedForwardShapes(layers, activation)

    def block(self) -> BlockShapes:
        residual, pre_norm = bool(self.integer()), bool(self.integer())
        sublayers: list[AttentionShapes | FeedForwardShapes] = [self.attention() for _ in range(self.integer())]
        if self.integer():
            sublayers.append(self.feedforward())
        norms = tuple(self._around() for _ in sublayers) if residual else ()
        return BlockShapes(residual, pre_norm, tuple(sublayers), norms)

    def block_call(self, block: BlockShapes) -> BlockShapes:
        attentions = [self.attention_call(one) for one in block.sublayers if isinstance(one, AttentionShapes)]
        rest = block.sublayers[len(attentions) :]
        if rest or block.norms:
            self.optional_tensor()
        for _ in range(len(rest) + len(block.norms)):
            self.integer(), self.integer()
        return replace(block, sublayers=(*attentions, *rest))

    def _around(self) -> tuple[int, int]:
        norm = self.norm()
        if self.integer():
            self.norm()
        self.integer()
        return norm


def read_blocks(tensors: Sequence[Shape], integers: Sequence[int]) -> list[BlockShapes]:
    """The blocks that the operator's lists describe.

    Args:
        tensors: the shapes of the list of tensors.
        integers: the list of integers.
    """
    reader = _ListReader(tensors, integers)
    count = reader.integer()
    blocks = [reader.block() for _ in reader.each(count, other_tensors=True)]
    return [reader.block_call(blocks[place]) for place in reader.each(count, other_tensors=False)]


def saved_shapes(
    block: BlockShapes, tokens: Sequence[Shape], dtype: torch.dtype
) -> Iterator[tuple[Shape, torch.dtype]]:
    """The tensors that ``block_forward`` saves while training, in its order (native/torch/block_forward.cpp)."""
    batch, length, width = tokens[0]
    rows = batch * length
    whole, moments = ((rows, width), dtype), ((rows, 2), torch.float32)
    for place, sublayer in enumerate(block.sublayers):
        first, last = place == 0, place + 1 == len(block.sublayers)
        if block.residual and block.pre_norm:
            yield from ([] if first else [whole])
            yield from (moments, whole)
        if isinstance(sublayer, AttentionShapes):
            yield from _saved_by_attention(sublayer, tokens, block.reads_memory(place, len(tokens)), dtype)
        else:
            count = 1 + sublayer.gated + sublayer.saves_slopes
            yield from [((rows, sublayer.layers[-1].inputs), dtype)] * count
        if block.residual and not block.pre_norm:
            yield from (whole, moments)
            yield from ([] if last else [whole])


def _saved_by_attention(
    shapes: AttentionShapes, tokens: Sequence[Shape], memory: bool, dtype: torch.dtype
) -> Iterator[tuple[Shape, torch.dtype]]:
    batch, length, _ = tokens[0]
    keys = tokens[1][1] if memory else length
    for layer, of_memory in shapes.gemms(memory):
        yield (batch * (keys if of_memory else length), layer.outputs), dtype
    yield (batch * length, shapes.heads * shapes.head_dim), dtype
    yield (batch, shapes.heads, length, 2), torch.float32
    if dtype is not torch.float32 and (keys > _TILE or shapes.table or is_invariant()):
        yield (batch, shapes.heads, length, shapes.head_dim), torch.float32
