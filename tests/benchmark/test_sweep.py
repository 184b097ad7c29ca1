"""The walk over the grid: paired ratios, what is timed again, and what counts as slower."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from clearhead.benchmark import Point, Timing, grid_rows, sweep, walk
from clearhead.benchmark.cases import Comparison
from clearhead.benchmark.peers import OURS, SDPA
from clearhead.benchmark.results import Timed
from clearhead.benchmark.rows import TensorRow
from clearhead.benchmark.sweep import measure_point

ROW = TensorRow(shape=(1, 1, 8, 8), dtype=torch.float32)
POINT = Point(
    title="", group="forward float32", backend="sdpa", ours=1.0, theirs=1.0, ratio=1.0, noise=0.001, rounds=41
)


def test_grid_has_about_a_hundred_calls() -> None:
    rows = grid_rows()
    assert len({row.title for row in rows}) == len(rows)
    assert 90 <= len(rows) <= 130
    assert {(1, 1, 8, 8), (16, 4, 32, 16), (1, 12, 4096, 64)} <= {row.shape for row in rows}
    for name, wanted in {"dtype": 2, "causal": 2, "training": 2}.items():
        assert len({getattr(row, name) for row in rows}) == wanted


def test_slower_means_more_than_three_percent() -> None:
    assert not replace(POINT, ratio=0.972).slower
    assert replace(POINT, ratio=0.970).slower
    assert not POINT.doubtful
    assert replace(POINT, noise=0.02).doubtful


def test_ratio_is_the_median_of_round_ratios() -> None:
    ours, theirs = Timing.of((1.0, 10.0, 100.0, 1.0)), Timing.of((2.0, 20.0, 200.0, 2.0))
    assert sweep.paired(theirs, ours).runs == (2.0, 2.0, 2.0, 2.0)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(4000, 101, generator=generator)
    spread = float(drawn.median(dim=1).values.std())
    errors = [sweep.standard_error(Timing.of(tuple(row))) for row in drawn[:200].tolist()]
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.1)


def test_only_doubtful_points_are_repeated_slowest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [replace(ROW, shape=(1, 1, length, 8)) for length in (8, 9, 10)]
    first = dict(zip((row.title for row in rows), (0.96, 2.0, 0.5), strict=True))
    asked: list[tuple[str, bool]] = []

    def measured(row: TensorRow, *, retry: bool = False) -> Point:
        asked.append((row.title, retry))
        ratio = 1.0 if retry else first[row.title]
        return replace(POINT, title=row.title, ratio=ratio, against_itself=1.0 if retry else None)

    monkeypatch.setattr(sweep, "measure_point", measured)
    points_kept: list[Point] = []
    points = walk(rows, keep=points_kept.append)
    titles = [row.title for row in rows]
    assert asked == [(title, False) for title in titles] + [(titles[2], True), (titles[0], True)]
    assert [point.ratio for point in points] == [1.0, 2.0, 1.0]
    assert len(points_kept) == 5
    asked.clear()
    assert walk(rows, keep=points_kept.append, measured=points) == points
    assert asked == []
    walk(rows, keep=points_kept.append, retry_seconds=-1.0)
    assert [retry for _, retry in asked] == [False] * 3


@pytest.mark.parametrize("retry", [False, True])
def test_measured_point_round_trips_through_json(retry: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "FIRST", (5, 0.0, 3))
    monkeypatch.setattr(sweep, "RETRY", (5, 0.0, 4))
    point = measure_point(ROW, retry=retry)
    assert point.rounds == (4 if retry else 3)
    assert (point.against_itself is not None) == retry
    assert 0.01 < point.ratio < 100
    assert Point.from_dict(point.to_dict()) == point


def test_retry_runs_both_calls_twice_per_round(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def timed(comparison: Comparison, **_settings: object) -> Timed:
        calls.append(list(comparison.timed))
        seconds = {name: (1.0, 3.0)[place < 2] for place, name in enumerate(comparison.timed)}
        timings = {name: Timing.of((value,)) for name, value in seconds.items()}
        return Timed(backend="native", timings=timings, errors={}, left_out={})

    monkeypatch.setattr(sweep, "timed", timed)
    repeated = measure_point(ROW, retry=True)
    assert calls[0] == [OURS, SDPA, f"{OURS}, again", f"{SDPA}, again"]
    assert (repeated.ours, repeated.theirs, repeated.ratio) == (2.0, 2.0, 1.0)
    assert repeated.against_itself == pytest.approx(1 / 3)
