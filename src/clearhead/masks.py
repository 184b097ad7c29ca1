"""Masks: who may attend to whom, as predicates over absolute positions that know their shape.

``True`` means *may attend*. A mask defines ``allows(batch, head, q_pos, k_pos)`` over index tensors
that broadcast; where its rows are runs of keys it also says so (``intervals``). Masks combine with
``&``, ``|`` and ``~``; what a combination knows follows from its parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from clearhead.errors import ClearheadError, MaskError, ShapeError
from clearhead.intervals import Intervals
from clearhead.record import Record, as_index
from clearhead.shapes import Bool, Int

__all__ = [
    "Blocks", "Causal", "Dense", "Documents", "Global", "Mask", "MaskFunction",
    "Padding", "Prefix", "Strided", "Window",
]  # fmt: skip


class Mask(Record, ABC):
    """Base of all masks: a predicate, and what is known about its shape."""

    #: Reads the query's position, so ``q_len != k_len`` needs a ``query_offset``.
    position_dependent: bool = False
    #: Depends on ``q_pos - k_pos`` alone, so it means the same inside a packed document.
    relative: bool = False

    @abstractmethod
    def allows(
        self, batch: Int[Tensor, "..."], head: Int[Tensor, "..."], q_pos: Int[Tensor, "..."], k_pos: Int[Tensor, "..."]
    ) -> Bool[Tensor, "..."]:
        """Whether the query at ``q_pos`` may attend to the key at ``k_pos``; index tensors broadcast."""

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals | None:
        """Each row's runs of keys, or None where rows are not runs.

        ``batch [batch, 1, 1, 1]``, ``head [1, heads, 1, 1]`` and ``q_pos [1, 1, q_len, 1]`` are positions.
        """
        return None

    def placed(self, query_offset: int) -> Mask:
        """The mask for a call whose first query stands at ``query_offset``."""
        return self

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        """Raise ``MaskError`` or ``ShapeError`` unless the mask fits a call of these sizes."""

    def __and__(self, other: Mask) -> Mask:
        return _Both(self, _mask("&", other))

    def __or__(self, other: Mask) -> Mask:
        return _Either(self, _mask("|", other))

    def __invert__(self) -> Mask:
        return _Not(self)

    def __bool__(self) -> bool:
        raise MaskError.about(
            type(self).__name__, "mask", must="be combined with & | ~", got="a truth test (and, or, not, if)",
            then="Write `a & b` for `a and b`; call .dense(q_len, k_len) for the values.",
        )  # fmt: skip

    def dense(
        self, q_len: int, k_len: int, *, query_offset: int | None = None, batch: int | None = None,
        num_heads: int | None = None,
    ) -> Bool[Tensor, "*leading q_len k_len"]:  # fmt: skip
        """The mask as booleans, for looking and for tests.

        Args:
            q_len: number of queries.
            k_len: number of keys.
            query_offset: position of the first query; needed when the lengths differ and the mask reads positions.
            batch: batch size; by default what the mask itself carries, else 1.
            num_heads: number of heads; by default what the mask itself carries, else 1.

        Returns:
            Bool ``[q_len, k_len]``, or ``[batch | 1, heads | 1, q_len, k_len]`` where it differs between them.

        Raises:
            MaskError: the lengths differ and the mask reads positions, with no ``query_offset``.

        Cost: ``q_len * k_len`` time and memory per batch and head that differ.

        >>> Causal().dense(2, 2).tolist()
        [[True, False], [True, True]]
        """
        _whole(type(self).__name__ + ".dense", "q_len", q_len, low=0)
        _whole(type(self).__name__ + ".dense", "k_len", k_len, low=0)
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

    def __str__(self) -> str:
        from clearhead.picture import picture

        return f"{self!r}\n{picture(self)}"


def _whole(function: str, argument: str, value: object, *, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or value < low:
        raise ShapeError.about(
            function, argument, must=f"be a whole number of at least {low}", got=repr(value), then="Pass an int."
        )
    return int(value) if isinstance(value, int) else value  # type: ignore[return-value]


def _mask(operator: str, other: object) -> Mask:
    if not isinstance(other, Mask):
        raise MaskError.about(
            f"mask {operator}", "right side", must="be a mask", got=type(other).__name__,
            then="Wrap a boolean tensor in ch.Dense and a function in ch.MaskFunction.",
        )  # fmt: skip
    return other


def index_tensors(
    batch: int, num_heads: int, q_len: int, k_len: int, query_offset: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four index tensors of a call, shaped to broadcast over ``[batch, heads, q_len, k_len]``."""
    return (
        torch.arange(batch, device=device).view(-1, 1, 1, 1),
        torch.arange(num_heads, device=device).view(1, -1, 1, 1),
        torch.arange(query_offset, query_offset + q_len, device=device).view(1, 1, -1, 1),
        torch.arange(k_len, device=device).view(1, 1, 1, -1),
    )


def resolve_offset(
    function: str, subject: object, q_len: int, k_len: int, query_offset: int | None
) -> int:
    """Where the first query stands; refuses to guess for a position-dependent subject of unequal lengths."""
    if query_offset is not None:
        return query_offset
    if q_len != k_len and getattr(subject, "position_dependent", False):
        raise MaskError.about(
            function, "query_offset", must="be given when q_len differs from k_len and positions matter",
            got=f"q_len {q_len}, k_len {k_len}, no query_offset, under {subject!r}",
            then=f"Usual choices: 0 (first query beside first key) or {k_len - q_len} "
                 "(k_len - q_len: last query beside last key).",
        )  # fmt: skip
    return 0


def carried_sizes(mask: Mask) -> tuple[int, int]:
    """The batch size and number of heads that the mask's own tensors imply, 1 where they imply none."""
    batch, heads = mask.carries() if isinstance(mask, _Carrying) else (1, 1)
    for name in mask.fields:
        part = getattr(mask, name)
        if isinstance(part, Mask):
            sizes = carried_sizes(part)
            batch, heads = max(batch, sizes[0]), max(heads, sizes[1])
    return batch, heads


class _Carrying(Mask):
    """A mask whose tensors have batch or head axes of their own."""

    def carries(self) -> tuple[int, int]:
        raise NotImplementedError

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        for axis, own, call in zip(("batch", "heads"), self.carries(), (batch, heads), strict=True):
            if own not in (1, call):
                raise MaskError.about(
                    function, "mask", must=f"have {axis} 1 or {call}", got=f"{axis} {own} in {self!r}",
                    then="Make the mask for this call's sizes.",
                )  # fmt: skip


class Causal(Mask):
    """Each query sees its own position and those before: ``k_pos <= q_pos``.

    >>> print(Causal())
    Causal()
    ■·······
    ■■······
    ■■■·····
    ■■■■····
    ■■■■■···
    ■■■■■■··
    ■■■■■■■·
    ■■■■■■■■
    """

    position_dependent = True
    relative = True

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos <= q_pos

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals:
        return Intervals.single(torch.zeros_like(q_pos), q_pos + 1, k_len)


class Window(Mask):
    """Keys from ``q_pos - before`` to ``q_pos + after``, both ends included.

    Args:
        before: how many positions back, 0 or more.
        after: how many positions ahead, 0 or more.

    >>> Window(1).dense(3, 3).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """

    fields = ("before", "after")
    position_dependent = True
    relative = True

    def __init__(self, before: int, after: int = 0) -> None:
        self.before = _whole("Window", "before", before, low=0)
        self.after = _whole("Window", "after", after, low=0)

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (k_pos >= q_pos - self.before) & (k_pos <= q_pos + self.after)

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals:
        return Intervals.single(q_pos - self.before, q_pos + self.after + 1, k_len)


class Prefix(Mask):
    """Every query sees the first ``length`` keys; ``Causal() | Prefix(n)`` is a prefix language model.

    Args:
        length: number of keys, 0 or more.
    """

    fields = ("length",)

    def __init__(self, length: int) -> None:
        self.length = _whole("Prefix", "length", length, low=0)

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos < self.length

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals:
        zero = torch.zeros_like(q_pos)
        return Intervals.single(zero, zero + self.length, k_len)


class Padding(_Carrying):
    """Each sequence's keys end at its length: ``k_pos < lengths[batch]``.

    Args:
        lengths: int ``[batch]``, the number of real tokens of each sequence, padding to the right.

    Raises:
        ShapeError: lengths is not one axis of whole numbers, or holds a negative one.

    >>> Padding([1, 2]).dense(1, 2).tolist()
    [[[[True, False]]], [[[True, True]]]]
    """

    fields = ("lengths",)

    def __init__(self, lengths: Sequence[int] | Int[Tensor, "batch"]) -> None:
        self.lengths = _counts("Padding", "lengths", lengths)

    @classmethod
    def from_tokens(cls, real: Bool[Tensor, "batch len"]) -> Padding:
        """From booleans that say which tokens are real; they must come before all padding."""
        lengths = real.sum(dim=-1)
        if real.ndim != 2 or not bool((real[:, :-1] >= real[:, 1:]).all()):
            raise MaskError.about(
                "Padding.from_tokens", "real", must="be [batch, len] with padding only to the right",
                got=f"shape {tuple(real.shape)} with padding elsewhere", then="Use ch.Dense(real[:, None, None, :]).",
            )  # fmt: skip
        return cls(lengths)

    def carries(self) -> tuple[int, int]:
        return self.lengths.shape[0], 1

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos < self.lengths[self._row(batch)]

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals:
        stop = self.lengths[self._row(batch)]
        return Intervals.single(torch.zeros_like(stop), stop, k_len)

    def _row(self, batch: Tensor) -> Tensor:
        return batch if self.lengths.shape[0] > 1 else batch * 0

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        super().check(function, batch, heads, q_pos, k_len)
        if int(self.lengths.amax()) > k_len if self.lengths.numel() else False:
            raise ShapeError.about(
                function, "mask", must=f"have lengths of at most k_len {k_len}", got=f"{int(self.lengths.amax())}",
                then="Pass the number of real tokens of each sequence.",
            )  # fmt: skip


def _counts(function: str, argument: str, value: Sequence[int] | Tensor) -> Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.empty(0, 0)
    if tensor.numel() == 0 and tensor.ndim == 1:
        tensor = tensor.to(torch.int64)
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if tensor.ndim != 1 or not whole:
        raise ShapeError.about(
            function, argument, must="be one axis of whole numbers", got=_seen(value), then="Pass e.g. [5, 3]."
        )
    # Reading values back from an accelerator, or while tracing, would stop the work to look at them.
    if tensor.device.type == "cpu" and not torch.compiler.is_compiling() and bool((tensor < 0).any()):
        raise ShapeError.about(
            function, argument, must="not be negative", got=str(int(tensor.min())), then="Count real tokens."
        )
    return tensor.to(torch.int64)


def _seen(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return repr(value)[:80]


class Documents(_Carrying):
    """Tokens attend within their own document of a packed sequence: ``ids[q_pos] == ids[k_pos]``.

    Args:
        lengths: int ``[documents]``: how long each document is, one after the other; or
        ids: int ``[len]`` or ``[batch, len]``: which document each token is of. A negative id is padding:
            it attends to nothing and nothing attends to it.

    Raises:
        ShapeError: both or neither are given, or the numbers do not fit.

    >>> Documents(lengths=[2, 1]).dense(3, 3).int().tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """

    fields = ("ids", "contiguous")
    position_dependent = True

    def __init__(
        self, lengths: Sequence[int] | Int[Tensor, "documents"] | None = None, *, ids: Int[Tensor, "*batch len"] | None = None
    ) -> None:
        if (lengths is None) == (ids is None):
            raise ShapeError.about(
                "Documents", "lengths", must="be given, or ids, one of both",
                got="both" if ids is not None else "neither", then="Pass Documents(lengths=[5, 3]).",
            )  # fmt: skip
        if lengths is not None:
            counts = _counts("Documents", "lengths", lengths)
            numbers = torch.arange(counts.shape[0], device=counts.device)
            self.ids = torch.repeat_interleave(numbers, counts)[None]
            self.contiguous = True
        else:
            self.ids = _document_ids(ids)
            self.contiguous = _contiguous(self.ids)

    def carries(self) -> tuple[int, int]:
        return self.ids.shape[0], 1

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        row = batch if self.ids.shape[0] > 1 else batch * 0
        own, other = self.ids[row, q_pos], self.ids[row, k_pos]
        return (own == other) & (own >= 0)

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals | None:
        if not self.contiguous:
            return None
        start, stop = self.bounds()
        row = batch if self.ids.shape[0] > 1 else batch * 0
        return Intervals.single(start[row, q_pos], stop[row, q_pos], k_len)

    def bounds(self) -> tuple[Int[Tensor, "batch len"], Int[Tensor, "batch len"]]:
        """For each token, where its document starts and stops; an empty run for padding."""
        total = self.ids.shape[1]
        place = torch.arange(total, device=self.ids.device).expand_as(self.ids)
        changes = self.ids[:, 1:] != self.ids[:, :-1]
        edge = torch.ones_like(self.ids[:, :1], dtype=torch.bool)
        start = torch.where(torch.cat([edge, changes], dim=1), place, 0).cummax(dim=1).values
        last = torch.where(torch.cat([changes, edge], dim=1), place + 1, total)
        stop = last.flip(1).cummin(dim=1).values.flip(1)
        return start, torch.where(self.ids >= 0, stop, start)

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        super().check(function, batch, heads, q_pos, k_len)
        total = self.ids.shape[1]
        if k_len != total or (len(q_pos) and (q_pos.start < 0 or q_pos.stop > total)):
            raise MaskError.about(
                function, "mask", must=f"cover the call's tokens ({k_len} keys, queries {q_pos.start} to {q_pos.stop - 1})",
                got=f"{total} tokens in {self!r}", then="The documents' lengths must add up to k_len.",
            )  # fmt: skip


def _document_ids(ids: Tensor | None) -> Tensor:
    tensor = torch.as_tensor(ids)
    if tensor.ndim not in (1, 2) or tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise ShapeError.about(
            "Documents", "ids", must="be whole numbers [len] or [batch, len]", got=_seen(tensor), then="One id a token."
        )
    return tensor.to(torch.int64).reshape(-1, tensor.shape[-1])


def _contiguous(ids: Tensor) -> bool:
    """Whether every document is one run of tokens. Padding may lie anywhere."""
    for row in ids:
        runs = torch.unique_consecutive(row)
        runs = runs[runs >= 0]
        if runs.numel() != torch.unique(runs).numel():
            return False
    return True


class Global(Mask):
    """The first ``num_tokens`` positions attend everywhere and are attended by all (Longformer, BigBird).

    Args:
        num_tokens: how many, 0 or more.
    """

    fields = ("num_tokens",)
    position_dependent = True

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = _whole("Global", "num_tokens", num_tokens, low=0)

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (k_pos < self.num_tokens) | (q_pos < self.num_tokens)

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals:
        stop = torch.where(q_pos < self.num_tokens, k_len, self.num_tokens)
        return Intervals.single(torch.zeros_like(stop), stop, k_len)


class Strided(Mask):
    """Every ``stride``-th key, counted from the query's own: ``(q_pos - k_pos) % stride == 0``
    (Sparse Transformers, Child et al. 2019, section 4.2).

    Args:
        stride: 1 or more.
    """

    fields = ("stride",)
    position_dependent = True
    relative = True

    def __init__(self, stride: int) -> None:
        self.stride = _whole("Strided", "stride", stride, low=1)

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (q_pos - k_pos) % self.stride == 0


class Blocks(_Carrying):
    """Whole blocks by a table: ``table[q_pos // size, k_pos // size]``.

    Args:
        table: bool ``[q_blocks, k_blocks]``, ``[heads, ...]`` or ``[batch, heads, ...]``.
        size: positions per block, 1 or more.
    """

    fields = ("table", "size")
    position_dependent = True

    def __init__(self, table: Bool[Tensor, "*leading q_blocks k_blocks"], size: int) -> None:
        self.table = _four_axes("Blocks", "table", table)
        self.size = _whole("Blocks", "size", size, low=1)

    def carries(self) -> tuple[int, int]:
        return self.table.shape[0], self.table.shape[1]

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return _look_up(self.table, batch, head, q_pos // self.size, k_pos // self.size)

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        super().check(function, batch, heads, q_pos, k_len)
        q_reach, k_reach = self.table.shape[2] * self.size, self.table.shape[3] * self.size
        if (len(q_pos) and (q_pos.start < 0 or q_pos.stop > q_reach)) or k_len > k_reach:
            raise MaskError.about(
                function, "mask", must=f"cover queries {q_pos.start} to {q_pos.stop - 1} and {k_len} keys",
                got=f"a table that covers {q_reach} and {k_reach}", then="Add blocks or make them larger.",
            )  # fmt: skip


class Dense(_Carrying):
    """Any pattern, given as booleans: one row per query of the call, one column per key.

    Args:
        allowed: bool ``[q_len, k_len]``, ``[heads, q_len, k_len]`` or ``[batch, heads, q_len, k_len]``;
            any axis may be 1. ``True`` means may attend; torch's ``nn.MultiheadAttention`` means the opposite.
    """

    fields = ("allowed", "first")

    def __init__(self, allowed: Bool[Tensor, "*leading q_len k_len"]) -> None:
        self.allowed = _four_axes("Dense", "allowed", allowed)
        #: Position of the query that the first row is for.
        self.first = 0

    def carries(self) -> tuple[int, int]:
        return self.allowed.shape[0], self.allowed.shape[1]

    def placed(self, query_offset: int) -> Dense:
        copy = self.mapped(lambda tensor: tensor)
        copy.first = query_offset
        return copy

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return _look_up(self.allowed, batch, head, q_pos - self.first, k_pos)

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        super().check(function, batch, heads, q_pos, k_len)
        rows, columns = self.allowed.shape[2:]
        if rows not in (1, len(q_pos)) or columns not in (1, k_len):
            raise MaskError.about(
                function, "mask", must=f"have shape [..., {len(q_pos)}, {k_len}]", got=tuple(self.allowed.shape),
                then="A dense mask has one row per query of the call and one column per key.",
            )  # fmt: skip


def _four_axes(function: str, argument: str, value: Tensor) -> Tensor:
    tensor = torch.as_tensor(value)
    if tensor.dtype != torch.bool or not 2 <= tensor.ndim <= 4:
        raise MaskError.about(
            function, argument, must="be bool with 2 to 4 axes", got=_seen(tensor),
            then="True means may attend; add a float bias with ch.DenseBias.",
        )  # fmt: skip
    return tensor.reshape((1,) * (4 - tensor.ndim) + tensor.shape)


def _look_up(table: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """``table[batch, head, row, column]`` where an axis of 1 stands for every index."""
    index = [at if size > 1 else at * 0 for at, size in zip((batch, head, row, column), table.shape, strict=True)]
    return table[index[0], index[1], index[2], index[3]]


class MaskFunction(Mask):
    """A user's predicate ``fn(batch, head, q_pos, k_pos) -> bool`` over index tensors that broadcast.

    Args:
        fn: called with int64 tensors shaped to broadcast; must return bool of their broadcast shape (or less).

    >>> MaskFunction(lambda batch, head, q_pos, k_pos: (q_pos + k_pos) % 2 == 0).dense(2, 2).int().tolist()
    [[1, 0], [0, 1]]
    """

    fields = ("fn",)
    position_dependent = True

    def __init__(self, fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        if not callable(fn):
            raise MaskError.about("MaskFunction", "fn", must="be callable", got=_seen(fn), then="Pass a function.")
        self.fn = fn

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        allowed = call_user_function("MaskFunction", self.fn, MaskError, batch, head, q_pos, k_pos)
        shape = torch.broadcast_shapes(batch.shape, head.shape, q_pos.shape, k_pos.shape)
        if allowed.dtype != torch.bool or not _broadcasts(allowed.shape, shape):
            raise MaskError.about(
                "MaskFunction", "fn", must=f"return bool that broadcasts to {tuple(shape)}",
                got=f"{_seen(allowed)} from {function_name(self.fn)}", then="Combine comparisons of the arguments with & | ~.",
            )  # fmt: skip
        return allowed.reshape((1,) * (len(shape) - allowed.ndim) + allowed.shape)


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    padded = (1,) * (len(target) - len(shape)) + tuple(shape)
    return len(padded) == len(target) and all(own in (1, size) for own, size in zip(padded, target, strict=True))


def function_name(fn: Callable[..., Tensor]) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__name__))


def call_user_function(
    function: str, fn: Callable[..., Tensor], error: type[ClearheadError], *arguments: Tensor
) -> Tensor:
    """Call a user's function; what it raises or returns wrongly is reported with its name and the tile it saw."""
    try:
        result = fn(*arguments)
    except Exception as failure:
        q_pos, k_pos = arguments[-2], arguments[-1]
        raise error.about(
            function, "fn", must="run on index tensors that broadcast",
            got=f"{type(failure).__name__}: {failure} from {function_name(fn)} "
                f"on a tile of queries {tuple(q_pos.shape)} and keys {tuple(k_pos.shape)}",
            then="Use tensor operations; positions are int64 tensors.",
        ) from failure  # fmt: skip
    if not isinstance(result, Tensor):
        raise error.about(
            function, "fn", must="return a tensor", got=f"{type(result).__name__} from {function_name(fn)}",
            then="Return a tensor built from the arguments.",
        )  # fmt: skip
    return result


class _Combined(Mask):
    """What a combination knows about its parts."""

    symbol: ClassVar[str]

    def parts(self) -> list[Mask]:
        return [getattr(self, name) for name in self.fields]

    @property
    def position_dependent(self) -> bool:  # type: ignore[override]
        return any(part.position_dependent for part in self.parts())

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return all(part.relative for part in self.parts())

    def placed(self, query_offset: int) -> Mask:
        copy = self.mapped(lambda tensor: tensor)
        copy.__dict__.update({name: getattr(self, name).placed(query_offset) for name in self.fields})
        return copy

    def check(self, function: str, batch: int, heads: int, q_pos: range, k_len: int) -> None:
        for part in self.parts():
            part.check(function, batch, heads, q_pos, k_len)

    def __repr__(self) -> str:
        shown = [f"({part!r})" if isinstance(part, _Combined) and part.symbol != self.symbol else repr(part) for part in self.parts()]
        return f" {self.symbol} ".join(shown) if len(shown) > 1 else f"{self.symbol}{shown[0]}"


class _Both(_Combined):
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


class _Either(_Combined):
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


class _Not(_Combined):
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
    """The masks that ``mask`` is made of by ``&``; itself alone where it is not."""
    if isinstance(mask, _Both):
        return [*conjuncts(mask.left), *conjuncts(mask.right)]
    return [mask]
