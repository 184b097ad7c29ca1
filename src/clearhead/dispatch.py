"""The choice of a backend: the first of an ordered list whose capability covers the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Final

from clearhead import choices
from clearhead.arguments import repr_of
from clearhead.backends.capability import Backend
from clearhead.backends.containment import without_autocast
from clearhead.errors import UnsupportedError
from clearhead.ops.kinds import DTYPES
from clearhead.problem import Problem
from clearhead.statistics import Observation, Want

__all__ = ["BACKENDS", "DispatchReport", "choose", "loaded", "report", "run"]

#: Names for ``backend=`` besides ``"auto"``, which runs the first backend that has no reason against the problem.
BACKENDS: Final = ("native", "sdpa", "triton", "flex", "tiled", "reference")


@dataclass(frozen=True)
class DispatchReport:
    """Which backend runs a call, and why each of the others does not.

    Attributes:
        choice: name of the chosen backend, or None if none can run the call.
        reasons: for every backend its reasons against the call; an empty tuple for those that could run it.
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
    """A backend of ``BACKENDS``; its module is imported on the first call."""
    backend: Backend = import_module(f"clearhead.backends.{name}").BACKEND
    return backend


def _candidates(function: str, problem: Problem, want: Want, name: str) -> tuple[str, ...]:
    """The backends to try, in order."""
    if isinstance(name, str) and name == "auto":
        return _automatic(problem, want)
    if isinstance(name, str) and name in BACKENDS:
        return (name,)
    names = ", ".join(map(repr, ("auto", *BACKENDS)))
    raise UnsupportedError.about(
        function, "backend", must=f"be one of {names}", got=repr_of(name), then="'auto' chooses."
    )


def choose(function: str, problem: Problem, want: Want, backend: str = "auto") -> Backend:
    """The backend to run: the named one, or the first that can run the problem.

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
    """The backends that "auto" tries, in order."""
    if problem.is_quantized:
        # The others that take int8 rows copy them to floats, which must not happen unasked.
        return ("native",)
    order = list(BACKENDS)
    if want.names and problem.needs_gradient:
        order.sort(key=lambda name: not want.names.isdisjoint(loaded(name).capability.without_gradient))
    first = _first(problem, want)
    return tuple(order if first is None else sorted(order, key=lambda name: name != first))


def _first(problem: Problem, want: Want) -> str | None:
    """The backend that an override or the table puts first; None for neither."""
    dtype = problem.query.dtype
    if choices.overrides().attention is not None:
        return choices.overrides().attention
    if dtype not in DTYPES or problem.query.device.type != "cpu" or want.names or problem.dropout > 0.0:
        return None
    sizes, causal, gradient = (problem.q_len, problem.k_len), problem.mask is not None, problem.needs_gradient
    # No segment is longer than the call, so most packed calls need not be read.
    if causal and choices.attention_path(dtype, *sizes, causal=False, gradient=gradient) == "sdpa" and problem.segments:
        sizes, causal = problem.segments.mean_lengths, not problem.segments.sees_all
    path = choices.attention_path(dtype, *sizes, causal=causal, gradient=gradient)
    if path == "sdpa":
        # Imported here, since most calls do not need the module.
        from clearhead.backends.sdpa import asks_flags

        return path if asks_flags(problem) else None
    return path


def run(function: str, problem: Problem, want: Want, backend: str = "auto") -> Observation:
    """Choose a backend and run it, without autocast: float32 inputs are computed in float32."""
    chosen = choose(function, problem, want, backend)
    try:
        with without_autocast(problem.query.device.type):
            return chosen.run(problem, want)
    except RuntimeError as error:
        raise UnsupportedError.from_operator(error) from error


def report(function: str, problem: Problem, want: Want, backend: str = "auto") -> DispatchReport:
    """The chosen backend of a problem and the reasons of every other one."""
    reasons = {name: tuple(loaded(name).capability.reasons_against(problem, want)) for name in BACKENDS}
    eligible = [name for name in _candidates(function, problem, want, backend) if not reasons[name]]
    return DispatchReport(choice=eligible[0] if eligible else None, reasons=reasons)
