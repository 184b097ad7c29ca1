"""Measuring, the report, the table, the memory and the picture."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

from clearhead.benchmark import Setting, SettingResult, Timing, load, machine, measure, peak_extra_bytes, report
from clearhead.benchmark.table import contenders, summary, tables

SETTING = Setting("attention", "forward", (1, 2, 32, 8), torch.float32, True)


def result(**seconds: float) -> SettingResult:
    timings = {name.replace("_", " "): Timing(s, 0.9 * s, 1.2 * s, (s,)) for name, s in seconds.items()}
    return SettingResult(
        setting=SETTING,
        backend="sdpa",
        timings=timings,
        errors=dict.fromkeys(timings, 1e-7),
        extra_bytes={"clearhead": 3 * 2**20},
        left_out={"someone": "too large"},
    )


@pytest.fixture(scope="module")
def measured() -> list[SettingResult]:
    return [measure(replace(SETTING, level=level), repeats=3) for level in ("attention", "module")]


def test_measured_setting_has_timing_and_error_of_each_contender(measured: list[SettingResult]) -> None:
    for each in measured:
        assert set(each.timings) == set(each.errors)
        assert all(timing.q1 <= timing.median <= timing.q3 for timing in each.timings.values())
        assert each.ratio("clearhead") == 1.0
        assert each.rate("clearhead") > 0


def test_report_is_json_with_machine_and_versions(measured: list[SettingResult]) -> None:
    read = json.loads(json.dumps(report(measured, command="clearhead bench --quick", load_before=0.5), allow_nan=False))
    assert read["command"] == "clearhead bench --quick"
    assert read["versions"]["torch"] == torch.__version__
    assert read["threads"]["intra_op"] == torch.get_num_threads()
    assert read["machine"]["cores"] >= 1
    assert read["results"][0]["contenders"]["clearhead"]["seconds"]["runs"]
    assert read["results"][0]["shape"] == [1, 2, 32, 8]


def test_ratios_and_rates_use_medians() -> None:
    one, other = result(clearhead=0.010, textbook_formula=0.020), result(clearhead=0.010, textbook_formula=0.080)
    assert one.ratio("textbook formula") == 2.0
    assert one.rate("clearhead") == SETTING.operations / 0.010 / 1e9
    (line,) = summary([one, other])
    assert "textbook formula 4.00x (2.00 to 8.00)" in line
    assert contenders([one]) == ["clearhead", "textbook formula", "someone"]


def test_table_shows_median_ratio_quartiles_memory_and_left_out() -> None:
    from rich.console import Console

    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in tables([result(clearhead=0.010, textbook_formula=0.020)]):
        console.print(table)
    text = console.export_text()
    for words in ("10", "20 (2.00x)", "[9, 12] 3.0 MiB", "[18, 24]", "left out", "1x2x32x8 (sdpa)", "causal"):
        assert words in text


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of resident memory")
def test_peak_extra_bytes_is_the_peak_of_a_call() -> None:
    size = 64 * 2**20

    def call() -> torch.Tensor:
        scratch = torch.ones(size, dtype=torch.uint8)
        return scratch[:1].clone()

    peak = peak_extra_bytes(call)
    assert peak is not None
    assert 0.95 * size < peak < 1.1 * size


def test_peak_extra_bytes_is_none_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    from clearhead.benchmark import memory

    monkeypatch.setattr(memory, "RESET", Path("/nowhere/clear_refs"))
    assert peak_extra_bytes(lambda: None) is None


@pytest.mark.slow
def test_plot_is_svg_with_all_names_and_no_external_resources() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    from clearhead.benchmark.plot import plot_svg

    one = result(clearhead=0.010, textbook_formula=0.020)
    drawn = plot_svg([one, replace(one, setting=replace(SETTING, level="module"))], caption="a <machine>")
    root = ElementTree.fromstring(drawn)
    assert root.tag.endswith("svg")
    assert b"<image" not in drawn
    assert drawn == plot_svg([one, replace(one, setting=replace(SETTING, level="module"))], caption="a <machine>")


def test_machine_is_json() -> None:
    facts = machine()
    json.dumps(facts)
    assert facts["cores"] >= 1
    assert facts["processor"]
    busy = load()
    assert busy is None or busy >= 0.0
