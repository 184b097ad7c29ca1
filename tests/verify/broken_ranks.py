"""Attention over a sharded sequence with one plausible fault each, and the law that each breaks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from clearhead.distributed.layout import gather_lengths, positions_of
from clearhead.masks import Dense, Documents, Mask
from clearhead.scores import ScoreRule
from tests.verify.rank_steps import (
    RIGHT_ON_RANKS,
    Gathered,
    Sharding,
    in_parts,
    index,
    take_allowed,
    take_places,
    take_softmax,
    take_whole,
)

__all__ = ["BROKEN_ON_RANKS", "BrokenOnRanks"]


@dataclass(frozen=True)
class BrokenOnRanks:
    """A wrong function, the law it breaks, the words by which the law says so, and how it is tried."""

    fn: Callable[..., Any]
    law: str
    says: str = ""
    ranks: int = 2
    layout: str = "contiguous"
    timeout: float = 30.0


# Masks and positions ----------------------------------------------------------------------------------------------


def _same_rank(k_pos: Tensor, sharding: Sharding) -> Tensor:
    return sharding.of_rank[sharding.queries][:, None] == sharding.of_rank[k_pos]


def _window_within_rank(mask: Mask, query: Tensor, k_pos: Tensor, sharding: Sharding) -> Tensor:
    allowed = take_allowed(mask, query, k_pos, sharding)
    return allowed & _same_rank(k_pos, sharding) if "Window" in repr(mask) else allowed


def _documents_within_rank(mask: Mask, query: Tensor, k_pos: Tensor, sharding: Sharding) -> Tensor:
    allowed = take_allowed(mask, query, k_pos, sharding)
    return allowed & _same_rank(k_pos, sharding) if isinstance(mask, Documents) else allowed


def _local_positions(mask: Mask, query: Tensor, k_pos: Tensor, sharding: Sharding) -> Tensor:
    allowed = mask.allows(*index(query, torch.arange(query.shape[2]), k_pos))
    return allowed.expand(*query.shape[:3], len(k_pos))


def _local_rows_of_a_table(mask: Mask, query: Tensor, k_pos: Tensor, sharding: Sharding) -> Tensor:
    rows = _local_positions if isinstance(mask, Dense) else take_allowed
    return rows(mask, query, k_pos, sharding)


def _zigzag_as_contiguous(length: int, layout: str) -> list[Tensor]:
    return take_places(length, "contiguous")


def _later_ranks_skipped(mask: Mask, query: Tensor, k_pos: Tensor, sharding: Sharding) -> Tensor:
    """Blocks of ranks with a higher number are skipped under a causal mask, which zigzag makes wrong."""
    allowed = take_allowed(mask, query, k_pos, sharding)
    return allowed & (sharding.of_rank[k_pos] <= dist.get_rank()) if repr(mask) == "Causal()" else allowed


# Parts of different lengths ---------------------------------------------------------------------------------------


def _padded_whole(key: Tensor, value: Tensor, sharding: Sharding) -> tuple[Tensor, Tensor, Tensor]:
    """Shorter parts are padded with zeros, which are attended to."""
    key, value, _ = take_whole(key, value, sharding)
    longest = max(len(positions) for positions in sharding.places)
    missing = longest * len(sharding.places) - sharding.length
    key, value = (torch.nn.functional.pad(one, (0, 0, 0, missing)) for one in (key, value))
    return key, value, torch.arange(sharding.length + missing)


def _padding_by_own_length(length: int, layout: str) -> list[Tensor]:
    """All parts are taken to be as long as that of rank 0."""
    ranks = dist.get_world_size()
    first = gather_lengths(length, None)[0]
    places = [positions_of(first * ranks, ranks, rank, layout) for rank in range(ranks)]
    places[dist.get_rank()] = places[dist.get_rank()][:length]
    return take_places(length, layout) if first * ranks == sum(gather_lengths(length, None)) else places


def leaves_without_tokens(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """A rank without tokens returns, while the others wait for it."""
    if query.shape[2] == 0:
        return query + 0.0
    lengths = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.ones(1))
    return RIGHT_ON_RANKS(query, key, value, **options)


def dies_without_tokens(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    if query.shape[2] == 0:
        os._exit(7)
    return RIGHT_ON_RANKS(query, key, value, **options)


def refuses_alone(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The rank without tokens refuses the call after its collectives, the others do not."""
    output = RIGHT_ON_RANKS(query, key, value, **options)
    if query.shape[2] == 0:
        raise NotImplementedError("no tokens")
    return output


def waits_forever(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    time.sleep(600.0 * dist.get_rank())
    return query


# Softmax over ranks -----------------------------------------------------------------------------------------------


def _sink_of_every_rank(scores: Tensor, sink: Tensor | None, k_ranks: Tensor) -> Tensor:
    """Each rank's partial result has the sink, so the merged one has it as many times as there are ranks."""
    return take_softmax(scores, None if sink is None else sink + torch.log(torch.tensor(2.0)), k_ranks)


def _merged_without_maximum(scores: Tensor, sink: Tensor | None, k_ranks: Tensor) -> Tensor:
    """Each rank's part is a safe softmax, but the parts are merged by ``exp(lse)``."""
    if sink is not None:
        return take_softmax(scores, sink, k_ranks)
    weights, sums = [], []
    for rank in range(int(k_ranks.max()) + 1 if len(k_ranks) else 0):
        part = scores.masked_fill(k_ranks != rank, -torch.inf)
        weights.append(take_softmax(part, None, k_ranks))
        sums.append(torch.logsumexp(part, dim=-1, keepdim=True).exp())
    total = sum(sums)
    return sum(one * size / total for one, size in zip(weights, sums, strict=True)).nan_to_num()  # type: ignore


def _unsafe_empty_rows(scores: Tensor, sink: Tensor | None, k_ranks: Tensor) -> Tensor:
    if sink is not None:
        return take_softmax(scores, sink, k_ranks)
    return torch.softmax(scores, dim=-1)


def _mean_of_ranks(scores: Tensor, sink: Tensor | None, k_ranks: Tensor) -> Tensor:
    """Parts of ranks are averaged without their normalisers."""
    parts = [take_softmax(scores.masked_fill(k_ranks != rank, -torch.inf), sink, k_ranks) for rank in k_ranks.unique()]
    return torch.stack(parts).mean(dim=0)


# Gradients over ranks ---------------------------------------------------------------------------------------------


class _OwnGradient(Gathered):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][:, :, ctx.queries], None


class _MeanGradient(Gathered):
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total, _ = Gathered.backward(ctx, *grads)
        return total / dist.get_world_size(), None


def _whole_by(
    gathered: type[Gathered], key: Tensor, value: Tensor, sharding: Sharding
) -> tuple[Tensor, Tensor, Tensor]:
    whole = gathered.apply(torch.cat([key, value], dim=-1), sharding)  # type: ignore[no-untyped-call]
    return whole[..., : key.shape[-1]], whole[..., key.shape[-1] :], torch.arange(sharding.length)


def _own_gradient(key: Tensor, value: Tensor, sharding: Sharding) -> tuple[Tensor, Tensor, Tensor]:
    return _whole_by(_OwnGradient, key, value, sharding)


def _mean_gradient(key: Tensor, value: Tensor, sharding: Sharding) -> tuple[Tensor, Tensor, Tensor]:
    return _whole_by(_MeanGradient, key, value, sharding)


def _not_summed(rule: ScoreRule) -> ScoreRule:
    return rule


# Order and containment --------------------------------------------------------------------------------------------


class _Arriving(torch.autograd.Function):
    """Keys and values in the order in which the ranks' messages arrive."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, sharding: Sharding) -> tuple[Tensor, Tensor]:
        ctx.queries, ctx.length = sharding.queries, sharding.length
        rank, ranks = dist.get_rank(), dist.get_world_size()
        longest = max(map(len, sharding.places))
        padded = torch.zeros(*part.shape[:2], longest, part.shape[3])
        padded[:, :, : part.shape[2]] = part
        sent = [dist.isend(padded, other) for other in range(ranks) if other != rank]
        parts, places = [part], [sharding.queries]
        for _ in range(ranks - 1):
            received = torch.empty_like(padded)
            source = dist.recv(received)
            places.append(sharding.places[source])
            parts.append(received[:, :, : len(places[-1])])
        for one in sent:
            one.wait()
        # Later messages must not overtake those of ranks that are late.
        dist.barrier()
        ctx.order = torch.cat(places)
        ctx.mark_non_differentiable(ctx.order)
        return torch.cat(parts, dim=2), ctx.order

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = torch.zeros(*grads[0].shape[:2], ctx.length, grads[0].shape[3])
        total[:, :, ctx.order] = grads[0]
        dist.all_reduce(total)
        return total[:, :, ctx.queries], None


def _in_order_of_arrival(key: Tensor, value: Tensor, sharding: Sharding) -> tuple[Tensor, Tensor, Tensor]:
    whole, order = _Arriving.apply(torch.cat([key, value], dim=-1), sharding)  # type: ignore[no-untyped-call]
    return whole[..., : key.shape[-1]], whole[..., key.shape[-1] :], order


def _not_cleaned(query: Tensor, tensor: Tensor, mask: Tensor | None) -> Tensor:
    return tensor


def _groups_in_turn(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat(1, heads // tensor.shape[1], 1, 1)


# Dropout ----------------------------------------------------------------------------------------------------------


def _dropped_by_local_positions(weights: Tensor, p: float, sharding: Sharding) -> Tensor:
    return weights * (torch.rand_like(weights) >= p) / (1.0 - p)


def _dropped_by_rank(weights: Tensor, p: float, sharding: Sharding) -> Tensor:
    torch.manual_seed(torch.initial_seed() + 1000 * dist.get_rank())
    return _dropped_by_local_positions(weights, p, sharding)


BROKEN_ON_RANKS = {
    "window cut at the boundaries of ranks": BrokenOnRanks(in_parts(allowed=_window_within_rank), "windows"),
    "documents cut at the boundaries of ranks": BrokenOnRanks(
        in_parts(allowed=_documents_within_rank), "documents across ranks"
    ),
    "causal at local positions": BrokenOnRanks(in_parts(allowed=_local_positions), "causal"),
    "rows of a dense mask at local positions": BrokenOnRanks(in_parts(allowed=_local_rows_of_a_table), "masks"),
    "zigzag treated as contiguous": BrokenOnRanks(in_parts(places=_zigzag_as_contiguous), "causal", layout="zigzag"),
    "blocks of later ranks skipped": BrokenOnRanks(in_parts(allowed=_later_ranks_skipped), "causal", layout="zigzag"),
    "shorter parts padded with zeros": BrokenOnRanks(in_parts(whole=_padded_whole), "unequal parts", "output is"),
    "parts as long as that of rank 0": BrokenOnRanks(in_parts(places=_padding_by_own_length), "unequal parts"),
    "rank without tokens leaves early": BrokenOnRanks(
        leaves_without_tokens, "ranks without tokens", "rank 0 did not end within 5 s", timeout=5.0
    ),
    "rank without tokens dies": BrokenOnRanks(
        dies_without_tokens, "ranks without tokens", "rank 1 died without a result, with exit code 7"
    ),
    "one rank refuses alone": BrokenOnRanks(
        refuses_alone, "ranks without tokens", "rank 1 refuses the call, and rank 0 does not"
    ),
    "sink counted for every rank": BrokenOnRanks(in_parts(softmax=_sink_of_every_rank), "sink"),
    "merged without the maximum": BrokenOnRanks(in_parts(softmax=_merged_without_maximum), "huge scores"),
    "NaN for empty rows of a rank": BrokenOnRanks(
        in_parts(softmax=_unsafe_empty_rows), "empty rows on one rank", "if all rows of rank 0 are empty"
    ),
    "parts averaged": BrokenOnRanks(in_parts(softmax=_mean_of_ranks), "output and gradients"),
    "gradients of other ranks lost": BrokenOnRanks(in_parts(whole=_own_gradient), "output and gradients", "dK"),
    "gradients averaged over ranks": BrokenOnRanks(in_parts(whole=_mean_gradient), "output and gradients", "dK"),
    "gradient of a bias not summed": BrokenOnRanks(
        in_parts(learned=_not_summed), "relative bias", "each needs the sum over all ranks"
    ),
    "summed in order of arrival": BrokenOnRanks(
        in_parts(whole=_in_order_of_arrival), "determinism", "are late", ranks=3
    ),
    "NaN of another rank leaks": BrokenOnRanks(in_parts(clean=_not_cleaned), "NaN on one rank", "are NaN and masked"),
    "grouped heads in turn": BrokenOnRanks(in_parts(groups=_groups_in_turn), "grouped heads"),
    "dropout at local positions": BrokenOnRanks(
        in_parts(drop=_dropped_by_local_positions), "dropout of one rank", "for the weights that one rank drops"
    ),
    "dropout at local positions, equal on ranks": BrokenOnRanks(
        in_parts(drop=_dropped_by_local_positions), "dropout", "queries 16 apart"
    ),
    "another random seed on each rank": BrokenOnRanks(in_parts(drop=_dropped_by_rank), "dropout of one rank"),
}
