"""Layouts of a sharded sequence: which tokens each rank has, and cutting and joining tensors accordingly.

``"contiguous"`` gives rank ``r`` the tokens ``[r * n, (r + 1) * n)``. ``"zigzag"`` cuts the sequence into two chunks
for each rank and gives rank ``r`` chunks ``r`` and ``2 * ranks - 1 - r``, so that under a causal mask every rank
computes the same number of scores. A length that does not divide gives the first chunks one token more. A
``ShardLayout`` lists the chunks of each rank itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from clearhead.arguments import repr_of
from clearhead.errors import ShapeError

__all__ = [
    "LAYOUTS",
    "LayoutName",
    "ShardLayout",
    "chunks_of",
    "finish",
    "gather_parts",
    "layout_of",
    "positions_of",
    "shard",
    "start_messages",
    "unshard",
]

LayoutName: TypeAlias = Literal["contiguous", "zigzag"]
LAYOUTS: Final = ("contiguous", "zigzag")


@dataclass(frozen=True)
class ShardLayout:
    """Which tokens each rank has: any chunks that are together the sequence.

    Args:
        chunks: for each rank, ranges of positions in the order in which the rank's part of a tensor contains them.
            Together the ranges of all ranks contain every position from 0 to the sequence's length once. A rank
            without a token has no range, or empty ones.

    Raises:
        ShapeError: a position is missing or in two ranges, or a range has a step.

    Cost: O(chunks log(chunks)).

    >>> layout = ShardLayout(((range(0, 2), range(5, 6)), (range(2, 5),)))
    >>> layout.length, layout.ranks
    (6, 2)
    """

    chunks: tuple[tuple[range, ...], ...]

    def __post_init__(self) -> None:
        pieces = sorted((chunk for part in self.chunks for chunk in part if len(chunk)), key=lambda chunk: chunk.start)
        starts, stops = [chunk.start for chunk in pieces], [chunk.stop for chunk in pieces]
        if not self.chunks or any(chunk.step != 1 for chunk in pieces) or starts != [0, *stops][: len(starts)]:
            raise ShapeError.about(
                "ShardLayout",
                "chunks",
                must="contain every position of the sequence once",
                got=repr_of(self.chunks),
                then="Pass one tuple of ranges for each rank.",
            )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.chunks)

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return sum(len(chunk) for part in self.chunks for chunk in part)


def layout_of(length: int, ranks: int, layout: LayoutName | ShardLayout) -> ShardLayout:
    """A layout's chunks of every rank.

    >>> layout_of(4, 2, "zigzag").chunks
    ((range(0, 1), range(3, 4)), (range(1, 2), range(2, 3)))
    """
    return ShardLayout(tuple(chunks_of(length, ranks, rank, layout) for rank in range(ranks)))


def chunks_of(length: int, ranks: int, rank: int, layout: LayoutName | ShardLayout) -> tuple[range, ...]:
    """The positions that a rank has, as ranges in the order in which its part of a tensor contains them.

    Args:
        length: tokens of the whole sequence.
        ranks: number of ranks.
        rank: the rank, from 0.
        layout: ``"contiguous"``, ``"zigzag"`` or a ``ShardLayout``.

    Raises:
        ShapeError: a ``ShardLayout`` is for another length or another number of ranks.

    >>> chunks_of(8, 2, 0, "zigzag"), chunks_of(8, 2, 1, "zigzag")
    ((range(0, 2), range(6, 8)), (range(2, 4), range(4, 6)))
    >>> chunks_of(5, 2, 0, "contiguous")
    (range(0, 3),)
    """
    if isinstance(layout, ShardLayout):
        if (layout.length, layout.ranks) != (length, ranks):
            raise ShapeError.about(
                "ShardLayout",
                "layout",
                must=f"be for {length} tokens on {ranks} ranks",
                got=f"one for {layout.length} tokens on {layout.ranks} ranks",
                then="Make the layout for this sequence and group.",
            )
        return layout.chunks[rank]
    count = ranks if layout == "contiguous" else 2 * ranks
    size, longer = divmod(length, count)
    places = (rank,) if layout == "contiguous" else (rank, count - 1 - rank)
    starts = [place * size + min(place, longer) for place in places]
    return tuple(range(start, start + size + (place < longer)) for place, start in zip(places, starts, strict=True))


def positions_of(length: int, ranks: int, rank: int, layout: LayoutName | ShardLayout) -> Tensor:
    """The positions of a rank's tokens, int64, in the order in which its part of a tensor contains them."""
    chunks = chunks_of(length, ranks, rank, layout)
    return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks or (range(0),)])


def shard(
    tensor: Tensor, *, dim: int = -2, layout: LayoutName | ShardLayout = "contiguous", group: ProcessGroup | None = None
) -> Tensor:
    """This rank's part of a tensor that every rank has whole, cut along a sequence axis.

    Args:
        tensor: any tensor that is equal on all ranks: tokens, ids, labels or positions.
        dim: the sequence axis, by default the last but one, which is that of queries, keys and values.
        layout: ``"contiguous"``; ``"zigzag"``, which balances the work of causal masks; or a ``ShardLayout``.
        group: the process group; by default all ranks.

    Returns:
        A contiguous copy of the rank's tokens, in the order of ``layout``. Gradients flow to the rank's tokens alone.

    Raises:
        ShapeError: ``dim`` or ``layout`` is none that there is.

    Cost: no communication.
    """
    axis = _axis("shard", tensor, dim)
    check_layout("shard", layout)
    chunks = chunks_of(tensor.shape[axis], dist.get_world_size(group), dist.get_rank(group), layout)
    # A rank of a ShardLayout may have no chunk, and torch.cat needs a tensor.
    return torch.cat([tensor.narrow(axis, chunk.start, len(chunk)) for chunk in chunks or (range(0),)], dim=axis)


def unshard(
    tensor: Tensor, *, dim: int = -2, layout: LayoutName | ShardLayout = "contiguous", group: ProcessGroup | None = None
) -> Tensor:
    """The whole tensor, from the parts of all ranks; the inverse of ``shard``.

    Args:
        tensor: this rank's part; the others' may be shorter or longer along ``dim``.
        dim: the sequence axis.
        layout: the layout of the parts.
        group: the process group; by default all ranks.

    Returns:
        The whole tensor on every rank. It has no gradient: compute losses on parts.

    Raises:
        ShapeError: ``dim`` or ``layout`` is none that there is, or the parts' lengths are not those of the layout.

    Cost: one gathering of all parts.
    """
    axis = _axis("unshard", tensor, dim)
    check_layout("unshard", layout)
    ranks = dist.get_world_size(group)
    lengths = gather_lengths(tensor.shape[axis], group)
    total = sum(lengths)
    chunks = [chunks_of(total, ranks, rank, layout) for rank in range(ranks)]
    expected = [sum(map(len, pieces)) for pieces in chunks]
    if lengths != expected:
        raise ShapeError.about(
            "unshard",
            "tensor",
            must=f"have parts of the lengths {expected} of layout {repr_of(layout)}",
            got=f"lengths {lengths}",
            then="Cut the whole tensor by ch.distributed.shard.",
        )
    pieces: dict[int, Tensor] = {}
    for part, places in zip(gather_parts(tensor.detach(), axis, lengths, group), chunks, strict=True):
        for chunk, piece in zip(places, part.split([len(one) for one in places], dim=axis), strict=True):
            if len(chunk):
                pieces[chunk.start] = piece
    return torch.cat([pieces[start] for start in sorted(pieces)], dim=axis) if pieces else tensor.detach()


def gather_parts(part: Tensor, axis: int, lengths: list[int], group: ProcessGroup | None) -> list[Tensor]:
    """The parts of all ranks, whose lengths along ``axis`` may differ; without a gradient."""
    sent = part.contiguous()
    received = [sent.new_empty(*part.shape[:axis], length, *part.shape[axis + 1 :]) for length in lengths]
    received[dist.get_rank(group)] = sent
    finish(start_messages([[sent]] * len(lengths), [[one] for one in received], group))
    return received


def start_messages(
    sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]], group: ProcessGroup | None
) -> list[Any]:
    """Begin to send ``sent[rank]`` to each other rank and to receive ``received[rank]`` from it.

    ``finish`` waits for the messages. gloo's collectives take several times as long as messages from rank to rank.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    operations = []
    for step in range(1, ranks):
        receiver, sender = (rank + step) % ranks, (rank - step) % ranks
        for operation, peer, tensors in ((dist.isend, receiver, sent), (dist.irecv, sender, received)):
            number = peer if group is None else dist.get_global_rank(group, peer)
            operations += [dist.P2POp(operation, one, number, group) for one in tensors[peer] if one.numel()]
    return dist.batch_isend_irecv(operations) if operations else []


def finish(works: Sequence[Any]) -> None:
    """Wait for messages that ``start_messages`` began."""
    for work in works:
        work.wait()


def gather_lengths(length: int, group: ProcessGroup | None) -> list[int]:
    """The lengths of all ranks' parts."""
    lengths: list[int | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(lengths, length, group=group)
    return [int(one or 0) for one in lengths]


def check_layout(function: str, layout: object) -> None:
    """Raise ``ShapeError`` unless the layout is one of ``LAYOUTS`` or a ``ShardLayout``."""
    if not isinstance(layout, ShardLayout) and layout not in LAYOUTS:
        raise ShapeError.about(
            function,
            "layout",
            must="be 'contiguous', 'zigzag' or a ShardLayout",
            got=repr_of(layout),
            then="'zigzag' balances causal masks.",
        )


def _axis(function: str, tensor: Tensor, dim: int) -> int:
    if not isinstance(tensor, Tensor) or not isinstance(dim, int) or not -tensor.ndim <= dim < tensor.ndim:
        raise ShapeError.about(
            function,
            "dim",
            must="be an axis of a tensor",
            got=f"{dim!r} for {repr_of(tensor)}",
            then="Pass the sequence axis.",
        )
    return dim % tensor.ndim
