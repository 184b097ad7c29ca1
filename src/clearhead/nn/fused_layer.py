"""Whole transformer layers as one step, where their parts are plain: small layers wait for Python alone.

One layer is a step of autograd; layers one after the other are one where nothing is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.backends.native_dropout import LEVELS
from clearhead.backends.native_norm import Norm, NormKind
from clearhead.backends.native_projection import lies_plainly
from clearhead.masks import Mask
from clearhead.nn import step
from clearhead.nn.dropout import plus_dropped_rows
from clearhead.nn.fused_attention import Projections, problem_like
from clearhead.nn.held import Held
from clearhead.nn.layer_step import LayerKind, LayerStep
from clearhead.nn.linear import hooked
from clearhead.nn.norm import NormLike, normed, normed_by_torch
from clearhead.nn.rule_tensors import RuleTensors
from clearhead.nn.stack_step import StackStep
from clearhead.nn.step import Step, kept_step, learns, may_be_step, play
from clearhead.problem import Problem
from clearhead.projection import KINDS, Layer, are_plain, kernels_take
from clearhead.shapes import Float
from clearhead.watch import watched

__all__ = ["LayerParts", "Layers", "fused_layer", "fused_layers", "norm_of", "of_parts"]


class LayerParts(NamedTuple):
    """A transformer layer: its tensors, and what else it is.

    Attributes:
        attentions: the one to the layer's own tokens and, where there is one, the one to a memory.
        feedforward: weight and bias of its layers, the gate's in front where it has one.
        norms: kind and epsilon, weight and bias of each sublayer's.
        norm_first: whether each sublayer reads what is normed, and not the sum with it.
        activation: of the feedforward, by name.
        after: probabilities of dropping what each sublayer gives.
        hidden: of dropping numbers within the feedforward.
        looked_at: whether somebody looks at the calls of an attention or of the feedforward.
        behind: norms of what each sublayer gives, where there are some; a step knows them without gradients alone.
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
        """In the order of ``LayerStep``."""
        attentions = [part for own in self.attentions for part in own.tensors()]
        norms = [own for _, own in (*self.norms, *self.behind)]
        return [*attentions, *[part for pair in (*self.feedforward, *norms) for part in pair]]

    def options(self) -> tuple[Hashable, ...]:
        """What tells layers apart besides their tensors."""
        return (
            "layer", self.norm_first, self.activation, self.after, self.hidden, len(self.feedforward),
            len(self.behind), *[kind for kind, _ in (*self.norms, *self.behind)],
            *[own.options() for own in self.attentions],
        )  # fmt: skip

    def kind(self) -> LayerKind:
        """What is left of it without tensors and attentions."""
        after, hidden = (tuple(round(drop * LEVELS) for drop in drops) for drops in (self.after, [self.hidden]))
        attentions = tuple(own.kind() for own in self.attentions)
        return LayerKind(
            self.norm_first, tuple(kind for kind, _ in self.norms), self.activation, after, hidden[0], attentions,
            gated=len(self.feedforward) > 2, behind=tuple(kind for kind, _ in self.behind),
        )  # fmt: skip


_SCALES: Final = (int, float, type(None))


class Layers:
    """Layers one after the other, of one step.

    Attributes:
        parts: of each.
        tensors: one layer's behind the other's, in the order of ``StackStep``, and those of rules.
        rules: their tensors, each once.
        options: what tells them apart from others besides their tensors.
        looked_at: whether somebody looks at the calls of a part.
    """

    def __init__(self, parts: Sequence[LayerParts]) -> None:
        self.parts = tuple(parts)
        self._own = [part for own in parts for part in own.tensors()]
        options = [own.options() for own in parts]
        # Mostly they are alike: once hashed is enough.
        alike = all(own == options[0] for own in options)
        self.options: tuple[Hashable, ...] = (len(options), options[0]) if alike else tuple(options)
        self.rules = RuleTensors.of([own.rules for layer in parts for own in layer.attentions])
        self.tensors = self._own + self.rules.pairs()
        self.options += self.rules.places
        self.looked_at = any(own.looked_at for own in parts)

    def turned_by(self, angles: Float[Tensor, "_rows head_dim"]) -> Self:
        """The same layers, for a call that brings the angles of its tokens."""
        found = copy(self)
        found.rules = self.rules.with_angles(angles)
        found.tensors = self._own + found.rules.pairs()
        return found

    def may_recur(self, tokens: Sequence[Tensor]) -> bool:
        """Whether a call like one on these tokens may come again."""
        # A scale that is a tensor may be another number at the next call.
        scales = [own.scale for layer in self.parts for own in layer.attentions]
        if not are_plain(*tokens, *self._own) or not all(type(scale) in _SCALES for scale in scales):
            return False
        return self.rules.are_plain() and all(lies_plainly(part) for part in self._own if part is not None)


def fused_layer(
    tokens: Sequence[Float[Tensor, "*batch _len _width"]], parts: LayerParts, masks: Sequence[Mask | None],
    held: Sequence[Held | None] = (),
) -> Float[Tensor, "*batch _len _width"] | None:  # fmt: skip
    """The layer's output in one step; None where the CPU kernels are not what every part would use, or somebody looks
    at a part, for whoever asks to take them one by one.

    Args:
        tokens: ``[batch, len, width]`` of the layer's own and, where it attends to one, of the memory.
        parts: the layer.
        masks: of each attention.
        held: what each attention reads from a cache, where one does; a memory is not among ``tokens`` then.

    Raises:
        MaskError: a mask does not fit.

    Cost: that of the parts. Kept for backward are ``tokens``, the sums and what is normed, queries, keys, values, the
    heads' output, the hidden numbers and, but for a ReLU, their slopes.
    """
    return _fused(tokens, Layers([parts]), masks, held)


def fused_layers(
    tokens: Sequence[Float[Tensor, "*batch _len _width"]], layers: Layers, masks: Sequence[Mask | None],
    held: Sequence[Held | None] = (),
) -> Float[Tensor, "*batch _len _width"] | None:  # fmt: skip
    """What ``fused_layer`` makes of one layer's output after the other's, in one step: its bits. None as there.

    Args:
        tokens: as in ``fused_layer``, of no call that learns where there are several layers; all have one memory.
        layers: each as ``fused_layer`` takes it.
        masks: of each attention of each layer.
        held: as in ``fused_layer``, of each attention of each layer; all that grow hold as many tokens.

    Raises:
        MaskError: a mask does not fit.

    Cost: that of the layers; memory for what one of them passes on, and for two outputs.
    """
    assert len(layers.parts) == 1 or not torch.is_grad_enabled()
    return _fused(tokens, layers, masks, held)


def _fused(
    tokens: Sequence[Tensor], layers: Layers, masks: Sequence[Mask | None], held: Sequence[Held | None]
) -> Tensor | None:
    if layers.looked_at or watched() or not may_be_step(*tokens) or layers.rules.learn():
        return None
    tensors, options = layers.tensors, layers.options
    if (known := step.again(tokens, tensors, masks, options, held)) is not None:
        return known
    training = learns(*tokens, *tensors)

    def attentions() -> list[Problem] | None:
        found: list[Problem] = []
        for own in layers.parts:
            part = slice(len(found), len(found) + len(own.attentions))
            problems = _attentions_of(tokens, own, masks[part], training, held[part])
            if problems is None:
                return None
            found += problems
        return found

    def step_of(problems: Sequence[Problem], training: bool, layout: Hashable | None) -> Step:
        kinds = [own.kind() for own in layers.parts]
        if len(kinds) == 1:
            return LayerStep(problems, training, layout, kinds[0], layers.rules)
        return StackStep(problems, training, layout, kinds, layers.rules)

    found = kept_step(tokens, tensors, masks, options, attentions, step_of, held, recurs=layers.may_recur(tokens))
    return None if found is None else play(found, tokens, tensors, held)


def of_parts(
    tokens: Sequence[Float[Tensor, "*batch _len _width"]], parts: LayerParts, masks: Sequence[Mask | None],
    sublayers: Sequence[Callable[[Tensor], Tensor]], held: Sequence[Held | None] = (),
) -> Float[Tensor, "*batch _len _width"] | None:  # fmt: skip
    """The layer's output part by part, with the bits of ``fused_layer``, where somebody looks at a layer that it would
    take; None elsewhere.

    Args:
        tokens: as in ``fused_layer``.
        parts: see there.
        masks: see there.
        sublayers: the layer's attentions and its feedforward.
        held: as in ``fused_layer``.
    """
    if not (watched() or parts.looked_at) or not may_be_step(*tokens):
        return None
    if _attentions_of(tokens, parts, masks, learns(*tokens, *parts.tensors()), held) is None:
        return None
    x = like = tokens[0]

    def norm(x: Tensor, own: Norm) -> Tensor:
        return normed(x, own) if _are_alike(x, like) else normed_by_torch(x, own)

    def plus(x: Tensor, levels: int, y: Tensor) -> Tensor:
        # A hook may hand on what it likes.
        if _are_alike(x, like) and _are_alike(y, like):
            return plus_dropped_rows(x, levels, y)
        return x + F.dropout(y, levels / LEVELS)

    behind: Sequence[Norm | None] = [Norm(*kind, *own) for kind, own in parts.behind] or [None] * len(sublayers)
    for sublayer, (kind, own), last, levels in zip(sublayers, parts.norms, behind, parts.kind().after, strict=True):
        given = sublayer(norm(x, Norm(*kind, *own)) if parts.norm_first else x)
        x = plus(x, levels, given if last is None else norm(given, last))
        x = x if parts.norm_first else norm(x, Norm(*kind, *own))
    return x


def _are_alike(x: Tensor, like: Tensor) -> bool:
    return are_plain(x, like) and x.shape == like.shape


def _attentions_of(
    tokens: Sequence[Tensor], parts: LayerParts, masks: Sequence[Mask | None], training: bool,
    held: Sequence[Held | None] = (),
) -> list[Problem] | None:  # fmt: skip
    """The attentions without numbers, where the CPU kernels are what every part of the layer would use."""
    kinds, x, own = KINDS if training else KINDS[:1], tokens[0], parts.kind()
    *first, contract = parts.feedforward
    width, hidden = x.shape[-1], first[0][0].shape[0]
    if training and parts.behind:
        return None
    if not are_plain(*tokens, *parts.tensors()) or max(*own.after, own.hidden) >= LEVELS:
        return None
    if not all(kernels_take(kinds, x, *each) and len(each[0]) == hidden for each in first):
        return None
    if not kernels_take(kinds, x, *contract, width=hidden):
        return None
    given = [part for _, pair in (*parts.norms, *parts.behind) for part in pair if part is not None]
    if any(last.shape[0] != width for last, _ in (contract, *(each.last for each in parts.attentions))) or any(
        part.shape != (width,) or part.stride() != (1,) or part.is_neg() for part in given
    ):  # fmt: skip
        return None
    found: list[Problem] = []
    caches = held or (None,) * len(masks)
    for place, (attention, mask, cache) in enumerate(zip(parts.attentions, masks, caches, strict=True)):
        problem = problem_like(tokens if place else tokens[:1], attention, training, mask=mask, held=cache)
        if problem is None:
            return None
        found.append(problem)
    return found


_NORMS: Final[dict[Any, NormKind]] = {nn.LayerNorm: NormKind.LAYER, nn.RMSNorm: NormKind.RMS}


def norm_of(norm: nn.Module, x: Tensor) -> NormLike | None:
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
