"""What is said about the figures: tables, notes, and the block in a Markdown file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from clearhead.benchmark import Journal, Point
from clearhead.benchmark.block import block, write_block
from clearhead.benchmark.peers import SDPA
from clearhead.benchmark.product import PRODUCT
from clearhead.benchmark.sheets import floors_sheet, grid_sheet, suite_sheet
from clearhead.benchmark.sparse_rows import FULL, SparsePoint
from clearhead.benchmark.timing import Timing
from clearhead.ops import library as native_library
from tests.benchmark.test_lines import line

FORWARD = "1x12x8192x64 full forward float32"
POINT = Point(
    title="small",
    group="forward float32",
    backend="sdpa",
    ours=2e-5,
    theirs=1e-5,
    ratio=0.5,
    noise=0.01,
    rounds=401,
    against_itself=1.002,
)


def test_suite_sheet_shows_medians_ratios_rates_and_floors() -> None:
    one = line(FORWARD, {"clearhead": 0.010, SDPA: 0.015, PRODUCT: 0.1}, left_out={"ONNX Runtime Attention": "absent"})
    sheet = suite_sheet("forward", [one])
    (row,) = sheet.rows
    assert row[:3] == [f"{FORWARD} (native)", "10 [9, 12]", "15 (1.50x) [13.5, 18]"]
    assert dict(zip(sheet.header, row, strict=True))["GFLOP/s"] == "100"
    assert dict(zip(sheet.header, row, strict=True))["of product rate"] == "0.58"
    notes = "\n".join(sheet.notes)
    for words in (
        "oneDNN product 2048x2048x2048 float32: 172 GFLOP/s",
        "float32, SDPA: geometric mean 1.50x",
        "1.500x (lowest of 1, at 1x12x8192x64 full forward float32); floor 2x: SHORT",
        "floor 0.85: SHORT",
        "left out: ONNX Runtime Attention, absent",
    ):
        assert words in notes
    assert "floor" not in "\n".join(suite_sheet("forward", [one], judged=False).notes[:-2])


def test_floors_sheet_shows_the_figure_at_the_limit() -> None:
    slow = line(FORWARD, {"clearhead": 0.010, SDPA: 0.015, PRODUCT: 0.1}, limit=125.0)
    lines = {"forward": [slow], "window": [line("w", {"clearhead": 1.0, SDPA: 30.0}, group="bfloat16")]}
    sheet = floors_sheet(lines)
    rate, reach = "the machine's product rate", f"{1.5 / 0.8:.2f}"
    assert sheet.rows == [
        ["forward", "float32", "SDPA", "lowest of 1", "1.50", reach, "2", "SHORT"],
        ["forward", "float32", "SDPA", "mean of 1", "1.50", reach, "2.4", "SHORT"],
        ["forward", "float32, 1x12x8192x64 full", rate, "lowest of 1", "0.58", "", "0.85", "SHORT"],
        ["window", "bfloat16", "SDPA", "lowest of 1", "30.00", "", "20", "met"],
    ]
    assert sheet.notes[0] == "4 floors, 3 short"
    assert len(sheet.notes) == 2
    assert len(floors_sheet({"window": lines["window"]}).notes) == 1, "nothing to explain where no rate was timed"


def test_suite_sheet_shows_share_of_limit() -> None:
    rows = [line("a", {"clearhead": 0.010, SDPA: 0.015}, limit=125.0), line("b", {"clearhead": 0.010, SDPA: 0.015})]
    sheet = suite_sheet("training", rows)
    assert [dict(zip(sheet.header, row, strict=True))["of limit"] for row in sheet.rows] == ["0.80", ""]
    assert "of limit" not in suite_sheet("training", rows[1:]).header


def test_decode_row_shows_bandwidth() -> None:
    sheet = suite_sheet("decode", [line("d", {"clearhead": 0.001, SDPA: 0.002}, memory_read=4e7)])
    assert dict(zip(sheet.header, sheet.rows[0], strict=True))["GB/s"] == "40.0 against 20.0"


def test_grid_sheet_lists_slower_calls_and_summarises_all() -> None:
    fast = replace(POINT, title="large", ratio=2.0, against_itself=None)
    sheet = grid_sheet([fast, POINT])
    assert [row[0] for row in sheet.rows] == ["small (sdpa)"]
    notes = "\n".join(sheet.notes)
    assert "2 calls, 1 slower than SDPA by more than 3 %" in notes
    assert "worst 0.500x at small; median 1.25x; geometric mean 1.00x" in notes
    assert "off by at most 0.002" in notes
    assert grid_sheet([fast]).rows == []


def test_block_contains_every_suite_and_replaces_the_old_block(tmp_path: Path) -> None:
    rows = {"decode": line("d", {"clearhead": 0.001, SDPA: 0.002}), "window": line("w", {"clearhead": 1.0, SDPA: 30.0})}
    for name, one in rows.items():
        Journal(tmp_path / f"{name}.json", command=f"clearhead bench --suite {name}", load_before=0.1).add(
            one.to_dict()
        )
    Journal(tmp_path / "grid.json", command="clearhead bench --grid", load_before=0.1).add(POINT.to_dict())
    timings = {FULL: Timing.of((0.004, 0.004)), "window": Timing.of((0.001, 0.001))}
    sparse = SparsePoint(title="s", mode="forward", length=1024, timings=timings, errors=dict.fromkeys(timings, 1e-7))
    Journal(tmp_path / "sparse.json", command="clearhead bench --sparse", load_before=0.1).add(sparse.to_dict())
    text = block(tmp_path)
    places = [text.index(f"### {name}") for name in ("floors", "decode", "window", "sparse", "grid")]
    assert places == sorted(places)
    assert "| window, forward | 1 (0.25x) | from 1024 |" in text
    assert "| window | float32 | SDPA | lowest of 1 | 30.00 |  | 20 | met |" in text
    assert "`clearhead bench --suite decode`" in text
    mentions = re.findall(
        rf"kernels {native_library.isa_name()} \(at most \d+ GFLOP/s in float32 and \d+ .*\), load", text
    )
    assert len(mentions) == (4 if native_library.library() is not None else 0)
    assert "| d (native) | 1 [1, 1] | 2 (2.00x) [2, 2] |" in text
    results = tmp_path / "RESULTS.md"
    results.write_text("# Results\n\n<!-- bench: begin -->\nold\n<!-- bench: end -->\n\n<!-- demo: begin -->\nkept\n")
    write_block(results, text)
    assert results.read_text() == f"# Results\n\n{text}\n\n<!-- demo: begin -->\nkept\n"
    write_block(results, text)
    assert results.read_text().count("### decode") == 1
    write_block(tmp_path / "NEW.md", text)
    assert (tmp_path / "NEW.md").read_text() == f"# Results\n\n{text}\n"
