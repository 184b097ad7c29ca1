"""Sparse patterns of the literature, as compositions of masks by ``&`` and ``|``."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.arguments import FARTHEST, repr_of, seed_of, whole, whole_number
from clearhead.errors import ClearheadError, MaskError, ShapeError
from clearhead.masks import Blocks, Causal, Global, Mask, Strided, Window
from clearhead.masks.base import Carrying, Combined, Not, carried_sizes, index_tensors
from clearhead.masks.tile_map import EMPTY, tile_map
from clearhead.record import describe

__all__ = ["big_bird", "covered", "dilated", "longformer", "strided"]

#: Default number of positions in a block: as many columns as the CPU kernels compute at once.
BLOCK = 64


def longformer(length: int, window: int, num_global: int = 0) -> Mask:
    """Longformer's pattern: a sliding window on both sides, and global tokens at the start.

    Equal to ``Window(window // 2, window // 2) | Global(num_global)``, with a table of empty blocks for the kernels
    (``covered``). Global tokens attend to all tokens, and all tokens attend to them.

    Args:
        length: number of tokens.
        window: width of the window, half of it on each side of a token.
        num_global: number of global tokens, the first ones.

    Returns:
        A mask; combine it with ``& ch.Causal()`` for language models.

    Raises:
        ShapeError: a number is negative or not whole.

    Cost: attention under it takes ``length * (window + 2 * num_global)`` scores in place of ``length ** 2``.

    Paper: Beltagy et al. 2020, "Longformer", section 3.1.

    >>> print(longformer(6, window=2, num_global=1).picture(6, 6))
    ■■■■■■
    ■■■···
    ■■■■··
    ■·■■■·
    ■··■■■
    ■···■■
    """
    name = "longformer"
    length, half = whole(name, "length", length, low=1), whole(name, "window", window, low=0) // 2
    return covered(Window(half, half) | Global(whole(name, "num_global", num_global, low=0)), length)


def big_bird(
    length: int,
    *,
    size: int = BLOCK,
    window: int = 3,
    num_global: int = 2,
    num_random: int = 3,
    num_heads: int = 1,
    seed: int = 0,
) -> Blocks:
    """BigBird's pattern: a window, global blocks and a few random blocks for each row of blocks.

    Equal to ``Blocks((Window | Global).dense(blocks, blocks) | random, size)``, the paper's form in blocks (appendix
    D). Global blocks attend to all blocks, and all blocks attend to them.

    Args:
        length: number of tokens.
        size: tokens per block.
        window: width of the window in blocks, an odd number: ``window // 2`` blocks on each side.
        num_global: number of global blocks, the first ones.
        num_random: number of random blocks per row, drawn among those in neither window nor globals; fewer if fewer
            remain.
        num_heads: number of heads that draw different blocks; 1 if all share them.
        seed: seed of the draw; equal seeds draw equal blocks on every machine.

    Returns:
        A ``Blocks`` mask; combine it with ``& ch.Causal()`` for language models.

    Raises:
        ShapeError: a number is out of range.

    Cost: attention under it takes about ``length * size * (window + num_random + 2 * num_global)`` scores.

    Paper: Zaheer et al. 2020, "Big Bird", section 2 and appendix D; its base model has ``window=3``,
    ``num_global=2``, ``num_random=3`` and blocks of 64 (appendix E).

    >>> print(big_bird(16, size=2, num_global=1, num_random=1, seed=3).table[0, 0].int().sum(dim=1).tolist())
    [8, 4, 5, 5, 5, 5, 5, 4]
    """
    name = "big_bird"
    blocks = -(-whole(name, "length", length, low=1) // whole(name, "size", size, low=1))
    num_random, num_heads = whole(name, "num_random", num_random, low=0), whole(name, "num_heads", num_heads, low=1)
    num_global, width = whole(name, "num_global", num_global, low=0), whole_number(window)
    if width is None or not 1 <= width <= FARTHEST or width % 2 == 0:
        raise ShapeError.about(
            name,
            "window",
            must="be an odd number of blocks",
            got=repr_of(window),
            then="3 is a block with its two neighbours.",
        )
    fixed = (Window(width // 2, width // 2) | Global(num_global)).dense(blocks, blocks)
    generator = torch.Generator().manual_seed(seed_of(name, seed))
    draw = torch.rand(num_heads, blocks, blocks, generator=generator, dtype=torch.float64)
    order = draw.masked_fill(fixed, 2.0).argsort(dim=-1)[..., : min(num_random, blocks)]
    random = torch.zeros(num_heads, blocks, blocks, dtype=torch.bool).scatter_(-1, order, True)
    # A row with too few remaining blocks draws some that are in window or globals already.
    return Blocks(fixed | random, size)


def dilated(stride: int, before: int | None = None, after: int | None = 0) -> Mask:
    """Every ``stride``-th key within a window: ``Strided(stride) & Window(before * stride, after * stride)``.

    Args:
        stride: distance between two keys, 1 or more.
        before: number of such keys before the query's position; None for all.
        after: number of such keys after the query's position; None for all.

    Returns:
        A mask. Kernels skip what is outside the window but not the gaps; ``dilated_attention`` computes the same output
        and skips both.

    Raises:
        ShapeError: a number is out of range.

    Paper: Beltagy et al. 2020, "Longformer", section 3.1, "dilated sliding window".

    >>> print(dilated(2, before=2).picture(6, 6))
    ■·····
    ·■····
    ■·■···
    ·■·■··
    ■·■·■·
    ·■·■·■
    """
    return _dilated("dilated", stride, before, after)


def _dilated(function: str, stride: int, keys_before: int | None, keys_after: int | None) -> Mask:
    stride = whole(function, "stride", stride, low=1)
    keys_before = None if keys_before is None else whole(function, "before", keys_before, low=0)
    keys_after = None if keys_after is None else whole(function, "after", keys_after, low=0)
    mask: Mask = Strided(stride)
    if keys_before is not None:
        # A window without a limit after the query.
        window = Not(Causal()) | Window(keys_before * stride)
        mask = mask & (window if keys_after is None else Window(keys_before * stride, keys_after * stride))
    elif keys_after is not None:
        mask = mask & (Causal() if keys_after == 0 else Causal() | Window(0, keys_after * stride))
    return mask


def strided(stride: int) -> Mask:
    """The last ``stride`` keys and every ``stride``-th key before: ``Causal & (Window(stride - 1) | Strided(stride))``.

    Args:
        stride: 1 or more; about the square root of the length gives a cost of ``length ** 1.5``.

    Returns:
        A mask. Kernels do not skip its gaps; ``dilated_attention(stride=stride, local=stride - 1)`` computes the same
        output and skips them.

    Raises:
        ShapeError: ``stride`` is not a whole number of at least 1.

    Paper: Child et al. 2019, "Generating long sequences with sparse transformers", section 4.2, both heads in one.

    >>> print(strided(3).picture(7, 7))
    ■······
    ■■·····
    ■■■····
    ■■■■···
    ·■■■■··
    ··■■■■·
    ■··■■■■
    """
    stride = whole("strided", "stride", stride, low=1)
    return Causal() & (Window(stride - 1) | Strided(stride))


def covered(
    mask: Mask,
    q_len: int,
    k_len: int | None = None,
    *,
    query_offset: int = 0,
    size: int = BLOCK,
    batch: int | None = None,
    num_heads: int | None = None,
) -> Mask:
    """The same mask with a table of its blocks, so that kernels skip every empty one, between runs of keys too.

    ``mask & Blocks(not empty, size)``; it allows what ``mask`` allows, for the lengths it was made for.

    Args:
        mask: any mask; the same for every call it is used in.
        q_len: number of queries.
        k_len: number of keys; by default ``q_len``.
        query_offset: position of the first query, a multiple of ``size``.
        size: positions in a block.
        batch: batch size, required if a function in the mask reads batch indices; by default that of the mask's
            tensors.
        num_heads: number of heads, required if a function in the mask reads head indices; by default that of the mask's
            tensors.

    Returns:
        A mask for calls of these lengths and this offset.

    Raises:
        ShapeError: a number is out of range, the offset is no multiple of ``size``, or ``batch`` or ``num_heads`` is
            missing for a mask that differs between them.
        MaskError: during an attention call with more queries or keys than the mask was made for.

    Cost: once, ``q_len * k_len / size`` time if rows are intervals of keys, else ``q_len * k_len``; the table has
    ``q_len * k_len / size ** 2`` booleans for each batch entry and head that differ.

    >>> from clearhead.masks import Global, Window
    >>> covered(Window(64) | Global(1), 1024).right.table.float().mean().item()
    0.234375
    """
    if not isinstance(mask, Mask):
        raise MaskError.about(
            "covered", "mask", must="be a mask", got=type(mask).__name__, then="Wrap a boolean tensor in ch.Dense."
        )
    size, rows = whole("covered", "size", size, low=1), whole("covered", "q_len", q_len, low=1)
    columns = rows if k_len is None else whole("covered", "k_len", k_len, low=1)
    offset = whole("covered", "query_offset", query_offset, low=0)
    if offset % size:
        raise ShapeError.about(
            "covered",
            "query_offset",
            must=f"be a multiple of size {size}",
            got=offset,
            then="Make the mask for all queries, or choose a size that divides the offset.",
        )
    placed = mask.placed(offset)
    given = {"batch": batch, "num_heads": num_heads}
    carried = carried_sizes(mask)
    batch = carried[0] if batch is None else whole("covered", "batch", batch, low=1)
    heads = carried[1] if num_heads is None else whole("covered", "num_heads", num_heads, low=1)
    placed.check("covered", batch, heads, range(offset, offset + rows), columns)
    device = next((tensor.device for tensor in mask.tensors()), None)
    _check_sizes_given(placed, given, offset, device)
    kinds = tile_map(placed, index_tensors(batch, heads, rows, columns, offset, device), size, size)
    used = torch.nn.functional.pad(kinds != EMPTY, (0, 0, offset // size, 0))
    return mask & _Covering(used.expand(*used.shape[:2], -1, -(-columns // size)), size, offset, offset + rows, columns)


class _Covering(Blocks):
    """A table of blocks that is valid only for the queries and keys from which it was computed."""

    fields = ("table", "size", "first", "queries", "keys")

    def __init__(self, table: Tensor, size: int, first: int, queries: int, keys: int) -> None:
        super().__init__(table, size)
        self.first, self.queries, self.keys = first, queries, keys

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        super().check(function, batch, heads, q_pos, k_len)
        if k_len > self.keys or (len(q_pos) and (q_pos.start < self.first or q_pos.stop > self.queries)):
            raise MaskError.about(
                function,
                "mask",
                must=f"cover queries {q_pos.start} to {q_pos.stop - 1} and {k_len} keys",
                got=f"one that was made for queries {self.first} to {self.queries - 1} and {self.keys} keys",
                then="Make it for this call's lengths.",
            )

    def __repr__(self) -> str:
        return f"Blocks(table={describe(self.table)}, size={self.size})"


def _check_sizes_given(mask: Mask, given: dict[str, int | None], offset: int, device: torch.device | None) -> None:
    """Raise ``ShapeError`` if a function distinguishes batch entries or heads, whose number was not given."""
    if isinstance(mask, Combined):
        for part in mask.parts():
            _check_sizes_given(part, given, offset, device)
    elif not isinstance(mask, Carrying) and None in given.values():
        batch, heads = (2 if count is None else count for count in given.values())
        try:
            shape = mask.allows(*index_tensors(batch, heads, 1, 1, offset, device)).shape
        except ClearheadError:
            # The function supports one entry only, so calls have no more.
            return
        for (name, count), size in zip(given.items(), shape[:2], strict=True):
            if count is None and size > 1:
                raise ShapeError.about(
                    "covered",
                    name,
                    must="be given for a mask that reads it",
                    got=f"none, for {mask!r}",
                    then="The table of blocks has one part for each.",
                )
