"""Tiling: a call split into batches, strips of queries and tiles of keys, and the scores of a tile.

Forward, backward and statistics on the tiles are in ``tiled`` and ``tiled_statistics``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from clearhead.backends.containment import all_finite, not_finite_terms, only_finite
from clearhead.backends.documents import Group, documents_in, groups
from clearhead.errors import ClearheadError
from clearhead.masks.base import Mask
from clearhead.masks.function import MaskFunction
from clearhead.masks.tile_map import EMPTY, FULL, tile_map
from clearhead.problem import Problem
from clearhead.scores import ScoreFunction
from clearhead.shapes import Bool, Float

__all__ = [
    "Layout",
    "Tile",
    "TileRange",
    "add_not_finite",
    "add_product",
    "exponential",
    "finite",
    "first_place",
    "functions_of",
    "layouts",
    "masked",
    "raw_scores",
    "ruled",
    "stacked",
    "strips",
]

#: Scores per tile over all its batches and heads: large enough to hide Python's overhead, small enough for L2 cache.
_TILE_SCORES: Final = 2**17
_Q_TILE: Final = 128
_K_TILE: Final = 512
_LOG2_E: Final = 1.0 / math.log(2.0)

_Indices = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class TileRange:
    """A part of a tile that is a rectangle of the call's scores.

    Attributes:
        batch: batch entries of the call.
        tile_batch: batch entries of the tile.
        rows: queries of the tile, of which the first is query ``q_start`` of the call.
        columns: keys of the tile, of which the first is key ``k_start`` of the call.
    """

    batch: slice
    tile_batch: slice
    rows: slice
    columns: slice
    q_start: int
    k_start: int


@dataclass(frozen=True)
class Tile:
    """One tile: its keys, its index tensors, and which of its places may be attended to (None: all)."""

    keys: slice
    indices: _Indices
    allowed: Tensor | None

    @property
    def allowed_by_key(self) -> Tensor | None:
        """``allowed`` with keys before queries."""
        return None if self.allowed is None else self.allowed.mT


@dataclass(frozen=True)
class Layout:
    """A batch of rows in the working dtype, with the absolute position of each token.

    ``clean`` are query, key and value with 0 for NaN and infinity, for sums over keys or queries; the same tensors if
    all elements are finite.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    indices: _Indices
    valid: Tensor | None
    clean: tuple[Tensor, Tensor, Tensor]
    group: Group | None
    #: The batch entries of the call, or of the group.
    part: slice

    @property
    def is_finite(self) -> bool:
        """Whether no element is NaN or infinite."""
        return self.clean[0] is self.query

    def take(self, tensor: Tensor, *, padding: float = 0.0) -> Tensor:
        """The layout's part of a tensor of the call, ``[batch, heads, len]`` or ``[batch, heads, len, dim]``."""
        if self.group is None:
            return tensor[self.part]
        piece = self.group.take(tensor if tensor.ndim == 4 else tensor[..., None])
        piece = piece.masked_fill(~self.group.valid[:, None, :, None], padding)
        return piece if tensor.ndim == 4 else piece[..., 0]

    def put(self, into: Tensor, places: slice, piece: Tensor) -> None:
        """Write the results for some of the layout's tokens to their places in a tensor of the call."""
        if self.group is None:
            into[self.part, :, places] = piece
            return
        span = Group(self.group.slots[:, places], self.group.valid[:, places])
        span.put(into if into.ndim == 4 else into[..., None], piece if piece.ndim == 4 else piece[..., None])

    def add(self, into: Tensor, places: slice, piece: Tensor) -> None:
        """Add the results for some of the layout's tokens to their places in a tensor of the call."""
        if self.group is None:
            into[self.part, :, places] += piece
            return
        real = self.group.valid[:, places]
        # Each token is in one document, so no place occurs twice and the order of the sum is fixed.
        into[0][:, self.group.slots[:, places][real]] += piece.transpose(0, 1)[:, real]

    def gathered(self, into: Tensor) -> Tensor:
        """A tensor for the layout's sums over queries: a view of ``into``, or zeros for packed documents."""
        if self.group is None:
            return into[self.part]
        return into.new_zeros(self.part.stop - self.part.start, into.shape[1], self.key.shape[2], into.shape[3])

    def tile_ranges(self, queries: slice, keys: slice) -> Iterator[TileRange]:
        """The rectangles of the call's scores that a tile consists of, without padding."""
        rows, columns = slice(0, queries.stop - queries.start), slice(0, keys.stop - keys.start)
        if self.group is None:
            yield TileRange(self.part, slice(None), rows, columns, queries.start, keys.start)
            return
        for number, (first, length) in enumerate(self._documents):
            q_stop, k_stop = (min(length, part.stop) - part.start for part in (queries, keys))
            if q_stop > 0 and k_stop > 0:
                yield TileRange(
                    slice(0, 1),
                    slice(number, number + 1),
                    slice(0, q_stop),
                    slice(0, k_stop),
                    first + queries.start,
                    first + keys.start,
                )

    @cached_property
    def _documents(self) -> list[tuple[int, int]]:
        """Start and length of each document of the group."""
        assert self.group is not None
        return list(zip(self.group.slots[:, 0].tolist(), self.group.valid.sum(dim=1).tolist(), strict=True))


def layouts(problem: Problem) -> Iterator[Layout]:
    """The call, or the groups of documents of a packed call, in batches with about ``_TILE_SCORES`` scores a tile."""
    if problem.q_len == 0:
        return
    documents = documents_in(problem)
    tensors = tuple(tensor.detach() for tensor in (problem.query, problem.key, problem.value))
    if documents is None:
        yield from _batches(problem, _layout(problem, tensors, problem.indices(), None))
        return
    batch, head, _, _ = problem.indices()
    for group in groups(documents):
        indices = (batch, head, group.slots[:, None, :, None], group.slots[:, None, None, :])
        gathered = tuple(group.take(tensor).contiguous() for tensor in tensors)
        yield from _batches(problem, _layout(problem, gathered, indices, group))


def _layout(problem: Problem, tensors: tuple[Tensor, ...], indices: _Indices, group: Group | None) -> Layout:
    query, key, value = (tensor.to(problem.work_dtype) for tensor in tensors)
    valid = None if group is None or bool(group.valid.all()) else group.valid
    clean = (query, key, value)
    if not all_finite(*clean):
        clean = (only_finite(query), only_finite(key), only_finite(value))
    return Layout(query, key, value, indices, valid, clean, group, slice(0, query.shape[0]))


def _batches(problem: Problem, layout: Layout) -> Iterator[Layout]:
    size, heads, q_len, _ = layout.query.shape
    per_batch = heads * min(q_len, _Q_TILE) * min(layout.key.shape[2], _K_TILE)
    step = max(1, _TILE_SCORES // max(1, per_batch))
    if step < size and layout.group is None and not _serves_parts(problem):
        step = size
    for start in range(0, size, step):
        part = slice(start, min(start + step, size))
        cut = tuple(index[part] if index.shape[0] > 1 else index for index in layout.indices)
        pieces = (layout.query[part], layout.key[part], layout.value[part])
        clean = pieces if layout.is_finite else tuple(tensor[part] for tensor in layout.clean)
        yield Layout(
            *pieces,
            (cut[0], cut[1], cut[2], cut[3]),
            None if layout.valid is None else layout.valid[part],
            (clean[0], clean[1], clean[2]),
            None if layout.group is None else Group(layout.group.slots[part], layout.group.valid[part]),
            part,
        )


def _serves_parts(problem: Problem) -> bool:
    """Whether users' functions run on a part of the batch; one that adds a tensor ``[batch, 1, 1, 1]`` does not."""
    if not functions_of(problem):
        return True
    try:
        with torch.no_grad():
            first_place(problem)
    except ClearheadError:  # other errors are raised again on the tiles
        return False
    return True


def functions_of(problem: Problem) -> list[ScoreFunction | MaskFunction]:
    """The users' functions among a problem's rules and in its mask."""
    waiting: list[object] = [*problem.scores, problem.mask]
    functions: list[ScoreFunction | MaskFunction] = []
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, (ScoreFunction, MaskFunction)):
            functions.append(part)
        elif isinstance(part, Mask):
            waiting += [getattr(part, name) for name in part.fields]
    return functions


def first_place(problem: Problem) -> tuple[Tensor, Tensor, _Indices]:
    """Evaluate the rules and the mask on the first query and key of every head.

    Returns:
        The scores before the rules, the scores after them, and the index tensors.
    """
    batch, head, q_pos, k_pos = problem.indices()
    indices = (batch[:1], head, q_pos[:, :, :1], k_pos[..., :1])
    before = problem.query.new_zeros(1, problem.num_heads, 1, 1, dtype=problem.work_dtype)
    before.requires_grad_(torch.is_grad_enabled())
    if problem.mask is not None:
        problem.mask.allows(*indices)
    return before, ruled(problem, before, Tile(slice(0, 1), indices, None)), indices


def strips(problem: Problem, layout: Layout) -> Iterator[tuple[slice, list[Tile]]]:
    """Each strip of queries with its tiles that are not empty."""
    q_len, k_len = layout.query.shape[2], layout.key.shape[2]
    q_tile, k_tile = _tile_sides(layout)
    columns = [slice(start, min(start + k_tile, k_len)) for start in range(0, k_len, k_tile)]
    rows = [slice(start, min(start + q_tile, q_len)) for start in range(0, q_len, q_tile)]
    for queries, kinds in zip(rows, _kinds(problem, layout, rows, q_tile, k_tile), strict=True):
        every = [FULL] * len(columns) if kinds is None else kinds
        yield (
            queries,
            [
                _tile(problem, layout, queries, keys, kind == FULL)
                for keys, kind in zip(columns, every, strict=True)
                if kind != EMPTY
            ],
        )


def _kinds(problem: Problem, layout: Layout, rows: list[slice], q_tile: int, k_tile: int) -> Iterator[list[int] | None]:
    """For each strip, whether each of its tiles is empty, partial or full; None without a mask."""
    if problem.mask is None:
        yield from [None] * len(rows)
        return
    batch, head, q_pos, k_pos = layout.indices
    whole = layout.group is None
    by_runs = whole and problem.mask.intervals(batch, head, q_pos[:, :, :1], k_pos.shape[-1]) is not None
    # A mask without intervals is evaluated a strip at a time, so that its large tensors reuse memory.
    parts = [slice(None)] if by_runs else rows
    for part in parts:
        kinds = tile_map(problem.mask, (batch, head, q_pos[:, :, part], k_pos), q_tile, k_tile, whole=whole)
        # All batch entries and heads are computed together: a tile is empty, or full, if it is so for all.
        low, high = kinds.amin(dim=(0, 1)), kinds.amax(dim=(0, 1))
        yield from torch.where(low == FULL, FULL, (high != EMPTY).to(torch.int8)).tolist()


def _tile_sides(layout: Layout) -> tuple[int, int]:
    """Queries and keys of a tile, fewer for many batch entries and heads."""
    size, heads = layout.query.shape[:2]
    limit = max(32 * 64, _TILE_SCORES // max(1, size * heads))
    q_tile, k_tile = _Q_TILE, _K_TILE
    while q_tile * k_tile > limit:
        if k_tile > 2 * q_tile:
            k_tile //= 2
        else:
            q_tile //= 2
    return q_tile, k_tile


def _tile(problem: Problem, layout: Layout, queries: slice, keys: slice, full: bool) -> Tile:
    batch, head, q_pos, k_pos = layout.indices
    indices = (batch, head, q_pos[:, :, queries], k_pos[:, :, :, keys])
    allowed = None
    if not full and problem.mask is not None:
        allowed = problem.mask.allows(*indices)
    if layout.valid is not None:
        real = layout.valid[:, None, None, keys]
        allowed = real if allowed is None else allowed & real
    return Tile(keys, indices, allowed)


def stacked(tensor: Float[Tensor, "b heads rows x"], kv_heads: int) -> Float[Tensor, "kv_heads rows x"]:
    """Batch entries and key heads as one axis, the rows of a group of query heads as another, so a key is read once."""
    return tensor.reshape(tensor.shape[0] * kv_heads, -1, tensor.shape[3])


def add_product(
    into: Float[Tensor, "b heads rows x"],
    left: Float[Tensor, "n rows y"],
    right: Float[Tensor, "n y x"],
    alpha: float = 1.0,
) -> None:
    """``into += alpha * left @ right`` in place, with batch entries and heads as one axis."""
    if into.shape[0] == 1 or into.stride(0) == into.shape[1] * into.stride(1):
        into.flatten(0, 1).baddbmm_(left, right, alpha=alpha)
    else:
        into += torch.bmm(left, right).mul_(alpha).view(into.shape)


def add_not_finite(
    into: Float[Tensor, "b heads rows x"],
    left: Float[Tensor, "b left_heads rows y"],
    right: Float[Tensor, "b right_heads y x"],
    allowed: Bool[Tensor, "b left_heads rows y"] | None,
) -> None:
    """Add in place what NaN and infinity in ``right`` add to ``left @ right``, over the query heads of a group."""
    if bool(torch.isfinite(right).all()):
        return
    allowed = None if allowed is None else allowed.expand(left.shape)
    terms = not_finite_terms(left, right.repeat_interleave(left.shape[1] // right.shape[1], dim=1), allowed)
    into += terms.unflatten(1, (into.shape[1], -1)).sum(dim=2)


def raw_scores(problem: Problem, layout: Layout, queries: slice, tile: Tile) -> Float[Tensor, "b heads rows keys"]:
    """Scaled scores of a tile, as a new tensor; 0 where the mask forbids, so that rules get finite values."""
    query = layout.query[:, :, queries]
    left, right = stacked(query, problem.num_kv_heads), layout.key[:, :, tile.keys].flatten(0, 1)
    flat = left.new_empty(*left.shape[:2], right.shape[1])
    scores = flat.baddbmm_(left, right.mT, beta=0.0, alpha=problem.scale).view(*query.shape[:3], right.shape[1])
    if tile.allowed is not None and (problem.elementwise or not layout.is_finite):
        scores.masked_fill_(~tile.allowed, 0.0)
    return scores


def ruled(problem: Problem, scores: Tensor, tile: Tile) -> Tensor:
    """The scores after the rules, in order."""
    for rule in problem.elementwise:
        scores = rule.apply(scores, *tile.indices)
    return scores


def masked(scores: Tensor, tile: Tile, value: float = -torch.inf) -> Tensor:
    """The tile with ``value`` at forbidden places."""
    return scores if tile.allowed is None else scores.masked_fill(~tile.allowed, value)


def finite(largest: Tensor) -> Tensor:
    """A running maximum or a log-sum-exp to subtract from scores: 0 for a row without keys."""
    return largest.masked_fill(largest == -torch.inf, 0.0)


def exponential(logs: Tensor) -> Tensor:
    """``exp`` in place, by torch's ``exp2``, which is faster, many times so where weights underflow."""
    return logs.mul_(_LOG2_E).exp2_()
