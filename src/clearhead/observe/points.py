"""The inner points of one attention: their names, their tensors, and the computation after an edited point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.backends import reference
from clearhead.backends.dropout import keep_scale
from clearhead.errors import UnsupportedError
from clearhead.masks import Dense, Documents, Mask, Padding
from clearhead.masks.base import Combined, conjuncts
from clearhead.observe.packed import PackedSequences
from clearhead.problem import Problem
from clearhead.scores import DenseBias, Sink
from clearhead.shapes import Bool, Float
from clearhead.statistics import Observation, Want
from clearhead.watch import Attend, Call, innermost

__all__ = ["POINTS", "SQUARES", "Changed", "Points", "check_points", "run_changed"]

#: Names of the inner points of an attention layer, in the order of computation: ``query``
#: ``[batch, heads, q_len, head_dim]``, ``key`` ``[batch, kv_heads, k_len, head_dim]``, ``value``
#: ``[batch, kv_heads, k_len, value_dim]``; ``scores`` (``query @ key^T``), ``scaled`` (times the scale), ``masked``
#: (after score rules and mask) and ``weights`` (their softmax), each ``[batch, heads, q_len, k_len]``;
#: ``head_outputs`` (``weights @ value``) ``[batch, heads, q_len, value_dim]``; and the module's ``output``.
POINTS: Final = ("query", "key", "value", "scores", "scaled", "masked", "weights", "head_outputs", "output")
#: Points with an element for each pair of query and key.
SQUARES: Final = ("scores", "scaled", "masked", "weights")

#: Names of the module arguments that queries and keys are projected from.
_SOURCES: Final = ("hidden_states", "query", "key", "encoder_hidden_states", "key_value_states")

#: Applies the edits of a point to its tensor; without edits it returns the tensor itself.
Changed = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """The inner tensors of one call of one attention layer.

    ``scores``, ``scaled``, ``masked`` and ``weights``, each ``[batch, heads, q_len, k_len]``, are computed from the
    formula when they are first read.

    Attributes:
        layer: the module's dotted name.
        problem: the attention that ran: tensors by head, mask and score rules.
        head_outputs: ``weights @ value``, ``[batch, heads, q_len, value_dim]``.
        output: the module's return value; None if the layer was not called as a module.
        inputs: positional arguments of the module.
        options: keyword arguments of the module.
        edited: names of the points that an edit changed.
        squares: ``scores``, ``scaled``, ``masked`` and ``weights`` of a call with edits of these points, else None.
        sequences: the layout of a packed batch, else None.
    """

    layer: str
    problem: Problem
    head_outputs: Float[Tensor, "batch heads q_len value_dim"]
    output: Tensor | None
    inputs: tuple[Any, ...]
    options: Mapping[str, Any]
    edited: tuple[str, ...] = ()
    squares: Mapping[str, Tensor] | None = None
    sequences: PackedSequences | None = None

    @cached_property
    def padded(self) -> Problem:
        """The problem; if it was packed, as a padded batch."""
        problem, packed = self.problem, self.sequences
        if packed is None:
            return problem
        query, key, value = (packed.unpacked(each) for each in (problem.query, problem.key, problem.value))
        return replace(problem, query=query, key=key, value=value, mask=packed.mask(query.device))

    @property
    def real(self) -> Bool[Tensor, "batch q_len"]:
        """Which queries of ``padded`` are not padding, according to its mask.

        In self-attention they are the tokens that may be attended to as keys; in other attention, all queries.
        """
        problem = self.padded
        stop = problem.query_offset + problem.q_len
        if problem.query_offset < 0 or stop > problem.k_len or not self._of_itself:
            return torch.ones(problem.batch, problem.q_len, dtype=torch.bool, device=problem.query.device)
        return real_keys(problem)[:, problem.query_offset : stop]

    @property
    def _of_itself(self) -> bool:
        """Whether this is self-attention, judged by the module's arguments, or by the lengths if there are none."""
        options = self.options
        given = [*self.inputs[:2], *(options[name] for name in _SOURCES if name in options)]
        tensors = [each for each in given if isinstance(each, Tensor) and each.is_floating_point()]
        sources = [each for each in tensors if each.ndim == tensors[0].ndim]
        if not sources:
            return self.problem.query_offset + self.problem.q_len == self.problem.k_len
        return all(each.shape == sources[0].shape and each.data_ptr() == sources[0].data_ptr() for each in sources)

    @property
    def query(self) -> Float[Tensor, "batch heads q_len head_dim"]:
        """Queries by head, after rotary position embedding if the module has one."""
        return self.problem.query

    @property
    def key(self) -> Float[Tensor, "batch kv_heads k_len head_dim"]:
        """Keys by head, including cached ones."""
        return self.problem.key

    @property
    def value(self) -> Float[Tensor, "batch kv_heads k_len value_dim"]:
        """Values by head, including cached ones."""
        return self.problem.value

    @property
    def scores(self) -> Float[Tensor, "batch heads q_len k_len"]:
        """``query @ key^T``."""
        return self._steps["scores"]

    @property
    def scaled(self) -> Float[Tensor, "batch heads q_len k_len"]:
        """Scores times the scale, before score rules."""
        return self._steps["scaled"]

    @property
    def masked(self) -> Float[Tensor, "batch heads q_len k_len"]:
        """Scores after score rules, and ``-inf`` for keys that a query may not attend to."""
        return self._steps["masked"]

    @property
    def weights(self) -> Float[Tensor, "batch heads q_len k_len"]:
        """``softmax(masked)``, before dropout."""
        return self._steps["weights"]

    @cached_property
    def _steps(self) -> Mapping[str, Tensor]:
        return self.squares or squares_of(reference.steps(replace(self.problem, dropout=0.0)))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each point, without computing it."""
        problem = self.problem
        square = (problem.batch, problem.num_heads, problem.q_len, problem.k_len)
        given: dict[str, Tensor | None] = {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "head_outputs": self.head_outputs,
            "output": self.output,
        }
        shapes = {name: square if name in SQUARES else _shape(given[name]) for name in POINTS}
        return {name: shape for name, shape in shapes.items() if shape is not None}

    def __repr__(self) -> str:
        return f"Points({self.layer!r}, {', '.join(f'{name}={list(shape)}' for name, shape in self.shapes.items())})"


def check_points(function: str, argument: str, points: object) -> None:
    """Raise unless ``points`` is the ``Points`` of one call of one layer."""
    if not isinstance(points, Points):
        raise UnsupportedError.about(
            function,
            argument,
            must="be the Points of a layer",
            got=type(points).__name__,
            then="Pass traced[0] after `with ch.trace(model) as traced`.",
        )


def real_keys(problem: Problem) -> Bool[Tensor, "batch k_len"]:
    """Which keys some query may attend to, judged by the parts of the mask that need no check of every pair."""
    device = problem.query.device
    real = torch.ones(problem.batch, problem.k_len, dtype=torch.bool, device=device)
    batch, head, _, k_pos = problem.indices()
    for part in () if problem.mask is None else conjuncts(problem.mask):
        if isinstance(part, Documents):
            real = real & (part.ids >= 0)
        elif isinstance(part, Dense):
            real = real & part.allowed.flatten(1, 2).any(dim=1)
        elif _of_keys(part):
            allowed = part.allows(batch, head, torch.zeros_like(k_pos), k_pos)
            real = real & allowed.any(dim=1)[:, 0]
    return real


def _of_keys(mask: Mask) -> bool:
    """Whether a mask is the same for every query."""
    if isinstance(mask, Combined):
        return all(map(_of_keys, mask.parts()))
    return isinstance(mask, Padding) or (isinstance(mask, Dense) and mask.allowed.shape[-2] == 1)


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def squares_of(steps: reference.Steps) -> dict[str, Tensor]:
    """The points among the formula's steps."""
    return {"scores": steps.raw, "scaled": steps.scaled, "masked": steps.masked, "weights": steps.weights}


def run_changed(call: Call, want: Want, inner: Attend, changed: Changed) -> tuple[Observation, dict[str, Tensor]]:
    """Compute a call with edits of ``SQUARES``: the observation, and the edited squares.

    Edited scores replace ``query @ key^T`` as a bias on scores of 0; the steps after them are unmodified.

    Cost: that of the reference backend, ``q_len * k_len`` memory for each step.
    """
    problem = call.problem()
    call = call.with_options(backend="reference", **({"seed": problem.seed} if problem.dropout else {}))
    steps = _steps(call)
    squares = squares_of(steps)
    squares["scores"] = changed("scores", steps.raw)
    scaled = steps.scaled if squares["scores"] is steps.raw else squares["scores"] * problem.scale
    squares["scaled"] = changed("scaled", scaled)
    if squares["scaled"] is not steps.scaled:
        call = _biased(call, squares["scaled"], call.options.get("mask"), problem.scores)
        steps = _steps(call)
    squares["masked"] = changed("masked", steps.masked)
    if squares["masked"] is not steps.masked:
        sinks = tuple(rule for rule in problem.scores if isinstance(rule, Sink))
        call = _biased(call, squares["masked"], None, sinks)
        steps = _steps(call)
    squares["weights"] = changed("weights", steps.weights)
    if squares["weights"] is steps.weights:
        return inner(call, want), squares
    if want.names or not innermost(inner):
        raise UnsupportedError.about(
            "trace",
            "edit",
            must="not replace weights while another block observes or traces",
            got="replaced weights",
            then="Edit the masked scores instead.",
        )
    return Observation(output=_weighted(problem, squares["weights"])), squares


def _steps(call: Call) -> reference.Steps:
    return reference.steps(replace(call.problem(), dropout=0.0))


def _biased(call: Call, scores: Tensor, mask: Any, rules: tuple[Any, ...]) -> Call:
    """The call with these scaled scores instead of ``query @ key^T``."""
    empty = replace(call, query=torch.zeros_like(call.query))
    return empty.with_options(mask=mask, scores=(DenseBias(scores), *rules))


def _weighted(problem: Problem, weights: Tensor) -> Tensor:
    """``weights @ value`` with dropout, and with the leading axes of the call."""
    value = problem.value.repeat_interleave(problem.num_heads // problem.num_kv_heads, dim=1)
    if problem.dropout > 0.0:
        weights = weights * keep_scale(
            problem.seed, problem.dropout, problem.drawn_at(problem.indices()), weights.dtype
        )
    output = (weights @ value.to(weights.dtype)).to(problem.query.dtype)
    return output.reshape(output.shape[2 - problem.leading :])
