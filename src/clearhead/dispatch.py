"""Choosing a backend: an ordered table, read with each backend's capability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clearhead import choices
from clearhead.arguments import seen
from clearhead.backends import flex, native, reference, sdpa, tiled, triton
from clearhead.backends.capability import Backend
from clearhead.backends.containment import without_autocast
from clearhead.errors import UnsupportedError
from clearhead.problem import Problem
from clearhead.statistics import Observation, Want

__all__ = ["BACKENDS", "DispatchReport", "backend_names", "choose", "report", "run"]

#: In order of preference: "auto" takes the first that has no reason against the problem.
BACKENDS: tuple[Backend, ...] = (
    native.BACKEND,
    sdpa.BACKEND,
    triton.BACKEND,
    flex.BACKEND,
    tiled.BACKEND,
    reference.BACKEND,
)

#: What "auto" takes only where statistics are wanted; attention alone stays with torch's own kernels on a GPU.
_FOR_STATISTICS = frozenset({triton.BACKEND.name})


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


def backend_names() -> tuple[str, ...]:
    """Names that ``backend=`` takes besides ``"auto"``."""
    return tuple(backend.name for backend in BACKENDS)


def _named(function: str, name: str) -> Backend:
    for backend in BACKENDS:
        if isinstance(name, str) and backend.name == name:
            return backend
    known = ", ".join(repr(name) for name in ("auto", *backend_names()))
    raise UnsupportedError.about(function, "backend", must=f"be one of {known}", got=seen(name), then="'auto' chooses.")


def choose(function: str, problem: Problem, want: Want, backend: str = "auto") -> Backend:
    """The backend to run, the one asked for or the first that can.

    Raises:
        UnsupportedError: the named backend, or every backend, has reasons against the problem.
    """
    candidates = _automatic(problem, want) if _is_auto(backend) else (_named(function, backend),)
    against: list[str] = []
    for candidate in candidates:
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


def _is_auto(backend: object) -> bool:
    return isinstance(backend, str) and backend == "auto"


def _automatic(problem: Problem, want: Want) -> tuple[Backend, ...]:
    """The backends that "auto" looks at, in order."""
    order = [backend for backend in BACKENDS if want.names or backend.name not in _FOR_STATISTICS]
    if problem.needs_gradient:
        order.sort(key=lambda each: not want.names.isdisjoint(each.capability.without_gradient))
    first = _first(problem, want)
    return tuple(order if first is None else sorted(order, key=lambda each: each.name != first))


def _first(problem: Problem, want: Want) -> str | None:
    """The backend that is named, or that the table puts first."""
    dtype = problem.query.dtype
    if choices.named().attention is not None:
        return choices.named().attention
    if dtype not in native.BACKEND.capability.dtypes or problem.query.device.type != "cpu":
        return None
    if want.names or problem.dropout > 0.0 or not sdpa.asks_flags(problem):
        return None
    causal, gradient = problem.mask is not None, problem.needs_gradient
    return choices.attention_path(dtype, problem.q_len, problem.k_len, causal=causal, gradient=gradient)


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
    reasons = {each.name: tuple(each.capability.reasons_against(problem, want)) for each in BACKENDS}
    candidates = _automatic(problem, want) if _is_auto(backend) else (_named(function, backend),)
    eligible = [each for each in candidates if not reasons[each.name]]
    return DispatchReport(choice=eligible[0].name if eligible else None, reasons=reasons)
