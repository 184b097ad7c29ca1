"""An attention and a layer op by op, from their records: what the block operator computes, by functions that autograd
and observers can follow. Used for higher derivatives, and for gradients where NaN or infinity meets a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.backends import native
from clearhead.functional.exact import attention
from clearhead.masks import Mask
from clearhead.nn.norm import normed_by_torch
from clearhead.nn.spec import LayerParts, Projections
from clearhead.ops.dropout import LEVELS, dropped
from clearhead.positions import Rotary, rotated_by_token
from clearhead.projection import ACTIVATIONS, Layer, project
from clearhead.scores import ScoreRule
from clearhead.shapes import Float, Int

__all__ = ["Attended", "run_attention", "run_layer"]


class Attended(NamedTuple):
    """An attention's arguments besides tensors, validated and lowered.

    Attributes:
        mask: the given mask, with its positions.
        scores: score rules that the kernels know.
        scale: factor on ``query @ key^T``.
        dropout: probability of dropping a weight.
        query_offset: position of the first query.
        options: mask and rules as arguments of the operators.
        positions: how many positions a rotary table needs.
    """

    mask: Mask | None
    scores: tuple[ScoreRule, ...]
    scale: float
    dropout: float
    query_offset: int
    options: Mapping[str, Any]
    positions: int = 0


def run_attention(
    projections: Projections,
    attended: Attended,
    tokens: Sequence[Float[Tensor, "batch _len _in"]],
    seed: int,
    angles: Float[Tensor, "_rows head_dim"] | None,
) -> Float[Tensor, "batch len out"]:
    """Project to heads, attend, and project back.

    Args:
        projections: the attention layer.
        attended: what else it is.
        tokens: those that attend, and the memory where they read one.
        seed: of dropout.
        angles: RoPE cos and sin of the call's tokens, where ``projections.rotary`` is ``"angles"``.
    """
    query, key, value = _heads(projections, tokens)
    if isinstance(projections.rotary, Rotary):
        query, key = projections.rotary.rotate(query, attended.query_offset), projections.rotary.rotate(key)
    elif projections.rotary is not None:
        assert angles is not None
        query, key = rotated_by_token(query, angles), rotated_by_token(key, angles)
    output = attention(
        query,
        key,
        value,
        mask=attended.mask,
        scores=attended.scores,
        scale=attended.scale,
        dropout=attended.dropout,
        seed=seed,
        query_offset=attended.query_offset,
        backend=native.BACKEND.name,
    )
    return project(output.transpose(1, 2).flatten(-2), *projections.last)


def _heads(projections: Projections, tokens: Sequence[Tensor]) -> list[Tensor]:
    """Queries, keys and values, ``[batch, heads, len, head_dim]``."""
    counts = (projections.num_heads, projections.num_kv_heads, projections.num_kv_heads)
    read = (tokens[0], tokens[-1], tokens[-1])
    layers = projections.sources
    if len(layers) == 1:
        (weight, bias), sizes = _in_floats(layers[0]), [count * projections.head_dim for count in counts]
        biases = [None] * 3 if bias is None else bias.split(sizes)
        layers = [*zip(weight.split(sizes), biases, strict=True)]
    projected = [project(x, *layer) for x, layer in zip(read, layers, strict=True)]
    return [part.unflatten(-1, (count, -1)).transpose(1, 2) for part, count in zip(projected, counts, strict=True)]


def run_layer(
    parts: LayerParts,
    attended: Sequence[Attended],
    tokens: Sequence[Float[Tensor, "batch _len _width"]],
    seeds: Sequence[int],
    angles: Float[Tensor, "_rows head_dim"] | None,
    rows: Int[Tensor, " rows"] | int,
) -> Float[Tensor, "batch len width"]:
    """A layer: ``x + drop(sublayer(norm(x)))`` for each sublayer (pre-norm), or ``norm(x + drop(sublayer(x)))``.

    Args:
        parts: the layer, without norms of what sublayers give.
        attended: its attentions.
        tokens: the layer's own, and the memory where an attention reads one.
        seeds: for each sublayer that of what is dropped within it, and of its result.
        angles: as ``run_attention`` takes them.
        rows: dropout's numbers of the rows, or the first one's.
    """
    x = tokens[0]
    for place, (norm, levels) in enumerate(zip(parts.norms, parts.drop_levels, strict=True)):
        read = normed_by_torch(x, norm) if parts.norm_first else x
        if place < len(attended):
            inputs = [read, *tokens[1:]] if place else [read]
            given = run_attention(parts.attentions[place], attended[place], inputs, seeds[2 * place], angles)
        else:
            given = _feedforward(parts, read, seeds[2 * place], rows)
        x = x + _dropped(given, levels, seeds[2 * place + 1], rows)
        x = x if parts.norm_first else normed_by_torch(x, norm)
    return x


def _feedforward(parts: LayerParts, x: Tensor, seed: int, rows: Tensor | int) -> Tensor:
    first, *gates, contract = map(_in_floats, parts.feedforward)
    activated = ACTIVATIONS[parts.activation].formula(F.linear(x, *first))
    hidden = _dropped(activated, round(parts.hidden * LEVELS), seed, rows)
    for expand in gates:
        hidden = hidden * F.linear(x, *expand)
    return F.linear(hidden, *contract)


def _in_floats(layer: Layer) -> tuple[Tensor, Tensor | None]:
    """A layer that learns, whose weight is therefore in floating point."""
    weight, bias = layer
    assert isinstance(weight, Tensor)
    return weight, bias


def _dropped(x: Tensor, levels: int, seed: int, rows: Tensor | int) -> Tensor:
    """Dropout as a product with a mask, which can be differentiated twice."""
    if not levels:
        return x
    return x * dropped(torch.ones(x.shape, dtype=x.dtype), levels, seed, None, rows)
