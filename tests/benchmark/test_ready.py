"""Nothing is timed while a backend computes other numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clearhead import dispatch
from clearhead.backends import tiled
from clearhead.benchmark import check_backends, ready
from clearhead.errors import UnsupportedError
from clearhead.problem import Problem
from clearhead.statistics import Observation, Want


def only(monkeypatch: pytest.MonkeyPatch, factor: float, *, fail: bool = False) -> None:
    """Leave one backend, the tiles, whose output is scaled."""

    def run(problem: Problem, want: Want) -> Observation:
        if fail:
            raise RuntimeError("no such\nkernel")
        result = tiled.BACKEND.run(problem, want)
        return replace(result, output=factor * result.output)

    for module in (dispatch, ready):
        monkeypatch.setattr(module, "BACKENDS", ("tiled",))
    monkeypatch.setattr(dispatch, "loaded", lambda name: replace(tiled.BACKEND, run=run))


def test_correct_backend_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, 1.0)
    assert check_backends() == {"tiled": 24}


def test_wrong_backend_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, 1.01)
    with pytest.raises(UnsupportedError, match="contender 'clearhead, backend tiled' must compute the same"):
        check_backends()


def test_failing_backend_raises_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, 1.0, fail=True)
    with pytest.raises(UnsupportedError, match=r"no such kernel\. Nothing is timed"):
        check_backends()
