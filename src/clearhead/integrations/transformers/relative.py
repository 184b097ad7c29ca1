"""What layers add to scores by relative positions: a bias of the model, or terms of queries, keys and positions.

Paper: He, Liu, Gao and Chen 2021, "DeBERTa: decoding-enhanced BERT with disentangled attention", section 3.1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor

from clearhead.scores import DenseBias, RelativeBias, ScoreRule
from clearhead.shapes import Float, Int
from clearhead.torch_private import version_of

__all__ = ["bias_rule", "buckets_of", "disentangled_bias", "disentangled_scale"]

#: The kinds of terms of DeBERTa: a query with a key's position, and a key with a query's position.
_KINDS: Final = ("c2p", "p2c")
_AXES: Final = 3


def disentangled_scale(core: Any, head_dim: int) -> float:
    """The factor on every term of a score: content to content, and those of ``disentangled_bias``."""
    scale: float = (head_dim * (1 + sum(kind in core.pos_att_type for kind in _KINDS))) ** -0.5
    return scale


def disentangled_bias(
    core: Any,
    query: Float[Tensor, "batch heads len head_dim"],
    key: Float[Tensor, "batch heads len head_dim"],
    buckets: Int[Tensor, " distances"],
    embeddings: Float[Tensor, "rows width"],
) -> Float[Tensor, "batch heads len len"] | None:
    """``(q_i . K[b(i - j)] + k_j . Q[-b(j - i)]) * scale``; ``K`` and ``Q`` are projected embeddings of positions.

    Both terms are computed for every distance and shifted, row by row, to the keys.

    Args:
        core: the module of the attention.
        query: queries.
        key: keys.
        buckets: ``b`` of every distance, as ``buckets_of`` gives them.
        embeddings: of relative positions, of which row ``core.pos_ebd_size`` is that of distance 0.

    Returns:
        The terms; None if the module has none.

    Cost: ``4 * batch * heads * len^2 * head_dim`` multiplications, and a tensor ``[heads, batch, len, 2 * len]`` for
    each term.
    """
    span, scale = core.pos_ebd_size, disentangled_scale(core, query.shape[-1])
    rows = core.pos_dropout(embeddings)[: 2 * span]
    terms: list[Tensor] = []
    if "c2p" in core.pos_att_type:
        positions = (core.key_proj if core.share_att_key else core.pos_key_proj)(rows)
        terms.append(_by_key(query, positions * scale, (buckets + span).clamp(0, 2 * span - 1)))
    if "p2c" in core.pos_att_type:
        positions = (core.query_proj if core.share_att_key else core.pos_query_proj)(rows)
        terms.append(_by_key(key, positions * scale, (span - buckets).clamp(0, 2 * span - 1)).transpose(2, 3))
    return reduce(torch.add, terms) if terms else None


def _by_key(
    x: Float[Tensor, "batch heads len head_dim"], positions: Float[Tensor, "rows width"], index: Int[Tensor, " _"]
) -> Float[Tensor, "batch heads len len"]:
    """``x_i . positions[index[j - i + len - 1]]`` for each ``i`` and ``j``."""
    batch, heads, length, head_dim = x.shape
    by_head = positions.index_select(0, index).view(-1, heads, head_dim).permute(1, 2, 0)
    tokens = x.transpose(0, 1).reshape(heads, batch * length, head_dim)
    scores = (tokens @ by_head).view(heads, batch, length, -1).transpose(0, 1)
    if length == 1:
        return scores
    # Row i begins one element earlier than row i - 1: rows of one element less, without the first ones.
    width = 2 * length - 2
    shifted: Tensor = scores.flatten(2).narrow(2, length - 1, length * width).unflatten(2, (length, width))
    return shifted[..., :length]


# ---- distances ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LastRead:
    """What the last tensor of a kind says; all layers of a model are given the same tensor."""

    tensor: ref[Tensor]
    version: int
    by_distance: Tensor | None


_LAST: Final = threading.local()


def _last_read(kind: str, tensor: Tensor, read: Callable[[Tensor], Tensor | None]) -> Tensor | None:
    version = version_of(tensor)
    last: _LastRead | None = getattr(_LAST, kind, None)
    if last is None or last.tensor() is not tensor or last.version != version:
        last = _LastRead(ref(tensor), version, read(tensor))
        setattr(_LAST, kind, last)
    return last.by_distance


def bias_rule(bias: Float[Tensor, "batch heads len len"]) -> ScoreRule:
    """A bias as a rule: by distance where it depends on nothing else and learns nothing."""
    learns = torch.is_grad_enabled() and bias.requires_grad
    row = None if learns else _last_read("bias", bias, _read_bias)
    return DenseBias(bias) if row is None else RelativeBias(row)


def _read_bias(bias: Tensor) -> Tensor | None:
    """``[heads, distances]``, from the last key's distance to the first's; None if it depends on more."""
    if not torch.equal(bias[1:], bias[:1].expand_as(bias[1:])):
        return None
    if not torch.equal(bias[0, :, 1:, 1:], bias[0, :, :-1, :-1]):
        return None
    return torch.cat([bias[0, :, 0, :].flip(-1), bias[0, :, 1:, 0]], dim=-1)


def buckets_of(distances: Tensor, length: int) -> Int[Tensor, " distances"] | None:
    """The buckets of the distances ``length - 1`` to ``1 - length``; None if a bucket depends on more than a distance.

    Args:
        distances: ``[1, length, length]``, the bucket of each query and key. All layers of a model are given the same
            tensor, which is read once.
        length: of the sequences.
    """
    buckets = _last_read("buckets", distances, _read_buckets)
    return buckets if buckets is not None and len(buckets) == 2 * length - 1 else None


def _read_buckets(distances: Tensor) -> Tensor | None:
    size = distances.shape
    if distances.dim() != _AXES or size[0] != 1 or size[1] != size[2] or distances.is_floating_point():
        return None
    if not torch.equal(distances[:, 1:, 1:], distances[:, :-1, :-1]):
        return None
    return torch.cat([distances[0, :, 0].flip(0), distances[0, 0, 1:]])
