"""The weights and options of a layer or an attention, read from its modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from clearhead.integrations.transformers.attention import own_scale, scale_of
from clearhead.integrations.transformers.families import (
    ATTENTION_DROPOUTS,
    HEAD_DIMS,
    KV_HEADS,
    NUM_HEADS,
    SCALES,
    SOFTCAPS,
    AttentionRow,
)
from clearhead.integrations.transformers.match import LayerMatch, at, first_of
from clearhead.integrations.transformers.parts import (
    Formulas,
    dropout_of,
    feedforward_of,
    linear_of,
    norm_of,
    weight_in,
)
from clearhead.integrations.transformers.relative import disentangled_scale
from clearhead.nn.spec import LayerParts, Projections, Stack
from clearhead.nn.weight_packing import WeightOf
from clearhead.scores import SoftCap
from clearhead.torch_private import any_hooks, hooks_of

__all__ = ["attention_of", "hooked", "layer_of", "weights_in"]

#: The module of the hooks that transformers installs itself, which collect outputs on demand.
_COLLECTS: Final = "transformers.utils.output_capturing"


@dataclass(frozen=True)
class _SoftCapped:
    """The score rules of attention whose scores are capped; equal for equal caps."""

    cap: float

    def __call__(self) -> tuple[SoftCap]:
        return (SoftCap(self.cap),)


def attention_of(
    row: AttentionRow, module: Any, x: Tensor, rotary: bool, formulas: Formulas
) -> tuple[Projections, float] | None:
    """An attention module's weights and options, and the dropout of its output; None if a part is not plain."""
    core = at(module, row.core)
    layers = [layer for path in (*row.projections, row.output) if (layer := linear_of(at(module, path))) is not None]
    counts = None if len(layers) <= len(row.projections) else _heads(core, module, layers[:-1], layers[-1])
    if counts is None:
        return None
    num_heads, num_kv_heads, head_dim = counts
    norms = [
        norm for path in row.head_norms if (norm := norm_of(at(module, path), x[..., :head_dim], formulas)) is not None
    ]
    dropout, weights_dropout = dropout_of(module, row.dropout), first_of((core, module), ATTENTION_DROPOUTS)
    # Releases differ in whether the attention's mode counts or that of the dropout within it.
    modes_differ = isinstance(weights_dropout, nn.Module) and weights_dropout.training != core.training
    if len(norms) < len(row.head_norms) or dropout is None or modes_differ:
        return None
    softcap, scale = first_of((core,), SOFTCAPS), first_of((core,), SCALES)
    if row.terms:
        scale = disentangled_scale(core, head_dim)
    projections = Projections(
        layers[:-1],
        layers[-1],
        num_heads,
        num_kv_heads,
        scale=scale_of(own_scale(core, head_dim) if scale is None else scale, head_dim),
        dropout=float(getattr(weights_dropout, "p", weights_dropout or 0.0)) if core.training else 0.0,
        rotary="angles" if rotary else None,
        head_norms=tuple(norms),
        rules=tuple if softcap is None else _SoftCapped(softcap),
    )
    return projections, dropout


def _heads(core: Any, module: Any, sources: Sequence[Any], output: Any) -> tuple[int, int, int] | None:
    """Heads of queries, of keys and values, and their width; None if the weights have other sizes."""
    places, width = (core, module, getattr(core, "config", None)), output[0].shape[1]
    num_heads, head_dim = first_of(places, NUM_HEADS), first_of(places, HEAD_DIMS)
    head_dim = head_dim or (width // num_heads if num_heads else 0)
    if not head_dim or width % head_dim:
        return None
    num_heads = width // head_dim
    num_kv_heads = sources[1][0].shape[0] // head_dim if len(sources) > 1 else first_of(places, KV_HEADS) or num_heads
    rows = sum(weight.shape[0] for weight, _ in sources)
    return (num_heads, num_kv_heads, head_dim) if rows == (num_heads + 2 * num_kv_heads) * head_dim else None


def layer_of(match: LayerMatch, layer: Any, x: Tensor, rotary: bool, formulas: Formulas) -> Stack | None:
    """A layer's weights and options; None if a part is not plain."""
    row = match.row
    # The halves of a packed weight would have gradients of their own.
    if (x.dtype is torch.float16 and row.clamps_float16) or (match.feedforward.packed_gate and torch.is_grad_enabled()):
        return None
    readings = [
        attention_of(attention, at(layer, path), x, rotary, formulas)
        for path, attention in zip(row.attentions, match.attentions, strict=True)
    ]
    attentions = [attention for attention in readings if attention is not None]
    paths = (*row.norms, *row.output_norms)
    norms = [norm for path in paths if (norm := norm_of(at(layer, path), x, formulas)) is not None]
    fed = feedforward_of(match.feedforward, match.feedforward_in(layer))
    if len(attentions) < len(row.attentions) or len(norms) < len(paths) or fed is None:
        return None
    inner = [*(dropout for _, dropout in attentions), fed.dropout]
    outer = [dropout_of(layer, path) for path in row.dropouts or (None,) * len(inner)]
    # Two dropouts of one output are not one.
    if None in outer or any(one and other for one, other in zip(inner, outer, strict=True)):
        return None
    parts = LayerParts(
        [attention for attention, _ in attentions],
        fed.layers,
        norms[: len(row.norms)],
        norm_first=row.norm_first,
        activation=fed.activation,
        dropouts=tuple(one or other or 0.0 for one, other in zip(inner, outer, strict=True)),
        hidden=fed.hidden,
        result_norms=norms[len(row.norms) :],
    )
    return Stack([parts])


def weights_in(match: LayerMatch, layer: Any) -> Iterator[WeightOf]:
    """The weights of a layer's linear layers, as its operator reads them."""
    for path, attention in zip(match.row.attentions, match.attentions, strict=True):
        for name in (*attention.projections, attention.output):
            yield weight_in(at(at(layer, path), name))
    row, feedforward = match.feedforward, match.feedforward_in(layer)
    for part in (row.gate, row.expand, row.contract):
        if part is not None:
            yield weight_in(at(feedforward, part), 2 if row.packed_gate and part == row.expand else 1)


def hooked(module: nn.Module) -> bool:
    """Whether a module's calls are hooked, or its ``forward`` was replaced on the object.

    Hooks of transformers itself do nothing unless outputs are collected, and do not count; nor does the class's own
    ``forward``, which transformers 4 sets on the object after it has collected outputs.
    """
    attributes = vars(module)
    forward = attributes.get("forward")
    if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
        return True
    if not any_hooks([attributes]):
        return False
    return any(getattr(hook, "__module__", "") != _COLLECTS for hook in hooks_of(module))
