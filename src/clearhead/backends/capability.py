"""The capability of a backend as data, used by dispatch, its reasons, the documentation's table and the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from clearhead.choices import covers, is_invariant
from clearhead.masks.base import does_as
from clearhead.problem import DTYPES, Problem
from clearhead.scores import ScoreRule
from clearhead.statistics import Observation, Want

__all__ = ["ALL_STATISTICS", "Backend", "ByRows", "Capability", "RowGrads"]

ALL_STATISTICS = frozenset(
    {"lse", "max_score", "entropy", "top_k", "received", "row_weights", "heatmap", "sink", "distance", "rows"}
)


@dataclass(frozen=True, kw_only=True)
class Capability:
    """What a backend supports. ``None`` means no limit.

    Args:
        devices: device types that it runs on.
        dtypes: dtypes of query, key and value.
        rules: classes of score rules.
        statistics: names of the statistics that it computes.
        dropout: whether it drops weights reproducibly from one seed.
        max_head_dim: largest head size.
        max_scores: largest number of scores in memory at once, ``batch * heads * q_len * k_len``.
        quantized: whether it takes the int8 rows of a KV cache as key and value.
        gradient: whether it is differentiable.
        without_gradient: names of the statistics that it computes without a gradient; ``Want.row_weights`` may then not
            require one either. "auto" prefers another backend if the call needs gradients.
        invariant: whether a sequence's bits do not depend on how it is computed under ``ch.set_invariant(True)``.
        requires: returns why it cannot run in this process at all, or None.
        also: returns further reasons against a problem, which depend on more than one field.
    """

    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] = frozenset(DTYPES)
    rules: tuple[type[ScoreRule], ...] = (ScoreRule,)
    statistics: frozenset[str] = ALL_STATISTICS
    dropout: bool = True
    max_head_dim: int | None = None
    max_scores: int | None = None
    quantized: bool = False
    gradient: bool = True
    without_gradient: frozenset[str] = frozenset()
    invariant: bool = False
    requires: Callable[[], str | None] = lambda: None
    also: Callable[[Problem], list[str]] = lambda problem: []

    def reasons_against(self, problem: Problem, want: Want) -> list[str]:
        """Why the backend cannot run the problem, as parts of a sentence; empty if it can."""
        missing = self.requires()
        if missing is not None:
            return [missing]
        reasons = self._mismatches(problem, want)
        if is_invariant() and not self.invariant:
            reasons.append("does not have one order of sums (ch.set_invariant)")
        elif not covers(problem.query.dtype):
            reasons.append("has the same bits on all instruction sets in float32 only (ch.set_invariant('portable'))")
        return reasons or self.also(problem)

    def _mismatches(self, problem: Problem, want: Want) -> list[str]:
        reasons = []
        device, dtype = problem.query.device.type, problem.query.dtype
        if self.devices is not None and device not in self.devices:
            reasons.append(f"runs on {_listed(self.devices)}, not {device}")
        if dtype not in self.dtypes:
            reasons.append(f"has no {dtype}".replace("torch.", ""))
        for rule in problem.scores:
            if not any(kind is ScoreRule or does_as(rule, kind, "apply") for kind in self.rules):
                reasons.append(f"cannot apply {type(rule).__name__} to scores")
        if problem.dropout > 0.0 and not self.dropout:
            reasons.append("cannot reproduce dropout from a seed")
        if self.max_head_dim is not None and max(problem.head_dim, problem.value_dim) > self.max_head_dim:
            reasons.append(f"takes head sizes up to {self.max_head_dim}")
        size = problem.batch * problem.num_heads * problem.q_len * problem.k_len
        if self.max_scores is not None and size > self.max_scores:
            reasons.append(f"would need memory for {size:,} scores (limit {self.max_scores:,})")
        if problem.is_quantized and not self.quantized:
            reasons.append("takes no int8 rows of a KV cache")
        if problem.needs_gradient and not self.gradient:
            reasons.append("has no gradient")
        weights = want.row_weights
        learned = weights is not None and weights.requires_grad and torch.is_grad_enabled()
        if learned and "row_weights" in self.without_gradient:
            reasons.append("has no gradient for row_weights")
        missing = sorted(want.names - self.statistics)
        if missing:
            reasons.append(f"cannot compute {', '.join(missing)}")
        return reasons

    def row(self) -> dict[str, str]:
        """The capability in words, for tables."""
        return {
            "usable": self.requires() or "yes",
            "devices": _listed(self.devices) if self.devices is not None else "any",
            "dtypes": ", ".join(str(dtype)[6:] for dtype in DTYPES if dtype in self.dtypes),
            "score rules": (
                "all" if ScoreRule in self.rules else ", ".join(rule.__name__ for rule in self.rules) or "none"
            ),
            "dropout": "yes" if self.dropout else "no",
            "int8 caches": "yes" if self.quantized else "no",
            "gradient": "yes" if self.gradient else "no",
            "invariant": "yes" if self.invariant else "no",
            "statistics": "all" if self.statistics == ALL_STATISTICS else ", ".join(sorted(self.statistics)) or "none",
        }


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


#: Gradients of the output and of the log-sum-exp; the latter may be None.
RowGrads: TypeAlias = tuple[Tensor, Tensor | None]


class ByRows(Protocol):
    """Forward and backward passes of a backend by rows, of which a backward call may have some queries or keys only.

    Rows are tensors ``[batch, heads, q_len, ...]``, which callers may slice and concatenate along queries.
    """

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The output, the log-sum-exp, and rows for backward."""

    def rows(self, problem: Problem, output: Tensor, lse: Tensor) -> list[Tensor]:
        """Rows for backward, from a float32 or float64 output and log-sum-exp that were merged from parts."""

    def backward(
        self, problem: Problem, rows: list[Tensor], grads: RowGrads, *, partial: bool, learned: Sequence[Tensor]
    ) -> list[Tensor]:
        """Gradients of query, key, value and of ``learned``; ``partial`` if the rows have other keys besides.

        Partial rows contain no NaN and no infinity: the backend cannot know which keys they come from.
        """

    def query_gradients(
        self, problem: Problem, rows: list[Tensor], grads: RowGrads, learned: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Gradients of the query and of ``learned``, with the bits of ``backward``, and the rows' sums.

        The tensors contain no NaN and no infinity, but for the log-sum-exp of empty rows.
        """

    def row_sums(self, rows: list[Tensor], grads: RowGrads) -> Tensor:
        """The rows' sums ``[batch, heads, q_len]`` that ``query_gradients`` gives, for more than ``KEY_TILE`` keys."""

    def key_gradients(self, problem: Problem, softmax: Tensor, sums: Tensor, grad_output: Tensor) -> list[Tensor]:
        """Gradients of key and value, with the bits of ``backward``, for tensors without NaN and infinity.

        Args:
            problem: some keys, and blocks of queries of which all are there that may attend to one of these keys.
            softmax: the last of the rows for backward.
            sums: the rows' sums.
            grad_output: ``[batch, heads, q_len, value_dim]``.
        """


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A backend of attention.

    Attributes:
        name: its name for ``backend=``.
        summary: a description in a few words.
        capability: what it supports.
        run: computes a problem's output and statistics.
        by_rows: its passes by rows; None if it has none.
    """

    name: str
    summary: str
    capability: Capability
    run: Callable[[Problem, Want], Observation]
    by_rows: ByRows | None = None
