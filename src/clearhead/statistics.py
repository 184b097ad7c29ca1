"""What can be asked about an attention besides its output, and the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from torch import Tensor

from clearhead.errors import ShapeError
from clearhead.record import as_index
from clearhead.shapes import Float, Int

__all__ = ["Observation", "Want"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Want:
    """The statistics to compute along with the output; all describe the weights before dropout.

    Args:
        lse: log-sum-exp of each row of scores, natural logarithm.
        max_score: largest score of each row.
        entropy: ``-sum p log p`` of each row, in nats.
        top_k: this many largest weights of each row, ties to the lower key index; 0 for none.
        received: attention each key receives, summed over queries.
        row_weights: ``w [batch | 1, heads | 1, n, q_len]``: for ``w @ weights``, n weighted sums over queries.
        heatmap: side of square tiles in positions, for their largest and mean weight; 0 for none.
        sink: mass on the first this many keys; 0 for none.
        distance: mean ``|q_pos - k_pos|`` of each row.
        rows: indices of queries whose exact weights are wanted, ``0 <= row < q_len``.
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

    @cached_property
    def names(self) -> frozenset[str]:
        """Which statistics are asked for."""
        asked = set()
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (isinstance(value, (bool, int)) and not value):
                asked.add(field.name)
        return frozenset(asked)

    def check(self, function: str, q_len: int, k_len: int) -> None:
        """Raise ``ShapeError`` unless each number fits a call of these lengths."""
        for name, high, meaning in (
            ("top_k", k_len, "k_len"),
            ("sink", k_len, "k_len"),
            ("heatmap", None, ""),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0 or (high is not None and value > high):
                rule = f"be a whole number from 0 to {meaning} {high}" if high is not None else "be 0 or more"
                raise ShapeError.about(function, f"want.{name}", must=rule, got=value, then="0 asks for nothing.")
        if self.rows is not None:
            rows = as_index(self.rows)
            if rows.ndim != 1 or (rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= q_len)):
                raise ShapeError.about(
                    function, "want.rows", must=f"be query indices from 0 to {q_len - 1}", got=rows.tolist(),
                    then="Rows are counted within the call, not by absolute position.",
                )  # fmt: skip
        weights = self.row_weights
        if weights is not None and (weights.ndim != 4 or weights.shape[-1] != q_len):
            raise ShapeError.about(
                function, "want.row_weights", must=f"have shape [batch | 1, heads | 1, n, {q_len}]",
                got=tuple(weights.shape), then="One weight per query.",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """The output of an attention and the statistics that were asked for; the others are None.

    Leading axes are as in the call, so a call on ``[len, head_dim]`` gives statistics without batch and heads.
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
        """The same with only ``axes`` of the leading batch and heads axes left (0, 1 or 2)."""
        squeezed = {}
        for field in fields(self):
            value: Tensor | None = getattr(self, field.name)
            squeezed[field.name] = value if value is None else value.reshape(value.shape[2 - axes :])
        return Observation(**squeezed)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        known = [(field.name, getattr(self, field.name)) for field in fields(self)]
        shown = ", ".join(f"{name}={list(value.shape)}" for name, value in known if value is not None)
        return f"Observation({shown})"
