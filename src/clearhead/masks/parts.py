"""The parts of a mask, combined by ``&``: a band around the diagonal, intervals of keys, tables, and other masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from clearhead.masks.base import Mask, Not, conjuncts, does_as, index_tensors
from clearhead.masks.intervals import Intervals
from clearhead.masks.positional import Causal, Window
from clearhead.masks.sequences import Padding
from clearhead.masks.tables import Blocks, Dense
from clearhead.shapes import Bool, Int
from clearhead.torch_private import has_dispatch_mode, transforms

__all__ = ["STRIP", "Parts", "band_of", "compute_parts", "is_padding", "is_table", "parts_of"]

#: Places at which a mask is evaluated at once.
STRIP: Final = 2**20
#: The largest tensor of a mask whose parts are cached: comparing its elements is faster than computing the parts.
_FEW: Final = 2**16
_CPU: Final = torch.device("cpu")
_BANDS: Final = (Causal, Window)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a mask; a key is allowed if every part allows it. None or empty: there is no such part.

    Attributes:
        keys_before: keys from ``q_pos - keys_before`` on.
        keys_after: keys up to ``q_pos + keys_after``.
        intervals: intervals of keys per query.
        dense: a table of the call's queries and keys.
        blocks: a table of blocks.
        rest: masks that can only be evaluated place by place.
        k_len: number of keys of the call.
    """

    keys_before: int | None = None
    keys_after: int | None = None
    intervals: Intervals | None = None
    dense: Dense | None = None
    blocks: Blocks | None = None
    rest: tuple[Mask, ...] = ()
    k_len: int = 0

    @cached_property
    def interval_bounds(
        self,
    ) -> tuple[Int[Tensor, "batch heads q_len intervals"], Int[Tensor, "batch heads q_len intervals"]]:
        """Starts and stops of the intervals as kernels read them: int32, contiguous, clamped to ``[0, k_len]``."""
        assert self.intervals is not None
        # An interval that an intersection made empty may have any bounds.
        both = torch.broadcast_tensors(self.intervals.start, self.intervals.stop)
        start, stop = (bound.clamp(0, self.k_len).to(torch.int32).contiguous() for bound in both)
        return start, stop

    def with_table(self, table: Bool[Tensor, "batch heads q_len k_len"]) -> Parts:
        """The same parts with ``table`` in place of ``dense`` and ``rest``, from which it was computed."""
        other = replace(self, dense=Dense(table), rest=())
        if (bounds := self.__dict__.get("interval_bounds")) is not None:
            other.__dict__["interval_bounds"] = bounds
        return other

    def table(self, index: tuple[Tensor, Tensor, Tensor, Tensor]) -> Bool[Tensor, "batch heads q_len k_len"] | None:
        """``dense`` and ``rest`` as one table, or None if there are neither; an axis is 1 if its entries are equal."""
        allowed = None if self.dense is None else self.dense.allowed
        for part in self.rest:
            table = _evaluated(part, index)
            allowed = table if allowed is None else allowed & table
        return allowed


def _evaluated(part: Mask, index: tuple[Tensor, Tensor, Tensor, Tensor]) -> Bool[Tensor, "batch heads q_len k_len"]:
    """A mask evaluated at every place, a strip of rows at a time: int64 positions take 8 times the result's memory."""
    batch, head, q_pos, k_pos = index
    k_len = k_pos.shape[3]
    rows = max(1, STRIP // max(1, batch.shape[0] * head.shape[1] * k_len))
    strips = [part.allows(batch, head, strip, k_pos) for strip in q_pos.split(rows, dim=2)]
    whole = [
        strip.expand(*strip.shape[:2], positions.shape[2], k_len)
        for strip, positions in zip(strips, q_pos.split(rows, dim=2), strict=True)
    ]
    return whole[0] if len(whole) == 1 else torch.cat(whole, dim=2)


def compute_parts(
    mask: Mask | None, size: tuple[int, int, int, int], query_offset: int, device: torch.device = _CPU
) -> Parts:
    """The parts of a mask for a call of ``(batch, heads, q_len, k_len)``; ``device`` is that of its tensors.

    Cost: O(q_len) for masks whose rows are intervals, nothing for bands and tables.
    """
    if 0 in size:
        # There is no query, or no key.
        return Parts(k_len=size[3])
    bands: list[Causal | Window] = []
    intervals: Intervals | None = None
    tables: dict[type, Mask] = {}
    rest: list[Mask] = []
    index = None
    for part in conjuncts(mask) if mask is not None else ():
        kind = next((kind for kind in (Causal, Window, Dense, Blocks) if does_as(part, kind)), None)
        if isinstance(part, (Causal, Window)) and kind is not None:
            bands.append(part)
        elif kind is not None and kind not in tables:
            tables[kind] = part
        else:
            index = index or index_tensors(*size, query_offset, device)
            part_intervals = part.intervals(index[0], index[1], index[2], size[3])
            both = (
                part_intervals if part_intervals is None or intervals is None else intervals.intersect(part_intervals)
            )
            if both is None:
                rest.append(part)
            else:
                intervals = both
    keys_before, keys_after = _reach_of(bands)
    dense, blocks = tables.get(Dense), tables.get(Blocks)
    assert dense is None or isinstance(dense, Dense)
    assert blocks is None or isinstance(blocks, Blocks)
    return Parts(
        keys_before=keys_before,
        keys_after=keys_after,
        intervals=intervals,
        dense=dense,
        blocks=blocks,
        rest=tuple(rest),
        k_len=size[3],
    )


def _reach_of(bands: Sequence[Causal | Window]) -> tuple[int | None, int | None]:
    """How many keys before and after its position a query may attend to under all of these bands; None: no limit."""
    keys_before = [part.before for part in bands if isinstance(part, Window)]
    keys_after = [part.after if isinstance(part, Window) else 0 for part in bands]
    # The compiler traces no min with a default.
    return min(keys_before) if keys_before else None, min(keys_after) if keys_after else None


def band_of(mask: Mask) -> tuple[int | None, int | None] | None:
    """How many keys before and after its position a query may attend to, if the mask is a band; None for other masks.

    A band does not depend on the position of the first query, and two bands of equal reach are the same mask.

    >>> band_of(Causal() & Window(3, after=1)), band_of(Causal())
    ((3, 0), (None, 0))
    """
    parts = (mask,) if type(mask) in _BANDS else (*conjuncts(mask),)
    bands = [part for part in parts if isinstance(part, (Causal, Window)) and type(part) in _BANDS]
    return _reach_of(bands) if len(bands) == len(parts) else None


def is_padding(mask: Mask) -> bool:
    """Whether the mask is ``Padding`` or ``~Padding`` and nothing else.

    >>> is_padding(Padding([3, 2])), is_padding(~Padding([0, 1])), is_padding(Causal())
    (True, True, False)
    """
    return type(mask.part if isinstance(mask, Not) else mask) is Padding


def is_table(mask: Mask) -> bool:
    """Whether it is a table of the call's queries and keys."""
    return does_as(mask, Dense)


@dataclass(frozen=True)
class _CachedParts:
    """The parts of a mask in its last call, and copies of its tensors at that time."""

    call: tuple[tuple[int, int, int, int], int]
    tensors: tuple[Tensor, ...]
    others: list[object]
    parts: Parts


_CACHE: Final[WeakKeyDictionary[Mask, _CachedParts]] = WeakKeyDictionary()


def parts_of(
    mask: Mask | None, size: tuple[int, int, int, int], query_offset: int, device: torch.device = _CPU
) -> Parts:
    """``compute_parts``, cached for a mask that several layers share while its tensors and the sizes are equal."""
    tensors = () if mask is None else tuple(mask.tensors())
    if mask is None or not tensors or not all(map(_is_small_and_plain, tensors)):
        return compute_parts(mask, size, query_offset, device)
    cached, others = _CACHE.get(mask), _other_fields(mask)
    # The mask's tensors may have been written to since, and its fields set.
    same = cached is not None and cached.call == (size, query_offset) and cached.others == others
    if cached is not None and same and all(map(torch.equal, cached.tensors, tensors)):
        return cached.parts
    parts = compute_parts(mask, size, query_offset, device)
    # A table needs no computation; the variables that a function closes over may change between calls.
    by_intervals = parts.intervals is not None and parts.dense is None and parts.blocks is None and not parts.rest
    if by_intervals and all(isinstance(field, (int, float, str, type)) for field in others):
        _CACHE[mask] = _CachedParts((size, query_offset), tuple(tensor.clone() for tensor in tensors), others, parts)
    return parts


def _other_fields(mask: Mask) -> list[object]:
    """The classes of a mask and of the masks within it, each followed by its fields that are no tensors."""
    fields: list[object] = [type(mask)]
    for value in (getattr(mask, name) for name in mask.fields):
        if isinstance(value, Mask):
            fields += _other_fields(value)
        elif not isinstance(value, Tensor):
            fields.append(value)
    return fields


def _is_small_and_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.numel() <= _FEW
        and not (has_dispatch_mode() or transforms())
    )
