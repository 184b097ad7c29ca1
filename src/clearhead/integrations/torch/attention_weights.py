"""Attention that returns its weights, as ``torch.nn.MultiheadAttention`` does: the formula, T x T, with gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from clearhead.backends.containment import all_finite, matmul, scores_of, without_autocast
from clearhead.integrations.torch.masks import Meaning, may_look
from clearhead.masks import Dense, Mask
from clearhead.masks.base import Both, index_tensors
from clearhead.shapes import Float

__all__ = ["with_weights"]

#: Elements of one head's weights from which heads run one by one, so that they stay in the processor's cache.
_LEAST_SQUARE: Final = 2**16

_Index = tuple[Tensor, Tensor, Tensor, Tensor]


def with_weights(
    query: Float[Tensor, "batch heads q_len head_dim"],
    key: Float[Tensor, "batch heads k_len head_dim"],
    value: Float[Tensor, "batch heads k_len head_dim"],
    meaning: Meaning,
    dropout: float,
) -> tuple[Float[Tensor, "batch heads q_len head_dim"], Float[Tensor, "batch heads q_len k_len"]]:
    """Output and weights, both after dropout, as torch returns them.

    Dropout is torch's own here, from its generator: the square is there anyway, and that is the cheapest way.

    Cost: ``4 * batch * heads * q_len * k_len * head_dim`` operations, and a square of memory for every step.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        # Autocast would cast float32 scores to 16 bits.
        with without_autocast(device):
            return with_weights(query, key, value, meaning, dropout)
    batch, num_heads, q_len, _ = query.shape
    index = index_tensors(batch, num_heads, q_len, key.shape[2], 0, query.device)
    allowed = None if meaning.mask is None else _table(meaning.mask, index)
    biases = [rule.bias for rule in meaning.scores]
    recorded = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value, *biases))
    if recorded or q_len * key.shape[2] < _LEAST_SQUARE or not may_look(query):
        return _attend(query, key, value, allowed, biases, dropout)
    output, weights = query.new_empty(*query.shape[:3], value.shape[3]), query.new_empty(*query.shape[:3], key.shape[2])
    for place in product(range(batch), range(num_heads)):
        table = None if allowed is None else _at(place, allowed)
        tables = (_at(place, bias) for bias in biases)
        part = _attend(_at(place, query), _at(place, key), _at(place, value), table, tables, dropout)
        _at(place, output).copy_(part[0])
        _at(place, weights).copy_(part[1])
    return output, weights


def _at(place: tuple[int, int], tensor: Tensor) -> Tensor:
    """One head of one sequence, all four axes kept; an axis of 1 stands for every place."""
    batch, head = (at if size > 1 else 0 for at, size in zip(place, tensor.shape[:2], strict=True))
    return tensor[batch : batch + 1, head : head + 1]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, biases: Iterable[Tensor], dropout: float
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    scaled = query.to(dtype) / math.sqrt(query.shape[-1])
    # Every masked call contains NaN and infinity where the elements cannot be read.
    contain = allowed is not None and not (may_look(query) and all_finite(query, key, value))
    if allowed is None or not contain:
        scores = _biased(scaled @ key.to(dtype).transpose(-2, -1), biases)
        weights = functional.dropout(_softmax(scores, allowed), dropout).to(query.dtype)
        return weights @ value, weights
    allowed = allowed.expand(*query.shape[:3], key.shape[2])
    scores = _biased(scores_of(scaled, key.to(dtype), allowed), biases).masked_fill(~allowed, -torch.inf)
    empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(~allowed | empty, 0.0)
    weights = functional.dropout(weights, dropout).to(query.dtype)
    return matmul(weights, value, allowed), weights


def _biased(scores: Tensor, biases: Iterable[Tensor]) -> Tensor:
    for bias in biases:
        scores = scores + bias.to(scores.dtype)
    return scores


def _table(mask: Mask, index: _Index) -> Tensor:
    """The mask as booleans that broadcast; what is a table already is not looked up entry by entry."""
    if isinstance(mask, Both):
        return _table(mask.left, index) & _table(mask.right, index)
    return mask.allowed if isinstance(mask, Dense) else mask.allows(*index)


def _softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    """Weights of finite scores where ``allowed``; every pass is over a square."""
    if allowed is None:
        return scores.softmax(dim=-1)
    # A softmax over nothing is NaN and so is its gradient: an empty row is given all keys and then emptied.
    empty = ~allowed.any(dim=-1, keepdim=True)
    weights = scores.masked_fill(~(allowed | empty), -torch.inf).softmax(dim=-1)
    return weights.masked_fill(empty, 0.0) if bool(empty.any()) else weights
