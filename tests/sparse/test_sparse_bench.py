"""clearhead bench --sparse: wrong results are not timed, the crossover, and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import clearhead as ch
from clearhead import benchmark
from clearhead.benchmark import sparse_rows as module
from clearhead.benchmark.sparse_rows import FULL, SparsePoint, SparseRow, overtaken_at, sparse_rows, sparse_sheet
from clearhead.benchmark.timing import Timing
from clearhead.cli.app import app


def point(length: int, full: float, other: float, mode: str = "forward") -> SparsePoint:
    timings = {FULL: Timing.of((full,) * 3), "other": Timing.of((other,) * 3)}
    return SparsePoint(
        title=f"{length} {mode}", mode=mode, length=length, timings=timings, errors={FULL: 1e-7, "other": 2e-7}
    )


def test_lengths_go_from_1k_to_32k_in_both_modes() -> None:
    for training in (False, True):
        assert [row.length for row in sparse_rows() if row.training == training] == [2**n for n in range(10, 16)]


@pytest.mark.parametrize("training", [False, True])
def test_every_pattern_is_right_and_timed(training: bool) -> None:
    row = SparseRow(length=200, training=training, heads=2, head_dim=8)
    measured = module.measure_sparse(row, repeats=3, seconds=0.0)
    assert len(measured.timings) == 8
    assert all(len(timing.runs) == 3 for timing in measured.timings.values())
    assert SparsePoint.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured


def test_wrong_pattern_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = module.contenders_of

    def off_by_one(length: int, query: torch.Tensor, key: torch.Tensor) -> dict[str, module.SparseContender]:
        narrow = module.masked_contender(ch.Causal() & ch.Window(254))
        return {
            **honest(length, query, key),
            "window 256": module.SparseContender(narrow.call, ch.Causal() & ch.Window(255)),
        }

    monkeypatch.setattr(module, "contenders_of", off_by_one)
    row = SparseRow(length=400, training=False, heads=1, head_dim=8)
    with pytest.raises(ch.UnsupportedError, match="contender 'window 256' must compute its pattern"):
        module.measure_sparse(row, repeats=1, seconds=0.0)


def test_crossover_is_where_a_pattern_remains_faster() -> None:
    points = [point(1, 1.0, 0.5), point(2, 2.0, 3.0), point(4, 4.0, 3.5), point(8, 8.0, 4.0)]
    assert overtaken_at(points, "other") == 4
    assert overtaken_at(points[:2], "other") is None
    sheet = sparse_sheet(points)
    assert sheet.rows[1][-1] == "from 4"
    assert "other 0.19" in sheet.notes[0]
    assert "2.0e-07" in sheet.notes[-1]


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "check_backends", lambda: {})
    monkeypatch.setattr(module, "sparse_rows", lambda rows=sparse_rows: rows()[:2])
    words = ["bench", "--sparse", "--quick", "--repeats", "3", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.stderr
    assert "overtakes" in result.stdout
    assert "[2/2] sparse:" in result.stderr
    written = json.loads((tmp_path / "sparse.json").read_text())
    assert written["head"]["command"] == "clearhead bench --sparse --quick --repeats 3"
    assert [row["length"] for row in written["rows"]] == [128, 256]
    resumed = CliRunner().invoke(app, [*words, "--resume"])
    assert resumed.exit_code == 0
    assert json.loads((tmp_path / "sparse.json").read_text())["rows"] == written["rows"]


def test_shapes_option_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "--sparse", "--shape", "1,1,8,8"])
    assert result.exit_code == 2
    assert "--shape must not be used with --sparse" in result.stderr
