"""Floors are judged by the medians, and a line survives its file."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import torch

from clearhead.benchmark import Floor, Line, Suite, Timing, measure_row, verdicts
from clearhead.benchmark.lines import product_rates, unjudged
from clearhead.benchmark.product import OPERATIONS, PRODUCT
from clearhead.benchmark.rows import TensorRow
from clearhead.ops import library as native_library

GROUP = "float32"


def line(title: str, seconds: Mapping[str, float], **fields: object) -> Line:
    timings = {name: Timing(s, 0.9 * s, 1.2 * s, (s,)) for name, s in seconds.items()}
    defaults = {
        "group": GROUP,
        "backend": "native",
        "errors": {},
        "left_out": {},
        "operations": 1e9,
        "memory_read": None,
    }
    return Line(title=title, timings=timings, **{**defaults, **fields})  # type: ignore[arg-type]


def judged(floor: Floor, lines: list[Line]) -> list[tuple[str, float, bool, str]]:
    judgements = verdicts(Suite(about="", rows=lambda: [], floors=(floor,)), lines)
    return [(verdict.kind, pytest.approx(verdict.figure), verdict.met, verdict.where) for verdict in judgements]  # type: ignore[misc]


def test_each_and_mean_use_ratios_of_medians() -> None:
    lines = [line("a", {"clearhead": 1.0, "peer": 2.0}), line("b", {"clearhead": 1.0, "peer": 8.0})]
    floor = Floor(group=GROUP, against=("peer",), each=2.5, mean=4.0)
    assert judged(floor, lines) == [("each", 2.0, False, "a"), ("mean", 4.0, True, "")]


def test_fastest_peer_of_each_row_counts() -> None:
    lines = [line("a", {"clearhead": 1.0, "p": 2.0, "q": 9.0}), line("b", {"clearhead": 1.0, "p": 9.0, "q": 3.0})]
    assert judged(Floor(group=GROUP, against=("p", "q"), each=1.1), lines) == [("each", 2.0, True, "a")]
    lines.append(line("only q", {"clearhead": 1.0, "q": 1.05}))
    assert judged(Floor(group=GROUP, against=("p", "q"), each=1.1), lines) == [("each", 1.05, False, "only q")]


def test_share_is_relative_to_the_product_of_the_row() -> None:
    seconds = {"clearhead": 0.01, PRODUCT: 0.05}
    rate = OPERATIONS / 0.05 / 1e9
    one = line("1x12x8192x64 full forward", seconds)
    floor = Floor(group=GROUP, share=0.85, only="8192x64 full")
    assert judged(floor, [one, line("other", {"clearhead": 9.0, PRODUCT: 0.05})]) == [
        ("share", 100.0 / rate, False, one.title)
    ]
    assert product_rates([one]) == {GROUP: pytest.approx((rate, rate, rate))}


def test_other_groups_and_rows_without_the_peer_are_ignored() -> None:
    lines = [line("a", {"clearhead": 1.0, "peer": 2.0}, group="bfloat16"), line("b", {"clearhead": 1.0})]
    assert judged(Floor(group=GROUP, against=("peer",), each=2.0, mean=2.0), lines) == []


def test_floors_without_a_peer_are_unjudged() -> None:
    floors = tuple(Floor(group=GROUP, against=against, each=1.0) for against in (("p",), ("p", "q"), ("q",)))
    suite = Suite(about="", rows=lambda: [], floors=floors)
    lines = [line("a", {"clearhead": 1.0, "q": 2.0})]
    assert [verdict.floor.against for verdict in verdicts(suite, lines)] == [("q",), ("q",)]
    assert unjudged(suite, lines) == ["float32 against p: not judged, none of them took part"]
    assert unjudged(suite, []) == []


def test_floor_of_a_part_of_the_rows_is_judged_by_these_alone() -> None:
    floors = (Floor(group=GROUP, against=("p",), each=1.0, only="token"),)
    suite = Suite(about="", rows=lambda: [], floors=floors)
    prompt = line("prompt", {"clearhead": 1.0, "p": 0.5})
    assert unjudged(suite, [prompt]) == []
    assert verdicts(suite, [prompt]) == []
    token = line("token", {"clearhead": 1.0})
    assert unjudged(suite, [prompt, token]) == ["float32, token against p: not judged, none of them took part"]
    token = line("token", {"p": 1.0})
    assert unjudged(suite, [token]) == ["float32, token against p: not judged, clearhead did not take part"]
    (verdict,) = verdicts(suite, [prompt, line("token", {"clearhead": 1.0, "p": 2.0})])
    assert str(verdict) == "float32, token against p: 2.000x (lowest of 1, at token); floor 1x: met"


def test_floor_can_name_another_contender_of_clearhead() -> None:
    lines = [line("a", {"clearhead": 1.0, "swapped": 4.0, "peer": 2.0})]
    (verdict,) = verdicts(
        Suite(about="", rows=lambda: [], floors=(Floor(group=GROUP, against=("peer",), each=3.0, ours="swapped"),)),
        lines,
    )
    assert verdict.figure == 0.5
    assert str(verdict) == "float32 (swapped) against peer: 0.500x (lowest of 1, at a); floor 3x: SHORT"


def test_short_verdict_shows_the_figure_at_the_limit() -> None:
    """Work at a half and at a quarter of it could be twice and four times as fast; what is met needs no excuse."""
    lines = [
        line("a", {"clearhead": 0.05, "peer": 0.1}, operations=5e9, limit=200.0),
        line("b", {"clearhead": 0.05, "peer": 0.2}, operations=2.5e9, limit=200.0),
    ]

    def said(**wanted: float) -> str:
        floor = Floor(group=GROUP, against=("peer",), **wanted)
        (verdict,) = verdicts(Suite(about="", rows=lambda: [], floors=(floor,)), lines)
        return str(verdict)

    assert said(each=5.0).endswith("2.000x (lowest of 2, at a); floor 5x: SHORT (at the machine's limit 4.000x)")
    assert said(mean=9.0).endswith("2.828x (geometric mean of 2); floor 9x: SHORT (at the machine's limit 8.000x)")
    assert said(each=2.0).endswith("floor 2x: met")
    # Faster than a limit that was disturbed when it was measured is as fast as it gets.
    lines = [line("c", {"clearhead": 0.01, "peer": 0.02}, operations=5e9, limit=200.0)]
    assert said(each=3.0).endswith("SHORT (at the machine's limit 2.000x)")
    lines = [line("d", {"clearhead": 0.01, "peer": 0.02})]
    assert said(each=3.0).endswith("SHORT")


@pytest.mark.parametrize(("q_len", "bound"), [(33, False), (1, True)])
def test_limit_is_measured_for_compute_bound_rows(q_len: int, bound: bool) -> None:
    row = TensorRow(shape=(2, 4, q_len, 8), k_len=33 if bound else None, dtype=torch.float32)
    measured = measure_row(row, repeats=1, seconds=None)
    has_kernels = native_library.library() is not None
    assert (measured.limit is not None) == (has_kernels and not bound), "reading its cache is what decoding does"
    assert Line.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured
    if measured.limit is not None:
        assert measured.share_of_limit("clearhead") == pytest.approx(
            (measured.rate("clearhead") or 0.0) / measured.limit
        )


def test_line_of_an_older_file_has_no_limit() -> None:
    values = line("a", {"clearhead": 0.05}, limit=200.0).to_dict()
    assert Line.from_dict(values).limit == 200.0
    del values["limit"]
    assert Line.from_dict(values).limit is None


def test_measured_line_round_trips_through_json() -> None:
    row = TensorRow(shape=(2, 4, 1, 8), kv_heads=2, k_len=33, dtype=torch.float32)
    measured = measure_row(row, repeats=6, seconds=0.0)
    assert all(len(timing.runs) == 5 for timing in measured.timings.values())
    text = json.dumps(measured.to_dict(), allow_nan=False)
    assert Line.from_dict(json.loads(text)) == measured
    bandwidth = measured.bandwidth("clearhead")
    assert bandwidth is not None
    assert bandwidth == pytest.approx(2 * 2 * 2 * 33 * 8 * 4 / measured.timings["clearhead"].median / 1e9)
