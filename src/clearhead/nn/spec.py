"""What an attention and a layer are: records of their tensors and options, which modules and swapped layers make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Self, TypeAlias

from torch import Tensor

from clearhead.ops.dropout import LEVELS
from clearhead.ops.kinds import NormKind
from clearhead.positions import Rotary
from clearhead.projection import Layer
from clearhead.scores import ScoreRule

__all__ = ["LayerParts", "NormLike", "Projections", "Turning"]

#: A norm's kind and epsilon; its weight and bias.
NormLike: TypeAlias = tuple[tuple[NormKind, float], tuple[Tensor | None, Tensor | None]]
#: What rotates an attention's queries and keys: the same at every call, or by ``"angles"`` that come with each.
Turning: TypeAlias = Rotary | Literal["angles"] | None
Mapped: TypeAlias = Callable[[Tensor], Tensor]


class Projections(NamedTuple):
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
        rules: score rules.
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
    rules: tuple[ScoreRule, ...] = ()
    head_norms: tuple[NormLike, ...] = ()

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        count = self.num_heads + 2 * self.num_kv_heads if len(self.sources) == 1 else self.num_heads
        return self.sources[0][0].shape[0] // count

    def tensors(self) -> list[Tensor | None]:
        """Weights and biases: those of the sources, of the last layer, and of the heads' norms."""
        pairs = (*self.sources, self.last, *[pair for _, pair in self.head_norms])
        return [part for pair in pairs for part in pair]

    def mapped(self, change: Mapped) -> Self:
        """The same attention on other tensors."""
        sources = [_pair(source, change) for source in self.sources]
        norms = tuple((kind, _norm_pair(pair, change)) for kind, pair in self.head_norms)
        return self._replace(sources=sources, last=_pair(self.last, change), head_norms=norms)


class LayerParts(NamedTuple):
    """A transformer layer: one or two attentions and a feedforward, each with its norm and a residual.

    Attributes:
        attentions: the one to the layer's own tokens and, where there is one, the one to a memory.
        feedforward: weight and bias of its layers, the gate's first where it has one.
        norms: kind and epsilon, weight and bias of each sublayer's norm.
        norm_first: whether each sublayer reads normed tokens (pre-norm) or each sum is normed (post-norm).
        activation: of the feedforward, by name.
        after: probabilities of dropping what each sublayer gives.
        hidden: probability of dropping activations within the feedforward.
        looked_at: whether an attention or the feedforward has hooks.
        behind: norms of what each sublayer gives, where there are some; without gradients alone.
    """

    attentions: Sequence[Projections]
    feedforward: Sequence[Layer]
    norms: Sequence[NormLike]
    norm_first: bool
    activation: str
    after: tuple[float, ...]
    hidden: float
    looked_at: bool = False
    behind: Sequence[NormLike] = ()

    def tensors(self) -> list[Tensor | None]:
        """Weights and biases of all parts."""
        attentions = [part for own in self.attentions for part in own.tensors()]
        norms = [pair for _, pair in (*self.norms, *self.behind)]
        return [*attentions, *[part for pair in (*self.feedforward, *norms) for part in pair]]

    def mapped(self, change: Mapped) -> Self:
        """The same layer on other tensors."""
        return self._replace(
            attentions=[own.mapped(change) for own in self.attentions],
            feedforward=[_pair(layer, change) for layer in self.feedforward],
            norms=[(kind, _norm_pair(pair, change)) for kind, pair in self.norms],
            behind=[(kind, _norm_pair(pair, change)) for kind, pair in self.behind],
        )

    def drop_levels(self) -> tuple[int, ...]:
        """Of ``LEVELS`` numbers that each sublayer gives, how many are dropped."""
        return tuple(round(drop * LEVELS) for drop in self.after)


def _pair(layer: Layer, change: Mapped) -> Layer:
    weight, bias = layer
    return change(weight), None if bias is None else change(bias)


def _norm_pair(pair: tuple[Tensor | None, Tensor | None], change: Mapped) -> tuple[Tensor | None, Tensor | None]:
    weight, bias = pair
    return None if weight is None else change(weight), None if bias is None else change(bias)
