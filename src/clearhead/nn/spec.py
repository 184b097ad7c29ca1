"""Records of an attention's and a layer's tensors and options, made by modules and swapped layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self, TypeAlias

from torch import Tensor

from clearhead.ops.block import Tape
from clearhead.ops.dropout import LEVELS
from clearhead.ops.kinds import NormKind
from clearhead.positions import Rotary
from clearhead.projection import ACTIVATIONS, Layer
from clearhead.scores import ScoreRule

__all__ = ["LayerParts", "NormLike", "Projections", "Stack", "Turning"]

#: A norm's kind and epsilon; its weight and bias.
NormLike: TypeAlias = tuple[tuple[NormKind, float], tuple[Tensor | None, Tensor | None]]
#: What rotates an attention's queries and keys: the same at every call, or by ``"angles"`` that come with each.
Turning: TypeAlias = Rotary | Literal["angles"] | None
Mapped: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Projections:
    """Weights and hyperparameters of an attention layer.

    Attributes:
        sources: the layers of queries, keys and values; or one that makes all three side by side.
        last: the layer that mixes the heads.
        num_heads: of queries.
        num_kv_heads: of keys and values.
        scale: factor on ``query @ key^T``; None for ``1 / sqrt(head_dim)``.
        dropout: probability of dropping a weight.
        backend: as ``attention`` takes it.
        rotary: what rotates queries and keys by their positions, if anything; ``"angles"`` come with a call.
        rules: gives the score rules of a call.
        head_norms: norms of each head's queries and of its keys, before they are rotated; without gradients alone.
    """

    sources: Sequence[Layer]
    last: Layer
    num_heads: int
    num_kv_heads: int
    scale: float | None = None
    dropout: float = 0.0
    backend: str = "auto"
    rotary: Turning = None
    rules: Callable[[], tuple[ScoreRule, ...]] = tuple
    head_norms: tuple[NormLike, ...] = ()

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        count = self.num_heads + 2 * self.num_kv_heads if len(self.sources) == 1 else self.num_heads
        return self.sources[0][0].shape[0] // count

    @property
    def attentions(self) -> Sequence[Projections]:
        """The attention itself."""
        return (self,)

    @property
    def linears(self) -> Sequence[Layer]:
        """All linear layers."""
        return (*self.sources, self.last)

    @cached_property
    def tape(self) -> Tape:
        """An attention alone as the block operator reads it, but for what differs from call to call."""
        tape, block = Tape(), Tape()
        block.integer(0, 0, 1)
        self.write(block)
        block.integer(0)
        tape.blocks([block])
        # A call is that of one block.
        tape.integer(0)
        return tape

    def write(self, tape: Tape) -> None:
        """Append weights, biases and sizes."""
        tape.integer(len(self.sources) == 1, self.num_heads, self.num_kv_heads)
        tape.linears(self.linears)
        tape.integer(bool(self.head_norms))
        for (kind, epsilon), pair in self.head_norms:
            tape.norm(kind, epsilon, *pair)
        tape.integer(0 if self.rotary is None else 1 if isinstance(self.rotary, Rotary) else 2)

    def mapped(self, change: Mapped) -> Self:
        """The same attention on other tensors."""
        sources = [_pair(source, change) for source in self.sources]
        norms = tuple((kind, _norm_pair(pair, change)) for kind, pair in self.head_norms)
        return replace(self, sources=sources, last=_pair(self.last, change), head_norms=norms)

    def with_rules(self, rules: Sequence[ScoreRule]) -> Self:
        """The same attention with further score rules, those of one call. The tape, which has none, is shared."""
        before = self.rules
        scored = replace(self, rules=lambda: (*before(), *rules))
        vars(scored)["tape"] = self.tape
        return scored


@dataclass(frozen=True, eq=False)
class LayerParts:
    """A transformer layer: one or two attentions and a feedforward, each with its norm and a residual.

    Attributes:
        attentions: the one to the layer's own tokens and, where there is one, the one to a memory.
        feedforward: weight and bias of its layers, the gate's first where it has one.
        norms: kind and epsilon, weight and bias of each sublayer's norm.
        norm_first: whether each sublayer reads normed tokens (pre-norm) or each sum is normed (post-norm).
        activation: of the feedforward, by name.
        dropouts: probabilities of dropping elements of each sublayer's output.
        hidden: probability of dropping activations within the feedforward.
        result_norms: norms of each sublayer's output, where there are some; without gradients alone.
    """

    attentions: Sequence[Projections]
    feedforward: Sequence[Layer]
    norms: Sequence[NormLike]
    norm_first: bool
    activation: str
    dropouts: tuple[float, ...]
    hidden: float
    result_norms: Sequence[NormLike] = ()

    @property
    def linears(self) -> Sequence[Layer]:
        """All linear layers."""
        return [*self.feedforward, *(layer for attention in self.attentions for layer in attention.linears)]

    def write(self, tape: Tape) -> None:
        """Append weights, biases and options in the block operator's order."""
        tape.integer(1, self.norm_first, len(self.attentions))
        for attention in self.attentions:
            attention.write(tape)
        tape.integer(1, len(self.feedforward))
        tape.linears(self.feedforward)
        tape.integer(ACTIVATIONS[self.activation].kind, round(self.hidden * LEVELS))
        results: Sequence[NormLike | None] = self.result_norms or [None] * len(self.norms)
        for norm, result, levels in zip(self.norms, results, self.drop_levels, strict=True):
            tape.norm(*norm[0], *norm[1])
            tape.integer(result is not None)
            if result is not None:
                tape.norm(*result[0], *result[1])
            tape.integer(levels)

    def mapped(self, change: Mapped) -> Self:
        """The same layer on other tensors."""
        return replace(
            self,
            attentions=[attention.mapped(change) for attention in self.attentions],
            feedforward=[_pair(layer, change) for layer in self.feedforward],
            norms=[(kind, _norm_pair(pair, change)) for kind, pair in self.norms],
            result_norms=[(kind, _norm_pair(pair, change)) for kind, pair in self.result_norms],
        )

    @cached_property
    def drop_levels(self) -> tuple[int, ...]:
        """Of ``LEVELS`` elements of each sublayer's output, how many are dropped."""
        return tuple(round(drop * LEVELS) for drop in self.dropouts)

    @cached_property
    def drops(self) -> tuple[float, ...]:
        """For each sublayer the probability of dropping within it, and of dropping its output."""
        within = [*(attention.dropout for attention in self.attentions), round(self.hidden * LEVELS) / LEVELS]
        residual = [levels / LEVELS for levels in self.drop_levels]
        return tuple(drop for pair in zip(within, residual, strict=True) for drop in pair)


@dataclass(frozen=True, eq=False)
class Stack:
    """Transformer layers, each of which reads the output of the one before.

    Attributes:
        layers: in order.
    """

    layers: Sequence[LayerParts]

    @property
    def attentions(self) -> Sequence[Projections]:
        """Those of all layers."""
        return [attention for parts in self.layers for attention in parts.attentions]

    @property
    def linears(self) -> Sequence[Layer]:
        """All linear layers."""
        return [layer for parts in self.layers for layer in parts.linears]

    @cached_property
    def same_as(self) -> Sequence[int]:
        """For each layer the place of the first that differs from it in weights alone, and of which a call that reads
        the same says the same; its own place where calls differ by themselves, as those that drop."""
        traits = [*map(_call_traits, self.layers)]
        return [place if each is None else traits.index(each) for place, each in enumerate(traits)]

    @cached_property
    def repeats(self) -> bool:
        """Whether there are several layers, which differ in weights alone."""
        return len(self.layers) > 1 and not any(self.same_as)

    @cached_property
    def drops_any(self) -> bool:
        """Whether anything is dropped."""
        return any(any(parts.drops) for parts in self.layers)

    @cached_property
    def drops_all(self) -> bool:
        """Whether a probability of dropping is 1, or rounds to it."""
        return any(round(drop * LEVELS) >= LEVELS for parts in self.layers for drop in (*parts.dropouts, parts.hidden))

    @cached_property
    def norms_results(self) -> bool:
        """Whether a sublayer's output is normed."""
        return any(parts.result_norms for parts in self.layers)

    def with_rules(self, rules: Sequence[ScoreRule]) -> Stack:
        """The same single layer, whose attention to its own tokens has the score rules of a call besides its own. The
        tape, which has none, is shared."""
        (parts,) = self.layers
        first, *others = parts.attentions
        scored = Stack([replace(parts, attentions=[first.with_rules(rules), *others])])
        vars(scored)["tape"] = self.tape
        return scored

    @cached_property
    def tape(self) -> Tape:
        """The layers as the block operator reads them, but for what differs from call to call."""
        tape, blocks = Tape(), [Tape() for _ in self.layers]
        for parts, block in zip(self.layers, blocks, strict=True):
            parts.write(block)
        tape.blocks(blocks)
        return tape


def _call_traits(parts: LayerParts) -> tuple[object, ...] | None:
    """What of a layer decides what a call says of it, besides weights; None where calls differ by themselves."""
    if any(parts.drops):
        return None
    return tuple(
        (each.num_heads, each.num_kv_heads, each.head_dim, each.scale, each.backend, each.rotary, each.rules,
         len(each.sources), len(each.head_norms))
        for each in parts.attentions
    )  # fmt: skip


def _pair(layer: Layer, change: Mapped) -> Layer:
    weight, bias = layer
    changed = change(weight) if isinstance(weight, Tensor) else weight
    return changed, None if bias is None else change(bias)


def _norm_pair(pair: tuple[Tensor | None, Tensor | None], change: Mapped) -> tuple[Tensor | None, Tensor | None]:
    weight, bias = pair
    return None if weight is None else change(weight), None if bias is None else change(bias)
