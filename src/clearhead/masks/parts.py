"""A mask taken apart by ``&``: a band around the diagonal, runs of keys, tables, and what is none of these."""

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

__all__ = ["Parts", "band_of", "is_padding", "is_table", "parts_of", "take_apart"]

#: Places of a mask that are asked at once.
_STRIP: Final = 2**20
#: Numbers of a mask that are compared sooner than worked on again.
_FEW: Final = 2**16
_CPU: Final = torch.device("cpu")
_BANDS: Final = (Causal, Window)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What must allow a key, all of it; None and nothing where there is no such part.

    Attributes:
        before: keys from ``q_pos - before`` on.
        after: keys up to ``q_pos + after``.
        runs: runs of keys per query.
        dense: a table of the call's queries and keys.
        blocks: a table of blocks.
        rest: masks that can only be asked place by place.
        k_len: keys of the call.
    """

    before: int | None = None
    after: int | None = None
    runs: Intervals | None = None
    dense: Dense | None = None
    blocks: Blocks | None = None
    rest: tuple[Mask, ...] = ()
    k_len: int = 0

    @cached_property
    def edges(self) -> tuple[Int[Tensor, "batch heads q_len runs"], Int[Tensor, "batch heads q_len runs"]]:
        """Starts and stops of the runs as kernels read them: int32, contiguous, within the keys."""
        assert self.runs is not None
        # A run that intersection emptied may lie anywhere.
        both = torch.broadcast_tensors(self.runs.start, self.runs.stop)
        start, stop = (edge.clamp(0, self.k_len).to(torch.int32).contiguous() for edge in both)
        return start, stop

    def with_table(self, table: Bool[Tensor, "batch heads q_len k_len"]) -> Parts:
        """The same with ``table`` in place of ``dense`` and ``rest``, which it was made from."""
        other = replace(self, dense=Dense(table), rest=())
        if (edges := self.__dict__.get("edges")) is not None:
            other.__dict__["edges"] = edges
        return other

    def table(self, index: tuple[Tensor, Tensor, Tensor, Tensor]) -> Bool[Tensor, "batch heads q_len k_len"] | None:
        """``dense`` and ``rest`` as one table, None where there are neither; axes of 1 where all are alike."""
        allowed = None if self.dense is None else self.dense.allowed
        for part in self.rest:
            own = _asked(part, index)
            allowed = own if allowed is None else allowed & own
        return allowed


def _asked(part: Mask, index: tuple[Tensor, Tensor, Tensor, Tensor]) -> Bool[Tensor, "batch heads q_len k_len"]:
    """A mask place by place, some rows at a time: positions take eight times the answer's room."""
    batch, head, q_pos, k_pos = index
    k_len = k_pos.shape[3]
    rows = max(1, _STRIP // max(1, batch.shape[0] * head.shape[1] * k_len))
    strips = [part.allows(batch, head, strip, k_pos) for strip in q_pos.split(rows, dim=2)]
    whole = [
        strip.expand(*strip.shape[:2], positions.shape[2], k_len)
        for strip, positions in zip(strips, q_pos.split(rows, dim=2), strict=True)
    ]
    return whole[0] if len(whole) == 1 else torch.cat(whole, dim=2)


def take_apart(
    mask: Mask | None, size: tuple[int, int, int, int], query_offset: int, device: torch.device = _CPU
) -> Parts:
    """The parts of a mask for a call of ``(batch, heads, q_len, k_len)``; ``device`` is where its tensors are.

    Cost: O(q_len) for masks whose rows are runs, nothing for bands and tables.
    """
    if 0 in size:
        # No query asks, or no key could be allowed.
        return Parts(k_len=size[3])
    bands: list[Causal | Window] = []
    runs: Intervals | None = None
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
            own = part.intervals(index[0], index[1], index[2], size[3])
            both = own if own is None or runs is None else runs.intersect(own)
            if both is None:
                rest.append(part)
            else:
                runs = both
    before, after = _reach_of(bands)
    dense, blocks = tables.get(Dense), tables.get(Blocks)
    assert dense is None or isinstance(dense, Dense)
    assert blocks is None or isinstance(blocks, Blocks)
    return Parts(before=before, after=after, runs=runs, dense=dense, blocks=blocks, rest=tuple(rest), k_len=size[3])


def _reach_of(bands: Sequence[Causal | Window]) -> tuple[int | None, int | None]:
    """How far back and ahead all of these let a query see; None for as far as there are keys."""
    before = [part.before for part in bands if isinstance(part, Window)]
    after = [part.after if isinstance(part, Window) else 0 for part in bands]
    # The compiler traces no min with a default.
    return min(before) if before else None, min(after) if after else None


def band_of(mask: Mask) -> tuple[int | None, int | None] | None:
    """How far back and ahead a mask lets a query see that is a band and nothing else; None of any other.

    Such a mask says the same wherever a call's first query stands, and two that reach as far are one.

    >>> band_of(Causal() & Window(3, after=1)), band_of(Causal())
    ((3, 0), (None, 0))
    """
    parts = (mask,) if type(mask) in _BANDS else (*conjuncts(mask),)
    bands = [part for part in parts if isinstance(part, (Causal, Window)) and type(part) in _BANDS]
    return _reach_of(bands) if len(bands) == len(parts) else None


def is_padding(mask: Mask) -> bool:
    """Whether it says which keys are real, one run of each sequence, and nothing else.

    >>> is_padding(Padding([3, 2])), is_padding(~Padding([0, 1])), is_padding(Causal())
    (True, True, False)
    """
    return type(mask.part if isinstance(mask, Not) else mask) is Padding


def is_table(mask: Mask) -> bool:
    """Whether it is a table of the call's queries and keys."""
    return does_as(mask, Dense)


@dataclass(frozen=True)
class _Known:
    """What a mask came to in its last call, and the numbers that it held then."""

    call: tuple[tuple[int, int, int, int], int]
    numbers: tuple[Tensor, ...]
    others: list[object]
    parts: Parts


_KNOWN: Final[WeakKeyDictionary[Mask, _Known]] = WeakKeyDictionary()


def parts_of(
    mask: Mask | None, size: tuple[int, int, int, int], query_offset: int, device: torch.device = _CPU
) -> Parts:
    """``take_apart``, remembered for a mask that the layers of a model share, while its numbers and the call's sizes
    stay as they are."""
    tensors = () if mask is None else tuple(mask.tensors())
    if mask is None or not tensors or not all(map(_is_small_and_plain, tensors)):
        return take_apart(mask, size, query_offset, device)
    known, others = _KNOWN.get(mask), _other_fields(mask)
    # Somebody may have written into a mask's tensors since, or set its fields.
    same = known is not None and known.call == (size, query_offset) and known.others == others
    if known is not None and same and all(map(torch.equal, known.numbers, tensors)):
        return known.parts
    parts = take_apart(mask, size, query_offset, device)
    # Tables are read where they lie, and what a function closes over may be another number next time.
    by_runs = parts.runs is not None and parts.dense is None and parts.blocks is None and not parts.rest
    if by_runs and all(isinstance(field, (int, float, str, type)) for field in others):
        _KNOWN[mask] = _Known((size, query_offset), tuple(tensor.clone() for tensor in tensors), others, parts)
    return parts


def _other_fields(mask: Mask) -> list[object]:
    """What a mask and the masks within it hold beside tensors, each behind its kind."""
    found: list[object] = [type(mask)]
    for value in (getattr(mask, name) for name in mask.fields):
        if isinstance(value, Mask):
            found += _other_fields(value)
        elif not isinstance(value, Tensor):
            found.append(value)
    return found


def _is_small_and_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.numel() <= _FEW
        and not (has_dispatch_mode() or transforms())
    )
