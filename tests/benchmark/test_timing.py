"""Interleaving, medians and quartiles, with a clock of our own."""

from __future__ import annotations

import pytest

from clearhead.benchmark import Timing, interleaved, timing
from clearhead.errors import ShapeError


class Clock:
    """Time that passes only when someone works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.log: list[str] = []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def work(self, name: str, seconds: float):  # type: ignore[no-untyped-def]
        def call() -> None:
            self.log.append(name)
            self.now += seconds

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_each_round_runs_every_call_once_in_rotated_order(clock: Clock) -> None:
    calls = {name: clock.work(name, 1.0) for name in "abc"}
    interleaved(calls, repeats=4, warmup=0, min_seconds=0.0)
    settled, rounds = clock.log[:3], "".join(clock.log[3:])
    assert settled == ["a", "b", "c"]
    assert rounds == "abccbabcaacb"


def test_times_are_per_call(clock: Clock) -> None:
    timings = interleaved(
        {"short": clock.work("short", 0.001), "long": clock.work("long", 0.5)}, repeats=3, min_seconds=0.1
    )
    assert timings["short"].median == pytest.approx(0.001)
    assert timings["long"].median == pytest.approx(0.5)
    assert clock.log.count("short") == 2 + 2 + 10 + 100 + 3 * 100
    assert clock.log.count("long") == 2 + 1 + 3


def test_slow_first_call_does_not_shorten_samples(clock: Clock) -> None:
    seconds = [0.02] + [0.0001] * 100_000

    def call() -> None:
        clock.now += seconds.pop(0)
        clock.log.append("x")

    interleaved({"call": call}, repeats=1, warmup=0, min_seconds=0.01)
    settling = 2 + 10 + 100
    assert len(clock.log) == settling + 100


def test_call_without_duration_terminates(clock: Clock) -> None:
    timings = interleaved({"nothing": lambda: None}, repeats=1, min_seconds=1e-6)
    assert timings["nothing"].median == 0.0


def test_time_limit_stops_after_at_least_three_rounds(clock: Clock) -> None:
    done: list[int] = []
    timings = interleaved({"a": clock.work("a", 1.0)}, repeats=50, seconds=0.5, after_round=done.append)
    assert len(timings["a"].runs) == 3
    assert done == [1, 2, 3]
    timings = interleaved({"a": clock.work("a", 1.0)}, repeats=50, seconds=9.5)
    assert len(timings["a"].runs) == 10


def test_timing_has_median_and_quartiles_of_the_runs() -> None:
    timing = Timing.of((5.0, 1.0, 2.0, 4.0, 3.0))
    assert (timing.q1, timing.median, timing.q3) == (2.0, 3.0, 4.0)
    assert Timing.of((2.0,)) == Timing(2.0, 2.0, 2.0, (2.0,))
    assert timing.to_dict()["runs"] == [5.0, 1.0, 2.0, 4.0, 3.0]


def test_one_slow_run_does_not_change_the_median() -> None:
    assert Timing.of((1.0, 1.0, 1.0, 1.0, 100.0)).median == 1.0


@pytest.mark.parametrize(("calls", "repeats"), [({}, 3), ({"a": lambda: None}, 0)])
def test_no_calls_or_no_rounds_raise(calls: dict[str, object], repeats: int) -> None:
    with pytest.raises(ShapeError, match=r"interleaved: (calls|repeats) must be at least one"):
        interleaved(calls, repeats=repeats)  # type: ignore[arg-type]
