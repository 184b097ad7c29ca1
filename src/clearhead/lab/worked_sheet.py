"""The worksheet of the worked example: the request, checked and converted to tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.errors import ShapeError
from clearhead.masks import Causal, Dense, Mask
from clearhead.nn import MultiHeadAttention
from clearhead.shapes import Bool, Float

__all__ = ["LIMITS", "WEIGHTS", "Worksheet"]

FUNCTION: Final = "worked example"
WEIGHTS: Final = ("W_q", "W_k", "W_v")
BIASES: Final = ("b_q", "b_k", "b_v")
#: Largest number of tokens, width of a token, width of all heads, and absolute value.
LIMITS: Final = {"tokens": 12, "width": 8, "columns": 8, "number": 1e6}


@dataclass(frozen=True, kw_only=True, eq=False)
class Worksheet:
    """All editable values, in float64.

    Attributes:
        X: tokens, ``[tokens, width]``.
        weights: ``W_q``, ``W_k`` and ``W_v``, ``[width, heads * head_dim]``.
        biases: ``b_q``, ``b_k`` and ``b_v``, ``[heads * head_dim]``; empty without biases.
        allowed: which query (row) may attend to which key (column).
        own_scale: factor of scores, or None for ``1 / sqrt(head_dim)``.
        heads: number of heads.
    """

    X: Float[Tensor, "tokens width"]
    weights: Mapping[str, Float[Tensor, "width columns"]]
    biases: Mapping[str, Float[Tensor, " columns"]]
    allowed: Bool[Tensor, "tokens tokens"]
    own_scale: float | None
    heads: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Worksheet:
        """The worksheet of a request.

        Raises:
            ShapeError: a number is invalid, or a table has another shape; the text names the cell.
        """
        tokens = _table("X", params.get("X"))
        _size("X", tokens, "rows", 0, "tokens")
        _size("X", tokens, "columns", 1, "width")
        weights = {name: _table(name, params.get(name)) for name in WEIGHTS}
        columns = weights["W_q"].shape[1]
        _size("W_q", weights["W_q"], "columns", 1, "columns")
        for name, weight in weights.items():
            wanted = (tokens.shape[1], columns)
            if tuple(weight.shape) != wanted:
                raise _wrong(
                    name,
                    f"be {wanted[0]} × {wanted[1]}, X's columns by W_q's columns",
                    f"{weight.shape[0]} × {weight.shape[1]}",
                    "Add or remove rows and columns of all three.",
                )
        return cls(
            X=tokens,
            weights=weights,
            biases=_biases(params, columns),
            allowed=_allowed(params.get("allowed"), tokens.shape[0]),
            own_scale=_scale(params.get("scale")),
            heads=_heads(params.get("heads", 1), columns),
        )

    @property
    def head_dim(self) -> int:
        return self.weights["W_q"].shape[1] // self.heads

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.own_scale is None else self.own_scale

    @property
    def mask(self) -> Mask | None:
        """The mask: None, ``Causal`` or ``Dense``."""
        if bool(self.allowed.all()):
            return None
        causal = Causal()
        places = self.allowed.shape[0]
        return causal if torch.equal(self.allowed, causal.dense(places, places)) else Dense(self.allowed)

    def module(self) -> MultiHeadAttention:
        """A ``MultiHeadAttention`` with the worksheet's weights."""
        parts = [slice(head * self.head_dim, (head + 1) * self.head_dim) for head in range(self.heads)]
        one_head = [tuple(self._projection(name, part) for name in WEIGHTS) for part in parts]
        module = MultiHeadAttention.from_heads(one_head, scale=self.own_scale)  # type: ignore[arg-type]
        return module.requires_grad_(False).eval()

    def _projection(self, name: str, part: slice) -> Tensor | tuple[Tensor, Tensor]:
        weight = self.weights[name][:, part].T.contiguous()
        return (weight, self.biases[name.replace("W", "b")][part]) if self.biases else weight


def _wrong(argument: str, must: str, got: object, then: str) -> ShapeError:
    return ShapeError.about(FUNCTION, argument, must=must, got=got, then=then)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _number(place: str, value: object) -> float:
    most = LIMITS["number"]
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not plain or not abs(value) <= most:  # type: ignore[arg-type]
        must = f"be a number between -{most:,.0f} and {most:,.0f}"
        raise _wrong(place, must, _shown(value), "Write it like 1.16 or -2e-3.")
    return float(value)  # type: ignore[arg-type]


def _table(name: str, value: object) -> Tensor:
    """A table of numbers; errors name the cell, counted from 1 as on the page."""
    if not isinstance(value, list) or not value or not all(isinstance(row, list) and row for row in value):
        raise _wrong(name, "be a table, rows of numbers", _shown(value), "Send a list of lists.")
    if len(value) > LIMITS["tokens"] or any(len(row) != len(value[0]) or len(row) > LIMITS["columns"] for row in value):
        raise _wrong(
            name,
            f"have rows of one length, at most {LIMITS['tokens']:.0f} × {LIMITS['columns']:.0f}",
            f"{len(value)} rows of {sorted({len(row) for row in value})[:4]}",
            "Remove some.",
        )
    rows = [
        [_number(f"{name} row {at + 1} column {place + 1}", cell) for place, cell in enumerate(row)]
        for at, row in enumerate(value)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def _size(name: str, table: Tensor, what: str, axis: int, limit: str) -> None:
    if table.shape[axis] > LIMITS[limit]:
        raise _wrong(name, f"have at most {LIMITS[limit]:.0f} {what}", table.shape[axis], "Remove some.")


def _biases(params: Mapping[str, Any], columns: int) -> dict[str, Tensor]:
    given = {name: params[name] for name in BIASES if params.get(name) is not None}
    if len(given) not in (0, len(BIASES)):
        raise _wrong("biases", "be given for all three projections or for none", ", ".join(given), "Send zeros.")
    biases = {}
    for name, value in given.items():
        if not isinstance(value, list) or len(value) != columns:
            raise _wrong(name, f"have {columns} numbers, one per column", _shown(value), "Send null for none.")
        cells = [_number(f"{name} column {place + 1}", cell) for place, cell in enumerate(value)]
        biases[name] = torch.tensor(cells, dtype=torch.float64)
    return biases


def _allowed(value: object, tokens: int) -> Tensor:
    if value is None:
        return torch.ones(tokens, tokens, dtype=torch.bool)
    good = isinstance(value, list) and len(value) == tokens
    if not good or not all(isinstance(row, list) and len(row) == tokens for row in value):  # type: ignore[attr-defined]
        raise _wrong("mask", f"be {tokens} × {tokens}, a row per query", _shown(value), "True means may attend.")
    if not all(isinstance(cell, bool) for row in value for cell in row):  # type: ignore[attr-defined]
        raise _wrong("mask", "have true and false", _shown(value), "True means may attend.")
    return torch.tensor(value, dtype=torch.bool)


def _scale(value: object) -> float | None:
    return None if value is None else _number("scale", value)


def _heads(value: object, columns: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= columns or columns % value:
        raise _wrong(
            "heads", f"divide the {columns} columns of W_q evenly", _shown(value), "Add a column, or choose another."
        )
    return value
