"""``Mask``, the base class of masks: a predicate over absolute positions; ``& | ~`` combine masks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from clearhead.arguments import FARTHEST, repr_of, whole, whole_number
from clearhead.errors import MaskError, ShapeError
from clearhead.masks.intervals import Intervals
from clearhead.masks.picture import LARGEST, SIDE, draw
from clearhead.record import Record
from clearhead.shapes import Bool, Int

__all__ = [
    "Both",
    "Carrying",
    "Combined",
    "Either",
    "Mask",
    "Not",
    "carried_sizes",
    "conjuncts",
    "does_as",
    "index_tensors",
    "resolve_offset",
]


class Mask(Record, ABC):
    """Base class of masks: a predicate over absolute positions, and optionally its rows as intervals of keys.

    Masks combine with ``&``, ``|`` and ``~``. A subclass lists its constructor arguments in ``fields`` and defines
    ``allows``; with ``intervals`` the kernels skip keys that it forbids. It sets ``position_dependent = True`` if
    ``allows`` reads ``q_pos``, ``relative = True`` if ``allows`` depends on ``q_pos - k_pos`` alone, and
    ``head_dependent = False`` if ``allows`` does not read ``head``.
    """

    #: Reads the query's position, so ``q_len != k_len`` needs a ``query_offset``.
    position_dependent: bool = False
    #: Depends on ``q_pos - k_pos`` alone, so it is the same inside a packed document.
    relative: bool = False
    #: Reads the head. If not, a part of the heads has the same mask.
    head_dependent: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass with another predicate must not inherit what holds for its parent's predicate.
        for name in ("intervals", "relative", "head_dependent"):
            definer = next(kind for kind in cls.__mro__ if name in vars(kind))
            if getattr(definer, "allows", None) not in (cls.allows, Mask.allows):
                setattr(cls, name, vars(Mask)[name])

    @abstractmethod
    def allows(
        self,
        batch: Int[Tensor, "..."],
        head: Int[Tensor, "..."],
        q_pos: Int[Tensor, "..."],
        k_pos: Int[Tensor, "..."],
    ) -> Bool[Tensor, "..."]:
        """Whether a query may attend to a key.

        Args:
            batch: batch indices, int64 ``[batch, 1, 1, 1]``; like the other arguments, any tensor that broadcasts.
            head: head indices, ``[1, heads, 1, 1]``.
            q_pos: absolute positions of the queries, ``[1, 1, q_len, 1]``.
            k_pos: absolute positions of the keys, ``[1, 1, 1, k_len]``.

        Returns:
            Bool of the arguments' broadcast shape, or one that broadcasts to it.
        """

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals | None:
        """The intervals of keys that each query may attend to, or None if they are not known to be few.

        Args:
            batch: batch indices, ``[batch, 1, 1, 1]``.
            head: head indices, ``[1, heads, 1, 1]``.
            q_pos: absolute positions of the queries, ``[1, 1, q_len, 1]``.
            k_len: number of keys.

        Returns:
            Starts and stops, int64 ``[batch | 1, heads | 1, q_len | 1, intervals]``, or None.
        """
        return None

    def placed(self, query_offset: int) -> Mask:
        """The mask for a call whose first query is at position ``query_offset``."""
        return self

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        """Raise ``MaskError`` or ``ShapeError`` unless the mask fits a call of these sizes."""

    def __and__(self, other: Mask) -> Mask:
        return Both(self, _mask("&", other))

    def __or__(self, other: Mask) -> Mask:
        return Either(self, _mask("|", other))

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise MaskError.about(
            type(self).__name__,
            "mask",
            must="be combined with & | ~",
            got="a truth test (and, or, not, if)",
            then="Write `a & b` for `a and b`; call .dense(q_len, k_len) for the values.",
        )

    def dense(
        self,
        q_len: int,
        k_len: int,
        *,
        query_offset: int | None = None,
        batch: int | None = None,
        num_heads: int | None = None,
    ) -> Bool[Tensor, "*leading q_len k_len"]:
        """The mask as a boolean tensor, for inspection and tests.

        Args:
            q_len: number of queries.
            k_len: number of keys.
            query_offset: position of the first query; needed if ``q_len != k_len`` and the mask reads positions.
            batch: batch size; by default that of the mask's tensors, else 1.
            num_heads: number of heads; by default that of the mask's tensors, else 1.

        Returns:
            Bool ``[q_len, k_len]``, or ``[batch | 1, heads | 1, q_len, k_len]`` if batch entries or heads differ.

        Raises:
            MaskError: ``q_len != k_len``, the mask reads positions, and there is no ``query_offset``.

        Cost: ``q_len * k_len`` time and memory for each batch entry and head that differ.

        >>> from clearhead import Causal
        >>> Causal().dense(2, 2).tolist()
        [[True, False], [True, True]]
        """
        name = type(self).__name__ + ".dense"
        q_len, k_len = whole(name, "q_len", q_len, low=0), whole(name, "k_len", k_len, low=0)
        batch = None if batch is None else whole(name, "batch", batch, low=0)
        num_heads = None if num_heads is None else whole(name, "num_heads", num_heads, low=0)
        offset = resolve_offset("dense", self, q_len, k_len, query_offset)
        own_batch, own_heads = carried_sizes(self)
        placed = self.placed(offset)
        batch, num_heads = batch or own_batch, num_heads or own_heads
        placed.check("dense", batch, num_heads, range(offset, offset + q_len), k_len)
        device = next((tensor.device for tensor in self.tensors()), torch.device("cpu"))
        index = index_tensors(batch, num_heads, q_len, k_len, offset, device)
        allowed = placed.allows(*index)
        allowed = allowed.expand(*allowed.shape[:2], q_len, k_len)
        return allowed[0, 0] if allowed.shape[:2] == (1, 1) else allowed

    def own_size(self) -> tuple[int, int] | None:
        """The number of queries and keys that the mask's tensors imply, or None."""
        sizes = (part.own_size() for name in self.fields if isinstance(part := getattr(self, name), Mask))
        return next((size for size in sizes if size is not None), None)

    def picture(self, q_len: int | None = None, k_len: int | None = None) -> str:
        """The mask as text: one line per query, ``■`` where it may attend to the key, ``·`` where not.

        Args:
            q_len: number of queries; by default the size of the mask's tensors if it has any, else 8. At most 24 are
                drawn.
            k_len: number of keys, with the same default and limit.

        Returns:
            Lines of text. If batch entries or heads differ, the first is drawn and the last line says so.

        >>> from clearhead import Causal, Window
        >>> print((Causal() & Window(1)).picture(3, 3))
        ■··
        ■■·
        ·■■
        """
        own_q, own_k = self.own_size() or (SIDE, SIDE)
        q_len = whole(type(self).__name__ + ".picture", "q_len", own_q if q_len is None else q_len, low=0) or own_q
        k_len = whole(type(self).__name__ + ".picture", "k_len", own_k if k_len is None else k_len, low=0) or own_k
        batch, heads = carried_sizes(self)
        placed = self.placed(0)
        placed.check("picture", batch, heads, range(q_len), k_len)
        device = next((tensor.device for tensor in self.tensors()), torch.device("cpu"))
        corner = (min(1, batch), min(1, heads), min(q_len, LARGEST), min(k_len, LARGEST))
        allowed = placed.allows(*index_tensors(*corner, 0, device)).expand(corner)
        drawn = draw(allowed.flatten(0, 1).any(dim=0), (q_len, k_len))
        return drawn if (batch, heads) == (1, 1) else f"{drawn}\n(the first of {batch} batch x {heads} heads)"

    def __str__(self) -> str:
        return f"{self!r}\n{self.picture()}"


def does_as(value: object, kind: type, method: str = "allows") -> bool:
    """Whether a value is of a class and does not override that class's method."""
    return isinstance(value, kind) and getattr(type(value), method) is getattr(kind, method)


def _mask(operator: str, other: object) -> Mask:
    if not isinstance(other, Mask):
        raise MaskError.about(
            f"mask {operator}",
            "right side",
            must="be a mask",
            got=type(other).__name__,
            then="Wrap a boolean tensor in ch.Dense and a function in ch.MaskFunction.",
        )
    return other


def index_tensors(
    batch: int, num_heads: int, q_len: int, k_len: int, query_offset: int, device: torch.device | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four index tensors of a call, shaped to broadcast over ``[batch, heads, q_len, k_len]``."""
    return (
        torch.arange(batch, device=device).view(-1, 1, 1, 1),
        torch.arange(num_heads, device=device).view(1, -1, 1, 1),
        torch.arange(query_offset, query_offset + q_len, device=device).view(1, 1, -1, 1),
        torch.arange(k_len, device=device).view(1, 1, 1, -1),
    )


def resolve_offset(function: str, subject: object, q_len: int, k_len: int, query_offset: int | None) -> int:
    """The position of the first query, 0 by default; raises if it is missing, lengths differ and positions matter."""
    if query_offset is not None:
        if isinstance(query_offset, torch.SymInt):
            return query_offset
        offset = whole_number(query_offset)
        if offset is not None and abs(offset) <= FARTHEST:
            return offset
        must = "be a whole number" if offset is None else "lie within 2**48 of 0"
        raise ShapeError.about(
            function,
            "query_offset",
            must=must,
            got=repr_of(query_offset),
            then="It is the absolute position of the first query.",
        )
    # In this order: a comparison of symbolic sizes adds a guard to a graph.
    if getattr(subject, "position_dependent", False) and q_len != k_len:
        raise MaskError.about(
            function,
            "query_offset",
            must="be given when q_len differs from k_len and positions matter",
            got=f"q_len {q_len}, k_len {k_len}, no query_offset, under {subject!r}",
            then=f"Usual choices: 0 (first query beside first key) or {k_len - q_len} "
            "(k_len - q_len: last query beside last key).",
        )
    return 0


def carried_sizes(mask: Mask) -> tuple[int, int]:
    """The batch size and number of heads that the mask's tensors imply, 1 if they imply none."""
    batch, heads = mask.carries() if isinstance(mask, Carrying) else (1, 1)
    for name in mask.fields:
        part = getattr(mask, name)
        if isinstance(part, Mask):
            sizes = carried_sizes(part)
            batch, heads = max(batch, sizes[0]), max(heads, sizes[1])
    return batch, heads


class Carrying(Mask):
    """A mask whose tensors have a batch or head axis."""

    def carries(self) -> tuple[int, int]:
        raise NotImplementedError

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        for axis, carried, call in zip(("batch", "heads"), self.carries(), (batch, heads), strict=True):
            if carried not in (1, call):
                raise MaskError.about(
                    function,
                    "mask",
                    must=f"have {axis} 1" if call == 1 else f"have {axis} 1 or {call}",
                    got=f"{axis} {carried} in {self!r}",
                    then="Make the mask for this call's sizes.",
                )


class Combined(Mask):
    """A combination of masks, whose properties follow from those of its parts."""

    symbol: ClassVar[str]

    def parts(self) -> list[Mask]:
        return [getattr(self, name) for name in self.fields]

    @property
    def position_dependent(self) -> bool:  # type: ignore[override]
        return any(part.position_dependent for part in self.parts())

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return all(part.relative for part in self.parts())

    @property
    def head_dependent(self) -> bool:  # type: ignore[override]
        return any(part.head_dependent for part in self.parts())

    def placed(self, query_offset: int) -> Mask:
        placed = {name: getattr(self, name).placed(query_offset) for name in self.fields}
        if all(part is getattr(self, name) for name, part in placed.items()):
            return self
        copy = self.mapped(lambda tensor: tensor)
        copy.__dict__.update(placed)
        return copy

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        for part in self.parts():
            part.check(function, batch, heads, q_pos, k_len)

    def __repr__(self) -> str:
        shown = [
            f"({part!r})" if isinstance(part, Combined) and part.symbol != self.symbol else repr(part)
            for part in self.parts()
        ]
        return f" {self.symbol} ".join(shown) if len(shown) > 1 else f"{self.symbol}{shown[0]}"


class Both(Combined):
    """A mask that allows what both masks allow; written ``left & right``."""

    fields = ("left", "right")
    symbol = "&"

    def __init__(self, left: Mask, right: Mask) -> None:
        self.left, self.right = left, right

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return self.left.allows(batch, head, q_pos, k_pos) & self.right.allows(batch, head, q_pos, k_pos)

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals | None:
        left = self.left.intervals(batch, head, q_pos, k_len)
        right = self.right.intervals(batch, head, q_pos, k_len)
        return left.intersect(right) if left is not None and right is not None else None


class Either(Combined):
    """A mask that allows what at least one of two masks allows; written ``left | right``."""

    fields = ("left", "right")
    symbol = "|"

    def __init__(self, left: Mask, right: Mask) -> None:
        self.left, self.right = left, right

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return self.left.allows(batch, head, q_pos, k_pos) | self.right.allows(batch, head, q_pos, k_pos)

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals | None:
        left = self.left.intervals(batch, head, q_pos, k_len)
        right = self.right.intervals(batch, head, q_pos, k_len)
        return left.union(right) if left is not None and right is not None else None


class Not(Combined):
    """A mask that allows what another mask forbids; written ``~part``."""

    fields = ("part",)
    symbol = "~"

    def __init__(self, part: Mask) -> None:
        self.part = part

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return ~self.part.allows(batch, head, q_pos, k_pos)

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals | None:
        inner = self.part.intervals(batch, head, q_pos, k_len)
        return inner.complement(k_len) if inner is not None else None


def conjuncts(mask: Mask) -> list[Mask]:
    """The masks that ``mask`` combines by ``&``; ``[mask]`` if it is no such combination."""
    if isinstance(mask, Both):
        return [*conjuncts(mask.left), *conjuncts(mask.right)]
    return [mask]
