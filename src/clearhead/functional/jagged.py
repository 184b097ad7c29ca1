"""Jagged nested tensors: how they become packed sequences or a padded batch, and become jagged again.

Attention runs on packed sequences where it depends on the distance between tokens alone, and on a padded batch
otherwise. Positions are those within each sequence in both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.arguments import dense, repr_of
from clearhead.errors import MaskError, ShapeError, UnsupportedError
from clearhead.masks import Dense, Documents, Mask, Padding
from clearhead.masks.sequences import Ragged
from clearhead.record import Record
from clearhead.scores import DenseBias, ScoreRule, as_rules
from clearhead.shapes import Bool, Int

__all__ = [
    "JaggedAttention",
    "JaggedLayout",
    "check_offset",
    "check_sequences",
    "confined",
    "is_jagged",
    "may_pack",
    "refuse_tables",
]


def is_jagged(x: object) -> bool:
    """Whether ``x`` is a nested tensor with ``layout=torch.jagged``."""
    return isinstance(x, Tensor) and x.layout is torch.jagged


@dataclass(frozen=True, eq=False)
class JaggedLayout:
    """Where the sequences of a jagged tensor ``[batch, ..., jagged len, width]`` lie among its values.

    Attributes:
        offsets: the tensor's own ``[batch + 1]``, which the results share, so that torch adds one to the other.
    """

    offsets: Int[Tensor, " boundaries"]

    @classmethod
    def of(cls, function: str, argument: str, x: Tensor) -> JaggedLayout:
        """The layout of a jagged tensor.

        Raises:
            ShapeError: another axis is the jagged one, or there are fewer than three.
            UnsupportedError: the tensor is not jagged, or skips some of its values.
        """
        if not is_jagged(x):
            raise UnsupportedError.about(
                function,
                argument,
                must="be jagged where another is",
                got=repr_of(x),
                then="torch.nested.nested_tensor(sequences, layout=torch.jagged) makes it.",
            )
        if x.ndim < 3 or isinstance(x.shape[-2], int):
            raise ShapeError.about(
                function,
                argument,
                must="have its jagged axis before the last, [batch, ..., len, width]",
                got=f"shape {tuple(map(str, x.shape))}".replace("'", ""),
                then="Heads come before it: x.unflatten(-1, (heads, -1)).transpose(1, 2).",
            )
        if x.lengths() is not None:
            raise UnsupportedError.about(
                function,
                argument,
                must="have no gaps between its sequences",
                got="a jagged tensor with lengths",
                then="Copy it with .contiguous().",
            )
        return cls(x.offsets())

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """How many tokens each sequence has."""
        return self.offsets.diff()

    @property
    def longest(self) -> int:
        """The largest of the lengths."""
        return int(self.lengths.max()) if self.offsets.shape[0] > 1 else 0

    def equals(self, other: JaggedLayout) -> bool:
        """Whether the sequences have the same lengths."""
        return self.offsets is other.offsets or torch.equal(self.offsets, other.offsets)

    def laid_out(self, x: Tensor, *, packed: bool) -> Tensor:
        """A jagged tensor packed as ``[1, ..., total, width]``, or padded as ``[batch, ..., longest, width]``."""
        values = x.values()
        if packed:
            return values[None]
        tokens = values.movedim(-2, 0)
        real = self.real()
        padded = tokens.new_zeros((*real.shape, *tokens.shape[1:])).index_put((real,), tokens)
        return padded.movedim(1, -2)

    def restored(self, x: Tensor, *, packed: bool) -> Tensor:
        """The jagged tensor of what ``laid_out`` gave, or of a result with the same tokens."""
        values = x[0] if packed else x.movedim(-2, 1)[self.real()].movedim(0, -2)
        return torch.nested.nested_tensor_from_jagged(values, self.offsets, jagged_dim=x.ndim - 2)

    def real(self) -> Bool[Tensor, "batch longest"]:
        """Which places of a padded batch hold a token."""
        return torch.arange(self.longest, device=self.offsets.device) < self.lengths[:, None]


def check_sequences(
    function: str, argument: str, queries: JaggedLayout, keys: JaggedLayout, values: JaggedLayout
) -> None:
    """Raise unless there is a sequence of keys, named ``argument``, for each of queries, and a value for each key."""
    for name, layout, must, fits in (
        (argument, keys, "have as many sequences as the queries", keys.offsets.shape == queries.offsets.shape),
        ("value", values, "have the lengths of key's sequences", values.equals(keys)),
    ):
        if not fits:
            raise ShapeError.about(
                function,
                name,
                must=must,
                got=f"lengths {layout.lengths.tolist()}"[:80],
                then="Make them of the same offsets.",
            )


def may_pack(
    mask: Mask | None, rules: Iterable[ScoreRule], queries: JaggedLayout, keys: JaggedLayout, query_offset: int | None
) -> bool:
    """Whether attention of packed sequences under ``confined`` is attention of each sequence alone."""
    rules = tuple(rules)
    if queries.equals(keys) and not query_offset:
        return (mask is None or mask.relative) and all(rule.relative for rule in rules)
    # Sequences of different lengths have no common distance between the packed positions.
    return mask is None and not any(rule.position_dependent or not rule.relative for rule in rules)


def confined(mask: Mask | None, queries: JaggedLayout, keys: JaggedLayout, *, packed: bool) -> Mask:
    """``mask`` within each sequence."""
    sequences: Mask
    if not packed:
        sequences = Padding(keys.lengths)
    elif queries.equals(keys):
        sequences = Documents(lengths=queries.lengths)
    else:
        sequences = Ragged(queries.offsets.to(torch.int64), keys.offsets.to(torch.int64))
    return sequences if mask is None else sequences & mask


def refuse_tables(function: str, mask: object, rules: Iterable[ScoreRule]) -> None:
    """Raise for a table of queries and keys, which every sequence would need one of."""
    for argument, value in (("mask", mask), *(("scores", rule) for rule in rules)):
        if isinstance(value, Record) and _holds_table(value):
            raise UnsupportedError.about(
                function,
                argument,
                must="hold no table of queries and keys where tensors are jagged",
                got=f"{value!r}"[:120],
                then="Use ch.Causal, ch.Window, ch.MaskFunction or another predicate of positions in a sequence.",
            )


def _holds_table(record: Record) -> bool:
    if isinstance(record, (Dense, DenseBias)):
        return True
    return any(isinstance(part, Record) and _holds_table(part) for part in map(record.__dict__.get, record.fields))


def check_offset(function: str, parts: Iterable[object], query_offset: int | None, *, placed: bool = False) -> None:
    """Raise if one of the mask and rules reads positions, or they are ``placed``, and nothing says where the queries
    of sequences stand that are not as long as their keys."""
    if query_offset is None and (placed or any(getattr(part, "position_dependent", False) for part in parts)):
        raise MaskError.about(
            function,
            "query_offset",
            must="be given when the lengths of query and key differ and positions matter",
            got="none, for jagged tensors of different lengths",
            then="0 places each sequence's first query beside its first key.",
        )


@dataclass(frozen=True, eq=False)
class JaggedAttention:
    """A call of attention with jagged tensors, as a call with dense ones.

    Attributes:
        tensors: query, key and value.
        options: the mask, the rules and the offset.
        layout: of the queries.
        packed: whether the tensors are packed, or else padded.
    """

    tensors: tuple[Tensor, ...]
    options: dict[str, Any]
    layout: JaggedLayout
    packed: bool

    @classmethod
    def of(
        cls,
        function: str,
        tensors: tuple[Tensor, Tensor, Tensor],
        mask: Mask | None,
        scores: ScoreRule | Iterable[ScoreRule] | None,
        query_offset: int | None,
    ) -> JaggedAttention:
        """Read a call with ``[batch, heads, jagged len, dim]`` or ``[batch, jagged len, dim]``."""
        names = ("query", "key", "value")
        for name, tensor in zip(names, tensors, strict=True):
            if not is_jagged(tensor):
                dense(function, name, tensor)
        layouts = [JaggedLayout.of(function, *each) for each in zip(names, tensors, strict=True)]
        queries, keys, values = layouts
        check_sequences(function, "key", queries, keys, values)
        if mask is not None and not isinstance(mask, Mask):
            raise MaskError.about(
                function, "mask", must="be a mask", got=type(mask).__name__, then="Use ch.Causal() and others."
            )
        rules = as_rules(function, scores)
        refuse_tables(function, mask, rules)
        if not queries.equals(keys):
            check_offset(function, (mask, *rules), query_offset)
        packed = may_pack(mask, rules, queries, keys, query_offset)
        laid = (
            _by_head(layout.laid_out(tensor, packed=packed), tensor)
            for layout, tensor in zip(layouts, tensors, strict=True)
        )
        options = {
            "mask": confined(mask, queries, keys, packed=packed),
            "scores": rules,
            "query_offset": 0 if packed else query_offset or 0,
        }
        return cls(tuple(laid), options, queries, packed)

    def restored(self, output: Tensor, query: Tensor) -> Tensor:
        """The jagged output, with query's axes."""
        return self.layout.restored(output if query.ndim == 4 else output[:, 0], packed=self.packed)


def _by_head(laid: Tensor, tensor: Tensor) -> Tensor:
    """With an axis of one head, where the jagged tensor has none."""
    return laid if tensor.ndim == 4 else laid[:, None]
