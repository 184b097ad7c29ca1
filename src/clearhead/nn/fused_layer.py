"""A whole transformer layer as one step of autograd, where its parts are plain: small layers wait for Python alone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.backends.native_dropout import LEVELS
from clearhead.backends.native_norm import Norm, NormKind
from clearhead.backends.native_projection import lies_plainly
from clearhead.masks import Mask
from clearhead.nn import step
from clearhead.nn.dropout import plus_dropped_rows
from clearhead.nn.fused_attention import problem_like
from clearhead.nn.layer_step import LayerKind, LayerStep
from clearhead.nn.linear import hooked
from clearhead.nn.norm import normed, normed_by_torch
from clearhead.nn.step import kept_step, learns, may_be_step, play
from clearhead.problem import Problem
from clearhead.projection import KINDS, Layer, are_plain, kernels_take
from clearhead.shapes import Float
from clearhead.watch import watched

__all__ = ["LayerParts", "fused_layer", "norm_of", "of_parts"]

#: A norm's kind and epsilon.
NormLike = tuple[NormKind, float]


@dataclass(frozen=True)
class LayerParts:
    """A transformer layer: its tensors, and what else it is.

    Attributes:
        sources: weight and bias of queries, keys and values; or of one layer that makes all three side by side.
        last: of the layer that mixes the heads.
        feedforward: of both its layers.
        norms: weight and bias of both, each may be None.
        kinds: kind and epsilon of both norms.
        norm_first: whether each part reads what is normed, and not the sum with it.
        activation: of the feedforward, by name.
        drops: probabilities of dropping: attention weights; what attention gives; hidden numbers; what the feedforward
            gives.
        num_heads: of queries.
        num_kv_heads: of keys and values.
        scale: as in ``attention``.
        backend: as in ``attention``.
        looked_at: whether somebody looks at the calls of its attention or of its feedforward.
    """

    sources: Sequence[Layer]
    last: Layer
    feedforward: tuple[Layer, Layer]
    norms: tuple[tuple[Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]
    kinds: tuple[NormLike, NormLike]
    norm_first: bool
    activation: str
    drops: tuple[float, float, float, float]
    num_heads: int
    num_kv_heads: int
    scale: float | None = None
    backend: str = "auto"
    looked_at: bool = False

    def tensors(self) -> list[Tensor | None]:
        """In the order of ``LayerStep``."""
        return [part for pair in (*self.sources, self.last, *self.feedforward, *self.norms) for part in pair]

    def options(self) -> tuple[Hashable, ...]:
        """What tells layers apart besides their tensors."""
        return (
            "layer", self.kinds, self.norm_first, self.activation, self.drops, self.num_heads, self.num_kv_heads,
            self.scale, self.backend,
        )  # fmt: skip

    def kind(self) -> LayerKind:
        """What is left of it without tensors and attention."""
        after, hidden, last = (round(drop * LEVELS) for drop in self.drops[1:])
        return LayerKind(self.norm_first, self.kinds, self.activation, (after, hidden, last))


def fused_layer(
    x: Float[Tensor, "*batch len width"], parts: LayerParts, mask: Mask | None
) -> Float[Tensor, "*batch len width"] | None:
    """The layer's output in one step; None where the CPU kernels are not what every part would use, or somebody looks
    at a part, for whoever asks to take them one by one.

    Args:
        x: ``[batch, len, width]``.
        parts: the layer.
        mask: of its attention.

    Raises:
        MaskError: the mask does not fit.

    Cost: that of the parts. Kept for backward are ``x``, the two sums and what is normed, queries, keys, values, the
    heads' output, the hidden numbers and, but for a ReLU, their slopes.
    """
    if parts.looked_at or watched() or not may_be_step(x):
        return None
    tensors, options = parts.tensors(), parts.options()
    if (known := step.again(x, tensors, mask, options)) is not None:
        return known
    training = learns(x, *tensors)
    # A scale that is a tensor may be another number at the next call.
    recurs = (
        are_plain(x, *tensors) and all(lies_plainly(part) for part in tensors if part is not None)
        and type(parts.scale) in (int, float, type(None))
    )  # fmt: skip

    def step_of(problem: Problem, training: bool, layout: Hashable | None) -> LayerStep:
        return LayerStep(problem, training, layout, parts.kind())

    found = kept_step(
        x, tensors, mask, options, lambda: _attention_of(x, parts, mask, training), step_of, recurs=recurs
    )
    return None if found is None else play(found, x, tensors)


def of_parts(
    x: Float[Tensor, "*batch len width"], parts: LayerParts, mask: Mask | None, attend: Callable[[Tensor], Tensor],
    feed: Callable[[Tensor], Tensor],
) -> Float[Tensor, "*batch len width"] | None:  # fmt: skip
    """The layer's output part by part, with the bits of ``fused_layer``, where somebody looks at a layer that it would
    take; None elsewhere.

    Args:
        x: as in ``fused_layer``.
        parts: see there.
        mask: see there.
        attend: the layer's attention.
        feed: the layer's feedforward.
    """
    if not (watched() or parts.looked_at) or not may_be_step(x):
        return None
    if _attention_of(x, parts, mask, learns(x, *parts.tensors())) is None:
        return None
    first, second = (Norm(*kind, *own) for kind, own in zip(parts.kinds, parts.norms, strict=True))
    after, _, last = parts.kind().levels
    like = x

    def norm(x: Tensor, own: Norm) -> Tensor:
        return normed(x, own) if _are_alike(x, like) else normed_by_torch(x, own)

    def plus(x: Tensor, levels: int, y: Tensor) -> Tensor:
        # A hook may hand on what it likes.
        if _are_alike(x, like) and _are_alike(y, like):
            return plus_dropped_rows(x, levels, y)
        return x + F.dropout(y, levels / LEVELS)

    if parts.norm_first:
        x = plus(x, after, attend(norm(x, first)))
        return plus(x, last, feed(norm(x, second)))
    x = norm(plus(x, after, attend(x)), first)
    return norm(plus(x, last, feed(x)), second)


def _are_alike(x: Tensor, like: Tensor) -> bool:
    return are_plain(x, like) and x.shape == like.shape


def _attention_of(x: Tensor, parts: LayerParts, mask: Mask | None, training: bool) -> Problem | None:
    """The attention without numbers, where the CPU kernels are what every part of the layer would use."""
    kinds = KINDS if training else KINDS[:1]
    expand, contract = parts.feedforward
    width, hidden = x.shape[-1], expand[0].shape[0]
    if not are_plain(x, *parts.tensors()) or max(parts.kind().levels) >= LEVELS:
        return None
    if not kernels_take(kinds, x, *expand) or not kernels_take(kinds, x, *contract, width=hidden):
        return None
    given = [part for pair in parts.norms for part in pair if part is not None]
    if contract[0].shape[0] != width or parts.last[0].shape[0] != width or any(
        part.shape != (width,) or part.stride() != (1,) or part.is_neg() for part in given
    ):  # fmt: skip
        return None
    counts = (parts.num_heads, parts.num_kv_heads, parts.num_kv_heads)
    return problem_like(
        x, parts.sources, parts.last, training, parts.backend, counts, mask=mask, scores=(), scale=parts.scale,
        dropout=parts.drops[0], query_offset=None,
    )  # fmt: skip


_NORMS: Final[dict[Any, NormKind]] = {nn.LayerNorm: NormKind.LAYER, nn.RMSNorm: NormKind.RMS}


def norm_of(norm: nn.Module, x: Tensor) -> tuple[NormLike, tuple[Tensor | None, Tensor | None]] | None:
    """Kind and epsilon, weight and bias, of a norm of torch's over the last axis of ``x`` that nobody looks at; or
    None."""
    kind = _NORMS.get(type(norm))
    if not isinstance(norm, nn.LayerNorm | nn.RMSNorm) or kind is None or hooked(norm):
        return None
    if norm.normalized_shape != x.shape[-1:]:
        return None
    if norm.eps is None and x.dtype is not torch.float32:
        return None
    epsilon = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    return (kind, float(epsilon)), (norm._parameters.get("weight"), norm._parameters.get("bias"))
