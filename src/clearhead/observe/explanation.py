"""The result of ``explain``: the steps of one token's attention, each computed twice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.shapes import Bool, Float

__all__ = ["Explanation", "Step", "largest_difference"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One step of the formula: the value that clearhead computed, and the same value in float64.

    Attributes:
        name: a short name of the step, such as ``"scores"`` or ``"softmax"``.
        formula: the formula as text; ``i`` is the token, ``j`` runs over keys.
        by: the part of clearhead that computed ``value``.
        value: the value that clearhead computed, in its dtype.
        exact: the value recomputed from input and weights in float64, independently of clearhead's arithmetic.
        difference: the largest ``|value - exact|``; infinite if only one of the two is NaN or infinite at some element.
    """

    name: str
    formula: str
    by: str
    value: Tensor
    exact: Float[Tensor, "..."]
    difference: float

    @classmethod
    def of(cls, name: str, formula: str, by: str, value: Tensor, exact: Tensor) -> Step:
        """A step with its difference measured."""
        difference = largest_difference(value, exact)
        return cls(name=name, formula=formula, by=by, value=value, exact=exact, difference=difference)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ``value``."""
        return tuple(self.value.shape)


def largest_difference(value: Tensor, exact: Tensor) -> float:
    """The largest ``|value - exact|``; infinite if the tensors differ in which elements are NaN or infinite.

    >>> largest_difference(torch.tensor([1.0, -torch.inf]), torch.tensor([1.5, -torch.inf]))
    0.5
    """
    value, exact = value.detach().to("cpu", torch.float64), exact.to("cpu", torch.float64)
    finite = torch.isfinite(value)
    if value.shape != exact.shape or not torch.equal(finite, torch.isfinite(exact)):
        return math.inf
    if not torch.equal(torch.nan_to_num(value[~finite]), torch.nan_to_num(exact[~finite])):
        return math.inf
    return float((value - exact)[finite].abs().max()) if bool(finite.any()) else 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Explanation:
    """One token's attention in one head, step by step.

    ``str()`` gives a table for terminals, a notebook shows HTML, ``to_dict()`` gives values for JSON.

    Attributes:
        token: index of the query within the call.
        label: its text.
        position: its absolute position.
        head: query head.
        num_heads: how many query heads the layer has.
        layer: name of the attention module within the model, or None.
        batch: sequence within the call.
        tokens: text of each key.
        dtype: of the computation.
        mask: the mask in words, or None.
        rules: the score rules in words.
        backend: which backend computed the output.
        allowed: which keys the token may attend to, bool ``[k_len]``.
        steps: the steps, in order.
    """

    token: int
    label: str
    position: int
    head: int
    num_heads: int
    layer: str | None
    batch: int
    tokens: tuple[str, ...]
    dtype: torch.dtype
    mask: str | None
    rules: tuple[str, ...]
    backend: str
    allowed: Bool[Tensor, " k_len"]
    steps: tuple[Step, ...]

    def step(self, name: str) -> Step | None:
        """The step with this name, or None if there is none."""
        return next((step for step in self.steps if step.name == name), None)

    def _value(self, name: str) -> Tensor:
        step = self.step(name)
        assert step is not None, name
        return step.value

    @property
    def scores(self) -> Float[Tensor, " k_len"]:
        """``query @ key`` for each key."""
        return self._value("scores")

    @property
    def scaled(self) -> Float[Tensor, " k_len"]:
        """Scores times the scale."""
        return self._value("scaling")

    @property
    def masked(self) -> Float[Tensor, " k_len"]:
        """Scores after rules and mask; ``-inf`` for keys that the token may not attend to."""
        return self._value("mask")

    @property
    def weights(self) -> Float[Tensor, " k_len"]:
        """The weight of each key."""
        return self._value("softmax")

    @property
    def output(self) -> Float[Tensor, " value_dim"]:
        """The weighted sum of values."""
        return self._value("weighted sum")

    @property
    def part(self) -> Float[Tensor, " embed_dim"] | None:
        """The head's term in the module's output, before the bias; None without an output projection."""
        step = self.step("head's part")
        return None if step is None else step.value

    @property
    def worst(self) -> Step:
        """The step that differs most from its float64 recomputation."""
        return max(self.steps, key=lambda step: step.difference)

    @property
    def difference(self) -> float:
        """The largest difference of all steps."""
        return self.worst.difference

    def text(self, *, all_rows: bool = False) -> str:
        """The steps as a plain text table, with the 24 keys of largest weight; with ``all_rows=True``, all keys."""
        from clearhead.observe.text import as_text

        return as_text(self, all_rows=all_rows)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        layer = "" if self.layer is None else f", layer={self.layer!r}"
        return f"Explanation(token={self.token}, head={self.head}{layer}, difference={self.difference:.1e})"

    def _repr_html_(self) -> str:
        from clearhead.observe.page import as_html

        return as_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values for JSON; NaN and infinity (such as a masked score) become None."""
        return {
            "token": self.token, "label": self.label, "position": self.position, "head": self.head,
            "num_heads": self.num_heads, "layer": self.layer, "batch": self.batch, "tokens": list(self.tokens),
            "dtype": str(self.dtype).removeprefix("torch."), "mask": self.mask, "rules": list(self.rules),
            "backend": self.backend, "allowed": self.allowed.tolist(), "worst_step": self.worst.name,
            "worst_difference": _finite(self.difference),
            "steps": [
                {
                    "name": step.name, "formula": step.formula, "by": step.by, "shape": list(step.shape),
                    "difference": _finite(step.difference), "value": _finite(step.value.tolist()),
                    "exact": _finite(step.exact.tolist()),
                }
                for step in self.steps
            ],
        }  # fmt: skip


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return value if math.isfinite(value) else None
