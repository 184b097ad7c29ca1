"""Statistics over tiles, in a second pass over a strip's tiles with its log-sum-exp, and their gradients.

Weights are ``exp(score - largest) / total``, tile by tile, so no tensor T x T is in memory except requested ``rows``.
Sums are in the order of tiles, and each place has one writer: two runs give the same bits.

Gradients. A statistic that is linear in the weights, or the entropy, has a gradient ``G`` on each weight. With
``D = sum_j weight_j G_j`` a score's gradient is ``weight * (G - D)``: the softmax's derivative, as for the output
(FlashAttention, Dao et al. 2022, appendix B.4). ``D`` needs the whole row, hence a pass before the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.backends.tiles import Layout, Tile, TileRange, exponential, masked, raw_scores, ruled
from clearhead.problem import Problem
from clearhead.shapes import Float, Int
from clearhead.statistics import Want

__all__ = ["Base", "Pulls", "Sweep", "WeighedTile", "result_names", "weigh"]

#: Statistics of the first pass.
_FIRST: Final = ("lse", "max_score")


def result_names(want: Want) -> tuple[str, ...]:
    """The fields of the observation that the second pass computes, in order."""
    return tuple(name for name in want.shapes(0, 0) if name not in _FIRST)


@dataclass(frozen=True)
class Base:
    """The two parts of each row's log-sum-exp, ``[b, heads, rows]``: for scores of -1e9 their sum would lose digits.

    Attributes:
        largest: the row maximum, including a sink's logit; 0 for an empty row.
        total: the sum of exponentials relative to it; 1 for an empty row.
    """

    largest: Tensor
    total: Tensor

    @property
    def spoiled(self) -> bool:
        """Whether a row is NaN."""
        return bool(self.total.isnan().any())

    def without(self, rows: Tensor) -> Base:
        """The same with weights of 0 in some rows."""
        return Base(self.largest.masked_fill(rows, torch.inf), self.total.masked_fill(rows, 1.0))

    def cut(self, queries: slice) -> Base:
        """The part of a strip."""
        return Base(self.largest[:, :, queries], self.total[:, :, queries])


@dataclass(frozen=True)
class WeighedTile:
    """A tile's masked scores, the parts of its rows' log-sum-exps, and its weights."""

    scores: Tensor
    base: Base
    weights: Tensor

    @property
    def finite_logs(self) -> Tensor:
        """Logarithms of the weights; 0 where the weight is 0, since ``0 log 0`` counts as 0."""
        logs = (self.scores - self.base.largest[..., None]).sub_(self.base.total.log()[..., None])
        return logs.masked_fill_(self.weights == 0.0, 0.0)


def weigh(scores: Tensor, tile: Tile, base: Base, spoiled: bool) -> WeighedTile:
    """A tile's weights; ``spoiled`` says that a row may be NaN, in which the weights of forbidden keys must be 0."""
    scores = masked(scores, tile)
    weights = exponential(scores - base.largest[..., None]).div_(base.total[..., None])
    return WeighedTile(scores, base, masked(weights, tile, 0.0) if spoiled else weights)


class Sweep:
    """The second pass: call ``strip`` for every strip of queries, then ``finished``.

    Attributes:
        results: results by their name in the observation, at the call's places; ``top_*`` too.
    """

    def __init__(self, problem: Problem, want: Want) -> None:
        self.problem, self.want = problem, want
        batch, heads, q_len, k_len = problem.batch, problem.num_heads, problem.q_len, problem.k_len
        self.rows = want.rows_on(problem.query.device)
        # A tile is at most as large as the weights.
        self.side = min(want.heatmap, max(1, q_len, k_len))
        self.results = {
            name: problem.query.new_zeros(
                (batch, heads, *shape), dtype=torch.int64 if name == "top_indices" else problem.work_dtype
            )
            for name, shape in want.shapes(q_len, k_len).items()
            if name not in _FIRST
        }
        if "top_indices" in self.results:
            # Rows outside every document are in no layout; all their weights are 0.
            self.results["top_indices"] += torch.arange(want.top_k, device=problem.query.device)

    def strip(self, layout: Layout, queries: slice, tiles: list[Tile], base: Base) -> None:
        """Add one strip of queries with all its tiles."""
        if layout.valid is not None:
            base = base.without(~layout.valid[:, None, queries])
        spoiled = base.spoiled
        sums = {name: torch.zeros_like(base.total) for name in _ROW_SUMS if name in self.results}
        top = Top.none(base.total)
        for tile in tiles:
            scores = ruled(self.problem, raw_scores(self.problem, layout, queries, tile), tile)
            weighed = weigh(scores, tile, base, spoiled)
            for name, total in sums.items():
                total += _ROW_SUMS[name](weighed, tile, self.want)
            if self.want.top_k:
                top = top.merged(weighed.weights, tile.indices[3], self.want.top_k)
            self._columns(layout, queries, tile, weighed.weights)
            if self.want.heatmap or self.rows.numel():
                for tile_range in layout.tile_ranges(queries, tile.keys):
                    self._add_range(
                        tile_range, weighed.weights[tile_range.tile_batch, :, tile_range.rows, tile_range.columns]
                    )
        for name, total in sums.items():
            layout.put(self.results[name], queries, total)
        if self.want.top_k:
            top = top.filled(self.want.top_k)
            layout.put(self.results["top_indices"], queries, top.indices)
            layout.put(self.results["top_weights"], queries, top.weights)

    def _columns(self, layout: Layout, queries: slice, tile: Tile, weights: Tensor) -> None:
        if "received" in self.results:
            layout.add(self.results["received"], tile.keys, weights.sum(dim=2))
        if self.want.row_weights is not None:
            mixing = layout.take(_mixing(self.problem, self.want.row_weights))[:, :, queries].to(weights)
            layout.add(self.results["row_weights"].mT, tile.keys, weights.mT @ mixing)

    def _add_range(self, tile_range: TileRange, weights: Tensor) -> None:
        q_len, k_len = weights.shape[2:]
        inside, places = _inside(self.rows, tile_range)
        if inside.numel():
            self.results["rows"][tile_range.batch, :, inside, tile_range.k_start : tile_range.k_start + k_len] = (
                weights[:, :, places]
            )
        side = self.side
        if side:
            cells = (
                tile_range.batch,
                slice(None),
                slice(tile_range.q_start // side, (tile_range.q_start + q_len - 1) // side + 1),
                slice(tile_range.k_start // side, (tile_range.k_start + k_len - 1) // side + 1),
            )
            highest, sums = self.results["heatmap_max"], self.results["heatmap_mean"]
            highest[cells] = torch.maximum(highest[cells], _pooled(weights, tile_range, side, torch.amax))
            sums[cells] += _pooled(weights, tile_range, side, torch.sum)

    def finished(self) -> dict[str, Tensor]:
        """The results, after every strip."""
        if self.want.heatmap:
            counts = [
                torch.arange(length, device=self.rows.device).div(self.side, rounding_mode="floor").bincount()
                for length in (self.problem.q_len, self.problem.k_len)
            ]
            self.results["heatmap_mean"] /= counts[0][:, None] * counts[1]
        return self.results


def _inside(rows: Tensor, tile_range: TileRange) -> tuple[Tensor, Tensor]:
    """The indices of the requested rows that are in a tile range, and their queries within it."""
    inside = ((rows >= tile_range.q_start) & (rows < tile_range.q_start + tile_range.rows.stop)).nonzero()[:, 0]
    return inside, rows[inside] - tile_range.q_start


def _mixing(problem: Problem, row_weights: Tensor) -> Float[Tensor, "batch heads q_len n"]:
    return row_weights.mT.expand(problem.batch, problem.num_heads, -1, -1)


def _entropy(weighed: WeighedTile, tile: Tile, want: Want) -> Tensor:
    return -(weighed.weights * weighed.finite_logs).sum(dim=-1)


def _sink(weighed: WeighedTile, tile: Tile, want: Want) -> Tensor:
    return weighed.weights.masked_fill(tile.indices[3] >= want.sink, 0.0).sum(dim=-1)


def _distance(weighed: WeighedTile, tile: Tile, want: Want) -> Tensor:
    return (weighed.weights * _distances(tile)).sum(dim=-1)


def _distances(tile: Tile) -> Tensor:
    return (tile.indices[2] - tile.indices[3]).abs()


_ROW_SUMS: Final[dict[str, Callable[[WeighedTile, Tile, Want], Tensor]]] = {
    "entropy": _entropy,
    "sink": _sink,
    "distance": _distance,
}


def _pooled(weights: Tensor, tile_range: TileRange, side: int, reduce: Callable[..., Tensor]) -> Tensor:
    """The weights of a tile range reduced within the cells of the call that it touches."""
    along_keys = _pooled_along(weights, tile_range.k_start, side, reduce)
    return _pooled_along(along_keys.mT, tile_range.q_start, side, reduce).mT


def _pooled_along(values: Tensor, start: int, side: int, reduce: Callable[..., Tensor]) -> Tensor:
    """The last axis, whose first index is ``start``, reduced within intervals of ``side`` indices counted from 0."""
    length = values.shape[-1]
    head = min(-start % side, length)
    tail = length - (length - head) % side
    parts = [reduce(values[..., head:tail].unflatten(-1, ((tail - head) // side, side)), dim=-1)]
    if head:
        parts.insert(0, reduce(values[..., :head], dim=-1)[..., None])
    if tail < length:
        parts.append(reduce(values[..., tail:], dim=-1)[..., None])
    return torch.cat(parts, dim=-1)


@dataclass(frozen=True)
class Top:
    """The largest weights of a strip's rows so far, equal ones in the order of their keys.

    Entries of weight 0 are placeholders: ``filled`` sets their keys.
    """

    weights: Float[Tensor, "b heads rows found"]
    indices: Int[Tensor, "b heads rows found"]

    @classmethod
    def none(cls, rows: Float[Tensor, "b heads rows"]) -> Top:
        weights = rows.new_zeros((*rows.shape, 0))
        return cls(weights, weights.to(torch.int64))

    def merged(self, weights: Tensor, keys: Int[Tensor, "b 1 1 width"], k: int) -> Top:
        """The same with another tile, whose keys all come later."""
        full = self.weights.shape[-1] == k
        if full and bool((weights.amax(dim=-1) <= self.weights[..., -1]).all()):
            return self
        best, places = _largest(weights, k)
        named = keys.expand(*weights.shape[:3], -1).gather(-1, places)
        best, order = torch.cat([self.weights, best], dim=-1).sort(dim=-1, descending=True, stable=True)
        indices = torch.cat([self.indices, named], dim=-1).gather(-1, order)
        return Top(best[..., :k], indices[..., :k])

    def filled(self, k: int) -> Top:
        """All ``k`` entries; those of weight 0 get the lowest keys that have no entry yet."""
        missing = k - self.weights.shape[-1]
        weights = torch.nn.functional.pad(self.weights, (0, missing))
        indices = torch.nn.functional.pad(self.indices, (0, missing))
        empty = weights == 0.0
        if not bool(empty.any()):
            return Top(weights, indices)
        # At most n of n entries with weight have keys below k, so the first k keys include enough others.
        named = torch.zeros(*weights.shape[:-1], k + 1, dtype=torch.int8, device=weights.device)
        named.scatter_(-1, indices.masked_fill(empty | (indices >= k), k), 1)
        free = named[..., :k].argsort(dim=-1, stable=True)
        number = (empty.cumsum(dim=-1) - 1).clamp(min=0)
        return Top(weights, torch.where(empty, free.gather(-1, number), indices))


def _largest(weights: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last axis (all if there are fewer) and their indices, equal ones in order."""
    if k < weights.shape[-1]:
        best, places = weights.topk(k + 1, dim=-1)
        last, next_one = best[..., k - 1], best[..., k]
        # topk may choose any of several equal weights; sort if the last one is equal to the next.
        if bool(((last > next_one) | (last == 0.0)).all()):
            places = places[..., :k].sort(dim=-1).values
            best, order = weights.gather(-1, places).sort(dim=-1, descending=True, stable=True)
            return best, places.gather(-1, order)
    best, places = weights.sort(dim=-1, descending=True, stable=True)
    return best[..., :k], places[..., :k]


@dataclass(frozen=True)
class Pulls:
    """A loss's gradients with respect to statistics, and the resulting gradients of weights and scores.

    Tensors are ``[batch, heads, len]`` or ``[batch, heads, len, dim]``, of the call or of a layout; None for statistics
    without a gradient.
    """

    want: Want
    entropy: Tensor | None = None
    sink: Tensor | None = None
    distance: Tensor | None = None
    received: Tensor | None = None
    #: The matrix that multiplies the weights from the left, and the gradient of the result.
    mixing: Tensor | None = None
    mixed: Tensor | None = None
    #: ``[batch, heads, rows, k_len]``, always of the call.
    rows: Tensor | None = None
    #: The row maxima and their gradient.
    highest: Tensor | None = None
    largest: Tensor | None = None
    #: The sum of the gradient of ``Want.row_weights``, ``[batch, heads, q_len, n]`` of the call.
    grad_mixing: Tensor | None = None

    @classmethod
    def of(
        cls,
        problem: Problem,
        want: Want,
        max_score: tuple[Tensor, Tensor | None],
        grads: Mapping[str, Tensor],
        row_weights: Tensor | None,
        *,
        gather: bool,
    ) -> Pulls:
        """From the row maxima with their gradient, and gradients by field of the observation.

        ``gather`` says that the gradient of ``Want.row_weights`` is needed.
        """
        highest, largest = max_score
        named = {name: grads.get(name) for name in ("entropy", "sink", "distance", "received", "rows")}
        pulls = cls(want=want, highest=None if largest is None else highest, largest=largest, **named)
        if row_weights is None or "row_weights" not in grads:
            return pulls
        return replace(
            pulls,
            mixing=_mixing(problem, row_weights.to(highest.dtype)),
            mixed=grads["row_weights"].mT,
            grad_mixing=highest.new_zeros((*highest.shape, row_weights.shape[2])) if gather else None,
        )

    @property
    def any(self) -> bool:
        """Whether any statistic has a gradient."""
        return any(getattr(self, name) is not None for name in (*_PULLED, "rows"))

    def within(self, layout: Layout) -> Pulls:
        """The part of a layout."""
        pulled = {name: getattr(self, name) for name in _PULLED}
        parts: dict[str, Any] = {
            name: None if tensor is None else layout.take(tensor) for name, tensor in pulled.items()
        }
        return replace(self, **parts)

    def on_weights(self, layout: Layout, queries: slice, tile: Tile, weighed: WeighedTile) -> Tensor:
        """The gradient with respect to a tile's weights; 0 at forbidden keys."""
        grad = torch.zeros_like(weighed.weights)
        if self.entropy is not None:
            slope = (weighed.finite_logs + 1.0).masked_fill(weighed.weights == 0.0, 0.0)
            grad -= self.entropy[:, :, queries, None] * slope
        if self.sink is not None:
            grad += self.sink[:, :, queries, None] * (tile.indices[3] < self.want.sink)
        if self.distance is not None:
            grad += self.distance[:, :, queries, None] * _distances(tile)
        if self.received is not None:
            grad += self.received[:, :, None, tile.keys]
        if self.mixing is not None and self.mixed is not None:
            grad += self.mixing[:, :, queries] @ self.mixed[:, :, tile.keys].mT
        if self.rows is not None and self.want.rows is not None:
            asked = self.want.rows_on(grad.device)
            for tile_range in layout.tile_ranges(queries, tile.keys):
                inside, places = _inside(asked, tile_range)
                rows = self.rows[
                    tile_range.batch, :, :, tile_range.k_start : tile_range.k_start + tile_range.columns.stop
                ]
                grad[tile_range.tile_batch, :, :, tile_range.columns].index_add_(2, places, rows[:, :, inside])
        return masked(grad, tile, 0.0)

    def walk(
        self, problem: Problem, layout: Layout, queries: slice, tiles: list[Tile], base: Base
    ) -> tuple[Tensor, Tensor | None]:
        """A strip's sums of weight times gradient, and the gradient of the row maximum for each of its ties.

        ``base`` is that of the strip. The gradient of ``Want.row_weights`` is added to its sum.
        """
        spoiled = base.spoiled
        total, count = torch.zeros_like(base.total), torch.zeros_like(base.total)
        for tile in tiles:
            weighed = weigh(ruled(problem, raw_scores(problem, layout, queries, tile), tile), tile, base, spoiled)
            total += (weighed.weights * self.on_weights(layout, queries, tile, weighed)).sum(dim=-1)
            if self.highest is not None:
                count += (weighed.scores == self.highest[:, :, queries, None]).sum(dim=-1)
            if self.grad_mixing is not None and self.mixed is not None:
                layout.add(self.grad_mixing, queries, weighed.weights @ self.mixed[:, :, tile.keys])
        if self.highest is None or self.largest is None:
            return total, None
        unreached = self.highest[:, :, queries] == -torch.inf
        return total, self.largest[:, :, queries].masked_fill(unreached, 0.0) / count.clamp(min=1.0)

    def on_scores(self, grad_scores: Tensor, queries: slice, weighed: WeighedTile, share: Tensor | None) -> Tensor:
        """Add the gradient of the row maximum, which ties share evenly."""
        if share is None or self.highest is None:
            return grad_scores
        return grad_scores + share[..., None] * (weighed.scores == self.highest[:, :, queries, None])


#: Fields of ``Pulls`` that are cut to a layout's part.
_PULLED: Final = ("entropy", "sink", "distance", "received", "mixing", "mixed", "highest", "largest")
