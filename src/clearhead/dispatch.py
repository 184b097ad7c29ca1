"""Choosing a backend: an ordered list of names, read with each backend's capability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Final

from clearhead import choices
from clearhead.arguments import seen
from clearhead.backends.capability import Backend
from clearhead.backends.containment import without_autocast
from clearhead.errors import UnsupportedError
from clearhead.ops.kinds import DTYPES
from clearhead.problem import Problem
from clearhead.statistics import Observation, Want

__all__ = ["BACKENDS", "DispatchReport", "choose", "loaded", "report", "run"]

#: Names that ``backend=`` takes besides ``"auto"``, which takes the first that has no reason against the problem.
BACKENDS: Final = ("native", "sdpa", "triton", "flex", "tiled", "reference")
#: What "auto" takes only where statistics are wanted; attention alone stays with torch's own kernels on a GPU.
_FOR_STATISTICS: Final = "triton"


@dataclass(frozen=True)
class DispatchReport:
    """Which backend runs a call, and why each of the others does not.

    Attributes:
        choice: name of the chosen backend, or None where none can run it.
        reasons: for every backend its reasons against the call; empty for those that could run it.
    """

    choice: str | None
    reasons: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        lines = [f"backend: {self.choice or 'none'}"]
        for name, reasons in self.reasons.items():
            mark = "chosen" if name == self.choice else "could run it" if not reasons else "; ".join(reasons)
            lines.append(f"  {name:<10} {mark}")
        return "\n".join(lines)


@cache
def loaded(name: str) -> Backend:
    """A backend of ``BACKENDS``, whose module is imported when it is first asked."""
    backend: Backend = import_module(f"clearhead.backends.{name}").BACKEND
    return backend


def _candidates(function: str, problem: Problem, want: Want, name: str) -> tuple[str, ...]:
    """The backends to ask, in order."""
    if isinstance(name, str) and name == "auto":
        return _automatic(problem, want)
    if isinstance(name, str) and name in BACKENDS:
        return (name,)
    known = ", ".join(map(repr, ("auto", *BACKENDS)))
    raise UnsupportedError.about(function, "backend", must=f"be one of {known}", got=seen(name), then="'auto' chooses.")


def choose(function: str, problem: Problem, want: Want, backend: str = "auto") -> Backend:
    """The backend to run, the one asked for or the first that can.

    Raises:
        UnsupportedError: the named backend, or every backend, has reasons against the problem.
    """
    against: list[str] = []
    for candidate in map(loaded, _candidates(function, problem, want, backend)):
        reasons = candidate.capability.reasons_against(problem, want)
        if not reasons:
            return candidate
        against.append(f"{candidate.name}: {'; '.join(reasons)}")
    raise UnsupportedError.about(
        function,
        "backend",
        must="be able to run this call",
        got=" | ".join(against),
        then="Use backend='auto', or change what it cannot do.",
    )


def _automatic(problem: Problem, want: Want) -> tuple[str, ...]:
    """The backends that "auto" looks at, in order."""
    order = [name for name in BACKENDS if want.names or name != _FOR_STATISTICS]
    if want.names and problem.needs_gradient:
        order.sort(key=lambda name: not want.names.isdisjoint(loaded(name).capability.without_gradient))
    first = _first(problem, want)
    return tuple(order if first is None else sorted(order, key=lambda name: name != first))


def _first(problem: Problem, want: Want) -> str | None:
    """The backend that is named, or that the table puts first."""
    dtype = problem.query.dtype
    if choices.named().attention is not None:
        return choices.named().attention
    if dtype not in DTYPES or problem.query.device.type != "cpu" or want.names or problem.dropout > 0.0:
        return None
    causal, gradient = problem.mask is not None, problem.needs_gradient
    path = choices.attention_path(dtype, problem.q_len, problem.k_len, causal=causal, gradient=gradient)
    if path == "sdpa":
        # Most calls never need the module.
        from clearhead.backends.sdpa import asks_flags

        return path if asks_flags(problem) else None
    return path


def run(function: str, problem: Problem, want: Want, backend: str = "auto") -> Observation:
    """Choose and run; autocast stays outside, so that float32 inputs are computed in float32."""
    chosen = choose(function, problem, want, backend)
    try:
        with without_autocast(problem.query.device.type):
            return chosen.run(problem, want)
    except RuntimeError as error:
        raise UnsupportedError.from_operator(error) from error


def report(function: str, problem: Problem, want: Want, backend: str = "auto") -> DispatchReport:
    """The choice for a problem with the reasons of every backend."""
    reasons = {name: tuple(loaded(name).capability.reasons_against(problem, want)) for name in BACKENDS}
    eligible = [name for name in _candidates(function, problem, want, backend) if not reasons[name]]
    return DispatchReport(choice=eligible[0] if eligible else None, reasons=reasons)
