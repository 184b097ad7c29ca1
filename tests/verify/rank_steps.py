"""A correct attention over a sharded sequence made of steps, each of which can be replaced by a wrong one.

Keys and values are gathered; backward sums their gradients over ranks. Masks and rules are read at positions of the
whole sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from clearhead.distributed.layout import gather_lengths, gather_parts, positions_of
from clearhead.masks import Mask
from clearhead.scores import ScoreRule, Sink
from tests.verify.steps import take_clean, take_groups, take_mix

__all__ = [
    "RIGHT_ON_RANKS",
    "Gathered",
    "RankSteps",
    "Sharding",
    "in_parts",
    "index",
    "take_allowed",
    "take_drop",
    "take_places",
    "take_softmax",
    "take_whole",
]


@dataclass(frozen=True, eq=False)
class Sharding:
    """The positions of every rank's tokens in the whole sequence, in the order in which its part contains them."""

    places: list[Tensor]

    @property
    def queries(self) -> Tensor:
        """The positions of this rank's queries."""
        return self.places[dist.get_rank()]

    @property
    def length(self) -> int:
        return sum(map(len, self.places))

    @property
    def of_rank(self) -> Tensor:
        """The rank of each position."""
        ranks = torch.empty(self.length, dtype=torch.int64)
        for rank, positions in enumerate(self.places):
            ranks[positions] = rank
        return ranks


def take_places(length: int, layout: str) -> list[Tensor]:
    total = sum(gather_lengths(length, None))
    return [positions_of(total, dist.get_world_size(), rank, layout) for rank in range(dist.get_world_size())]


class Gathered(torch.autograd.Function):
    """The whole keys or values in the order of the sequence; backward sums over ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, sharding: Sharding) -> Tensor:
        ctx.queries = sharding.queries
        parts = gather_parts(part, 2, [len(positions) for positions in sharding.places], None)
        return torch.cat(parts, dim=2)[:, :, torch.cat(sharding.places).argsort()]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total)
        return total[:, :, ctx.queries], None


def take_whole(key: Tensor, value: Tensor, sharding: Sharding) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and their positions."""
    whole = Gathered.apply(torch.cat([key, value], dim=-1), sharding)  # type: ignore[no-untyped-call]
    return whole[..., : key.shape[-1]], whole[..., key.shape[-1] :], torch.arange(sharding.length)


def index(query: Tensor, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, head = torch.arange(query.shape[0]), torch.arange(query.shape[1])
    return batch.view(-1, 1, 1, 1), head.view(1, -1, 1, 1), q_pos.view(1, 1, -1, 1), k_pos.view(1, 1, 1, -1)


def take_allowed(mask: Mask, query: Tensor, k_pos: Tensor, sharding: Sharding) -> Tensor:
    allowed = mask.allows(*index(query, sharding.queries, k_pos))
    return allowed.expand(query.shape[0], query.shape[1], query.shape[2], len(k_pos))


class _Summed(torch.autograd.Function):
    """A tensor that all ranks have; backward sums over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


def take_learned(rule: ScoreRule) -> ScoreRule:
    """The rule, with gradients of its tensors summed over ranks."""
    summed = copy.copy(rule)
    for name, tensor in vars(rule).items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            object.__setattr__(summed, name, _Summed.apply(tensor))  # type: ignore[no-untyped-call]
    return summed


def take_softmax(scores: Tensor, sink: Tensor | None, k_ranks: Tensor) -> Tensor:
    """The weights; ``k_ranks`` is the rank of each key."""
    if sink is not None:
        column = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    empty = (scores == -torch.inf).all(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    return weights if sink is None else weights[..., :-1]


def take_drop(weights: Tensor, p: float, sharding: Sharding) -> Tensor:
    """Random numbers for the whole sequence, of which a rank takes the rows of its queries."""
    drawn = torch.rand(*weights.shape[:2], sharding.length, weights.shape[3])[:, :, sharding.queries]
    return weights * (drawn >= p) / (1.0 - p)


@dataclass(frozen=True)
class RankSteps:
    """Attention over a sharded sequence in steps, with the signature of ``clearhead.distributed.attention``."""

    places: Callable[[int, str], list[Tensor]] = take_places
    whole: Callable[[Tensor, Tensor, Sharding], tuple[Tensor, Tensor, Tensor]] = take_whole
    groups: Callable[[Tensor, int], Tensor] = take_groups
    allowed: Callable[[Mask, Tensor, Tensor, Sharding], Tensor] = take_allowed
    learned: Callable[[ScoreRule], ScoreRule] = take_learned
    softmax: Callable[[Tensor, Tensor | None, Tensor], Tensor] = take_softmax
    drop: Callable[[Tensor, float, Sharding], Tensor] = take_drop
    clean: Callable[[Tensor, Tensor, Tensor | None], Tensor] = take_clean
    mix: Callable[[Tensor, Tensor], Tensor] = take_mix

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layout: str = "contiguous",
        mask: Mask | None = None,
        scores: Sequence[ScoreRule] = (),
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        sharding = Sharding(self.places(query.shape[2], layout))
        key, value, k_pos = self.whole(key, value, sharding)
        allowed = None if mask is None else self.allowed(mask, query, k_pos, sharding)
        key, value = (self.clean(query, one, allowed) for one in (key, value))
        key, value = self.groups(key, query.shape[1]), self.groups(value, query.shape[1])
        score = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        sink = None
        for rule in map(self.learned, scores):
            if isinstance(rule, Sink):
                sink = rule.logits
            else:
                score = rule.apply(score, *index(query, sharding.queries, k_pos))
        if allowed is not None:
            score = score.masked_fill(~allowed, -torch.inf)
        # A padded sequence has more keys than positions.
        of_rank = sharding.of_rank[k_pos.clamp_max(sharding.length - 1)]
        weights = self.softmax(score, sink, of_rank)
        return self.mix(self.drop(weights, dropout, sharding) if dropout else weights, value)


RIGHT_ON_RANKS = RankSteps()


def in_parts(**steps: Any) -> Callable[..., Any]:
    return replace(RIGHT_ON_RANKS, **steps)
