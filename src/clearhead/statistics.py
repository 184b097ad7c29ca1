"""Statistics of attention: ``Want`` names those to compute, ``Observation`` contains them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, Final

import torch
from torch import Tensor

from clearhead.arguments import repr_of, tensor_of, whole_number
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.record import Record
from clearhead.shapes import Float, Int

__all__ = ["UNDIFFERENTIABLE", "Observation", "Want", "check_want"]

#: Fields of an observation that have no gradient.
UNDIFFERENTIABLE: Final = ("top_indices", "top_weights", "heatmap_max", "heatmap_mean")


@dataclass(frozen=True, kw_only=True, eq=False)
class Want(Record):
    """The statistics to compute along with the output; all describe the weights before dropout, per query head.

    For a query that may attend to no key, ``lse`` and ``max_score`` are -inf and the other statistics 0. If a row of
    scores contains NaN, its weights are NaN at the keys that it may attend to and 0 at forbidden keys. A ``ch.Sink`` is
    part of ``lse`` and of no other statistic.

    Gradients: ``lse``, ``max_score``, ``entropy``, ``received``, ``sink`` and ``distance`` are differentiable on every
    backend with gradients; ``row_weights`` (with respect to ``w`` too) and ``rows`` on ``reference`` and ``tiled``;
    ``top_k`` and ``heatmap`` have no gradient.

    Args:
        lse: whether to compute the log-sum-exp of each row of scores (natural logarithm).
        max_score: whether to compute the largest score of each row; ties share its gradient evenly.
        entropy: whether to compute ``-sum p log p`` of each row over its keys, in nats.
        top_k: how many of the largest weights of each row to return, at most ``k_len``; 0 for none. Of equal weights
            the lower key index comes first; keys of weight 0 come last, in the order of their indices.
        received: whether to compute the attention that each key receives, summed over queries.
        row_weights: float ``w [batch | 1, heads | 1, n, q_len]`` for ``w @ weights``, n weighted sums over queries;
            None for none.
        heatmap: side of square tiles, counted in queries and keys of the call, for the largest and mean weight of each
            tile; 0 for none. Forbidden places count in the mean; tiles at the end average over fewer places.
        sink: number of first keys for which to compute the sum of the weights, at most ``k_len``; 0 for none.
        distance: whether to compute the mean distance of each row, ``sum p |q_pos - k_pos|``.
        rows: indices of queries whose weights to return, ``0 <= row < q_len``, in any order, repeated or not; None for
            none.

    >>> Want(entropy=True, top_k=4).shapes(q_len=10, k_len=12)
    {'entropy': (10,), 'top_indices': (10, 4), 'top_weights': (10, 4)}
    """

    lse: bool = False
    max_score: bool = False
    entropy: bool = False
    top_k: int = 0
    received: bool = False
    row_weights: Float[Tensor, "batch heads n q_len"] | None = None
    heatmap: int = 0
    sink: int = 0
    distance: bool = False
    rows: Sequence[int] | Int[Tensor, " rows"] | None = None

    fields: ClassVar[tuple[str, ...]] = (
        "lse", "max_score", "entropy", "top_k", "received", "row_weights", "heatmap", "sink", "distance", "rows",
    )  # fmt: skip

    def __post_init__(self) -> None:
        # As ints of Python, which can be encoded as a text.
        for name in ("top_k", "heatmap", "sink"):
            value = getattr(self, name)
            if type(value) is not int and (integer := whole_number(value)) is not None:
                object.__setattr__(self, name, integer)
        if isinstance(self.rows, (list, tuple, range)):
            object.__setattr__(self, "rows", _plain(self.rows))

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the requested statistics."""
        return frozenset(self._asked())

    def _asked(self) -> list[str]:
        # Not cached: the compiler cannot trace a lock, and a cached property takes one.
        given = [(name, getattr(self, name)) for name in self.fields]
        return [name for name, value in given if not (value is None or (isinstance(value, (bool, int)) and not value))]

    def shapes(self, q_len: int, k_len: int) -> dict[str, tuple[int, ...]]:
        """The fields of the ``Observation`` that are not None, with their shapes after batch and heads.

        Args:
            q_len: number of queries.
            k_len: number of keys.
        """
        top, side = (q_len, self.top_k), max(1, self.heatmap)
        cells = (-(-q_len // side), -(-k_len // side))
        mixed = 0 if self.row_weights is None else self.row_weights.shape[2]
        rows = 0 if self.rows is None else len(self.rows)
        every = {
            "lse": (q_len,), "max_score": (q_len,), "entropy": (q_len,), "top_indices": top, "top_weights": top,
            "received": (k_len,), "row_weights": (mixed, k_len), "heatmap_max": cells, "heatmap_mean": cells,
            "sink": (q_len,), "distance": (q_len,), "rows": (rows, k_len),
        }  # fmt: skip
        asked = {one for name in self._asked() for one in _ANSWERS.get(name, (name,))}
        return {name: shape for name, shape in every.items() if name in asked}

    def rows_on(self, device: torch.device) -> Int[Tensor, " rows"]:
        """``rows`` as an int64 tensor on a device; empty if there are none."""
        return _as_rows(() if self.rows is None else self.rows).to(device, torch.int64)

    def check(self, function: str, sizes: tuple[int, int, int, int]) -> None:
        """Raise ``ShapeError`` unless every statistic fits a call of ``(batch, heads, q_len, k_len)``."""
        batch, heads, q_len, k_len = sizes
        self._check_scalars(function, k_len)
        if self.rows is not None:
            _check_rows(function, self.rows, q_len)
        if self.row_weights is not None:
            _check_row_weights(function, self.row_weights, (batch, heads, q_len))

    def _check_scalars(self, function: str, k_len: int) -> None:
        for name in ("lse", "max_score", "entropy", "received", "distance"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ShapeError.about(
                    function, f"want.{name}", must="be True or False", got=repr_of(value), then="True asks for it."
                )
        for name, high in (("top_k", k_len), ("sink", k_len), ("heatmap", None)):
            value = getattr(self, name)
            number = isinstance(value, int) and not isinstance(value, bool)
            if not number or value < 0 or (high is not None and value > high):
                rule = "be 0 or more, a whole number" if high is None else f"be a whole number from 0 to k_len {high}"
                raise ShapeError.about(
                    function, f"want.{name}", must=rule, got=repr_of(value), then="0 asks for nothing."
                )


#: Statistics with two fields in an observation.
_ANSWERS: Final = {"top_k": ("top_indices", "top_weights"), "heatmap": ("heatmap_max", "heatmap_mean")}


def check_want(function: str, want: object) -> None:
    """Raise unless ``want`` is a ``Want``."""
    if not isinstance(want, Want):
        raise UnsupportedError.about(
            function, "want", must="be a ch.Want", got=type(want).__name__, then="Pass ch.Want(lse=True)."
        )


def _plain(given: Sequence[int]) -> Sequence[int]:
    """Whole numbers as a list of Python ints; anything else unmodified."""
    integers = [whole_number(one) for one in given]
    return given if None in integers else integers  # type: ignore[return-value]


def _as_rows(given: Sequence[int] | Tensor) -> Tensor:
    return given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")


def _check_rows(function: str, given: Sequence[int] | Tensor, q_len: int) -> None:
    must = f"be query indices from 0 to {q_len - 1}" if q_len else "be empty where there are no queries"
    rows = given if isinstance(given, Tensor) else tensor_of(given, device="cpu")
    whole = rows is not None and (rows.numel() == 0 or not (rows.is_floating_point() or rows.dtype == torch.bool))
    if rows is None or not whole or rows.is_complex() or rows.ndim != 1 or rows.is_meta:
        got = repr_of(given if rows is None else rows) + (" on meta" if rows is not None and rows.is_meta else "")
        raise ShapeError.about(function, "want.rows", must=must, got=got, then="Pass a list of whole numbers.")
    rows = rows.to(torch.int64)
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= q_len):
        outside = rows[(rows < 0) | (rows >= q_len)]
        raise ShapeError.about(
            function,
            "want.rows",
            must=must,
            got=outside[:8].tolist(),
            then="Rows are indices of the call's queries, not absolute positions.",
        )


def _check_row_weights(function: str, weights: Tensor, sizes: tuple[int, int, int]) -> None:
    batch, heads, q_len = sizes
    shape = f"[{batch} or 1, {heads} or 1, n, {q_len}]" if batch != 1 or heads != 1 else f"[1, 1, n, {q_len}]"
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        got = str(weights.dtype).removeprefix("torch.") if isinstance(weights, Tensor) else type(weights).__name__
        raise ShapeError.about(
            function,
            "want.row_weights",
            must=f"be a floating point tensor {shape}",
            got=got,
            then="Convert with .float().",
        )
    fits = weights.ndim == 4 and weights.shape[0] in (1, batch) and weights.shape[1] in (1, heads)
    if not fits or weights.shape[3] != q_len:
        raise ShapeError.about(
            function,
            "want.row_weights",
            must=f"have shape {shape}",
            got=tuple(weights.shape),
            then="Give n rows of one weight per query.",
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """The output of attention and the requested statistics; the others are None.

    The leading axes ``[batch, heads]`` are those of the call's query: a call on ``[len, head_dim]`` gives statistics
    without them.

    Attributes:
        output: ``[batch, heads, q_len, value_dim]``.
        lse: log-sum-exp of each row of scores, ``[batch, heads, q_len]``.
        max_score: largest score of each row, ``[batch, heads, q_len]``.
        entropy: entropy of each row in nats, ``[batch, heads, q_len]``.
        top_indices: key indices of the largest weights of each row, int64 ``[batch, heads, q_len, top_k]``.
        top_weights: these weights, largest first, ``[batch, heads, q_len, top_k]``.
        received: attention that each key receives, ``[batch, heads, k_len]``.
        row_weights: weighted sums of rows, ``[batch, heads, n, k_len]``.
        heatmap_max: largest weight of each tile, ``[batch, heads, ceil(q_len / side), ceil(k_len / side)]``.
        heatmap_mean: mean weight of each tile, in the shape of ``heatmap_max``.
        sink: sum of the weights of the first keys of each row, ``[batch, heads, q_len]``.
        distance: mean distance of each row, ``[batch, heads, q_len]``.
        rows: weights of the requested rows, ``[batch, heads, rows, k_len]``.
    """

    output: Float[Tensor, "*leading q_len value_dim"]
    lse: Float[Tensor, "*leading q_len"] | None = None
    max_score: Float[Tensor, "*leading q_len"] | None = None
    entropy: Float[Tensor, "*leading q_len"] | None = None
    top_indices: Int[Tensor, "*leading q_len k"] | None = None
    top_weights: Float[Tensor, "*leading q_len k"] | None = None
    received: Float[Tensor, "*leading k_len"] | None = None
    row_weights: Float[Tensor, "*leading n k_len"] | None = None
    heatmap_max: Float[Tensor, "*leading q_tiles k_tiles"] | None = None
    heatmap_mean: Float[Tensor, "*leading q_tiles k_tiles"] | None = None
    sink: Float[Tensor, "*leading q_len"] | None = None
    distance: Float[Tensor, "*leading q_len"] | None = None
    rows: Float[Tensor, "*leading rows k_len"] | None = None

    def with_leading(self, axes: int) -> Observation:
        """The same observation with only the last ``axes`` of the leading axes batch and heads (0, 1 or 2)."""
        squeezed = {}
        for field in fields(self):
            value: Tensor | None = getattr(self, field.name)
            squeezed[field.name] = value if value is None else value.reshape(value.shape[2 - axes :])
        return Observation(**squeezed)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        shown = ", ".join(f"{name}={list(value.shape)}" for name, value in values if value is not None)
        return f"Observation({shown})"
