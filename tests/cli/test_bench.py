"""clearhead bench from outside."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.benchmark.test_lines import line
from tests.commands import texts_of

from clearhead.benchmark import Line
from clearhead.benchmark.rows import SuiteRow
from clearhead.errors import UnsupportedError

TINY = ("--shape", "1,2,16,8", "--dtype", "float32", "--repeats", "3")


def run(*arguments: str) -> tuple[int, str, str]:
    return texts_of("bench", *arguments)


@pytest.mark.slow
def test_bench_prints_tables_and_writes_json_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra bench")
    folder = tmp_path / "new" / "place"
    code, out, err = run(*TINY, "--out", str(folder))
    assert code == 0, err
    for words in ("Attention alone", "Module with projections", "nn.MultiheadAttention", "SDPA", "textbook formula"):
        assert words in out
    assert "[8/8]" in err, "progress"
    read = json.loads((folder / "bench.json").read_text())
    assert read["command"] == "clearhead bench --shape 1,2,16,8 --dtype float32 --repeats 3"
    assert len(read["results"]) == 8
    assert all(len(one["seconds"]["runs"]) == 3 for row in read["results"] for one in row["contenders"].values())
    assert (folder / "bench.svg").read_text().startswith("<?xml")
    assert sorted(path.name for path in folder.iterdir()) == ["bench.json", "bench.svg"]


@pytest.mark.slow
def test_bench_without_matplotlib_skips_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run(*TINY, "--out", str(tmp_path))
    assert code == 0, err
    assert "no plot: it needs the extra 'bench'; install clearhead[bench]." in out
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_an_interruption_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead import benchmark

    def stopped(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "measure", stopped)
    code, out, err = run(*TINY, "--out", str(tmp_path / "out"))
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "clearhead: interrupted."
    assert list(tmp_path.iterdir()) == []


def test_list_names_every_suite_without_measuring(tmp_path: Path) -> None:
    from clearhead.benchmark import SUITES

    code, out, err = run("--list", "--out", str(tmp_path / "out"))
    assert (code, err) == (0, "")
    assert [line.split()[1] for line in out.splitlines()[:-1]] == list(SUITES)
    assert "--grid" in out.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_list_of_a_suite_shows_the_titles_of_its_rows() -> None:
    from clearhead.benchmark import SUITES

    code, out, err = run("--list", "--suite", "decode")
    assert (code, err) == (0, "")
    assert out.splitlines() == [row.title for row in SUITES["decode"].rows()]
    assert run("--list", "--suite", "decode,window")[1].splitlines()[-1].startswith("window: ")


def test_only_measures_the_rows_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead import benchmark
    from clearhead.benchmark.peers import SDPA

    def fake(row: SuiteRow, **_: object) -> Line:
        return line(row.title, {"clearhead": 0.001, SDPA: 0.002}, group=row.group)

    monkeypatch.setattr(benchmark, "measure_row", fake)
    monkeypatch.setattr(benchmark, "check_backends", lambda: {})
    code, _, err = run("--suite", "decode,window", "--only", "8192", "--only", "16x32", "--out", str(tmp_path))
    assert code == 0, err
    for name, part in (("decode", "16x32"), ("window", "8192")):
        read = json.loads((tmp_path / f"{name}.json").read_text())
        titles = [row.title for row in benchmark.SUITES[name].rows() if part in row.title]
        assert [row["title"] for row in read["rows"]] == titles
        assert titles
        assert read["head"]["command"] == f"clearhead bench --suite {name} --only 8192 --only 16x32"


def test_against_runs_clearhead_and_the_named_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead import benchmark
    from clearhead.benchmark.model_peers.rows import ModelRow

    peers: dict[str, list[str]] = {}

    def fake(row: ModelRow, **_: object) -> Line:
        peers[row.title] = [peer.name for peer in row.peers]
        return line(row.title, dict.fromkeys(peers[row.title], 0.001), group=row.group)

    monkeypatch.setattr(benchmark, "measure_row", fake)
    monkeypatch.setattr(benchmark, "check_backends", lambda: {})
    words = ("--suite", "peers", "--only", "batch 1", "--against", "OpenVINO, llama.cpp", "--out", str(tmp_path))
    code, _, err = run(*words)
    assert code == 0, err
    title = "Llama 8x1024 a token at 512, batch 1"
    assert peers == {
        f"{title}, float32": ["clearhead", "OpenVINO", "llama.cpp"],
        f"{title}, bfloat16": ["clearhead", "OpenVINO", "llama.cpp"],
        f"{title}, int8": [
            "clearhead", "clearhead int8", "clearhead int4", "OpenVINO", "llama.cpp q8_0", "llama.cpp q4_0",
        ],
    }  # fmt: skip
    command = json.loads((tmp_path / "peers.json").read_text())["head"]["command"]
    assert command == "clearhead bench --suite peers --only 'batch 1' --against 'OpenVINO, llama.cpp'"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--only", "x"), "--only must be used with --suite, --grid or --sparse; got none of them"),
        (("--suite", "decode", "--only", "16x33"), "--only must be part of a row's title; got '16x33'"),
        (("--grid", "--only", "16x33"), "--only must be part of a row's title; got '16x33'"),
        (("--suite", "peers", "--dtype", "float32", "--only", "int8"), "--only must be part of a row's title"),
        (("--suite", "decode", "--against", "OpenVINO"), "--against must be used with --suite peers; got decode"),
        (("--against", "OpenVINO"), "--against must be used with --suite peers; got no suite"),
        (("--suite", "peers", "--against", "OpenVINO,"), "--against must name peers, or parts of their names; got ''"),
        (("--suite", "peers", "--against", "jax"), "got 'jax'. They are torch sdpa, torch.compile, "),
    ],
)
def test_choice_of_nothing_is_refused(words: tuple[str, ...], rule: str, tmp_path: Path) -> None:
    code, out, err = run(*words, "--out", str(tmp_path / "out"))
    assert (code, out) == (2, "")
    assert rule in err
    assert list(tmp_path.iterdir()) == []


def test_all_leaves_out_the_suite_peers_unless_it_is_named() -> None:
    from clearhead.cli.bench_options import suite_names

    assert "peers" not in suite_names("all", None, with_grid=False)
    assert "forward" in suite_names("all", None, with_grid=False)
    assert suite_names("peers,all", None, with_grid=False)[0] == "peers"


QUICK = ("--quick", "--repeats", "3")


@pytest.mark.slow
def test_suites_are_measured_and_written_to_markdown(tmp_path: Path) -> None:
    folder, results = tmp_path / "out", tmp_path / "RESULTS.md"
    code, out, err = run("--suite", "decode,module", *QUICK, "--out", str(folder), "--results", str(results))
    assert code == 0, err
    for words in ("backend tiled: 24 small calls correct", "1x32/8x1:48x16", "nn.MultiheadAttention", "floors are not"):
        assert words in out
    assert sorted(path.name for path in folder.iterdir()) == ["decode.json", "module.json"]
    read = json.loads((folder / "decode.json").read_text())
    assert read["head"]["command"] == "clearhead bench --suite decode --quick --repeats 3"
    assert [row["group"] for row in read["rows"]] == ["float32"] * 2 + ["bfloat16"] * 2
    assert "### module" in results.read_text()
    resumed = tmp_path / "again.md"
    code, out, err = run("--out", str(folder), "--results", str(resumed))
    assert (code, out, err) == (0, f"wrote the block 'bench' into {resumed}\n", ""), "nothing is measured a second time"
    assert resumed.read_text() == results.read_text()


def test_interrupted_suite_keeps_its_rows_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead import benchmark

    asked: list[str] = []
    honest = benchmark.measure_row

    def stopping(row: SuiteRow, **options: int) -> Line:
        if len(asked) == 1:
            asked.append("")
            raise KeyboardInterrupt
        asked.append(row.title)
        return honest(row, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(benchmark, "measure_row", stopping)
    monkeypatch.setattr(benchmark, "check_backends", lambda: {})
    words = ("--suite", "decode", "--dtype", "float32", *QUICK, "--out", str(tmp_path))
    assert run(*words)[0] == 130
    assert [row["title"] for row in json.loads((tmp_path / "decode.json").read_text())["rows"]] == asked[:1]
    assert run(*words, "--resume")[0] == 0
    assert len(asked) == 3, "the first row was kept, the second measured"
    assert len(json.loads((tmp_path / "decode.json").read_text())["rows"]) == 2


def test_several_suites_print_one_table_of_floors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead import benchmark
    from clearhead.benchmark.peers import SDPA

    def fake(row: SuiteRow, **_: object) -> Line:
        return line(row.title, {"clearhead": 0.001, SDPA: 0.019}, group=row.group)

    monkeypatch.setattr(benchmark, "measure_row", fake)
    monkeypatch.setattr(benchmark, "check_backends", lambda: {})
    code, out, err = run("--suite", "decode,window", "--out", str(tmp_path))
    assert code == 0, err
    assert "floors: each floor and the measured figure" in out
    assert "4 floors, 2 short" in out.splitlines(), "decode's are met, window's are not"
    assert "floors:" not in run("--suite", "decode", "--out", str(tmp_path))[1], "one suite says so itself"


def test_grid_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead import benchmark
    from clearhead.benchmark import sweep

    monkeypatch.setattr(benchmark, "check_backends", lambda: {})
    monkeypatch.setattr(sweep, "RETRY", (5, 0.0, 3))
    monkeypatch.setattr(benchmark, "grid_rows", lambda rows=benchmark.grid_rows: rows()[:1])
    code, out, err = run("--grid", "--out", str(tmp_path))
    assert code == 0, err
    assert "1 calls" in out
    assert "1x1x8x8 full forward float32" in out
    assert len(json.loads((tmp_path / "grid.json").read_text())["rows"]) == 1


def test_wrong_backend_prevents_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clearhead import benchmark

    def red() -> dict[str, int]:
        raise UnsupportedError("bench: a backend is wrong.")

    monkeypatch.setattr(benchmark, "check_backends", red)
    code, out, err = run("--suite", "all", "--grid", "--out", str(tmp_path / "out"))
    assert (code, out, err) == (2, "", "bench: a backend is wrong.\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--suite", "fast"), "--suite must contain only forward, training, dropout"),
        (("--suite", ""), "--suite must contain only"),
        (("--suite", "decode", "--shape", "1,2,3,4"), "--shape must not be used with --suite or --grid"),
        (("--grid", "--shape", "1,2,3,4"), "--shape must not be used with --suite or --grid"),
        (("--results", "R.md"), "--results must have suites, the grid or patterns to show; got none of them in"),
        (
            ("--results", "R.md", "--shape", "1,2,3,4"),
            "--results must have suites, the grid or patterns to show; got --shape",
        ),
        (("--shape", "1,2,3"), "--shape must be four whole numbers of at least 1; got '1,2,3'"),
        (("--shape", "1,2,3,four"), "--shape must be four whole numbers"),
        (("--shape", "0,2,3,4"), "--shape must be four whole numbers"),
        (("--shape", "1,1,-3,4"), "--shape must be four whole numbers"),
        (("--shape", "1,1,100000,4"), "--shape must have a length of at most 32768"),
        (("--shape", "9999,9999,99,99"), "numbers in all"),
        (("--dtype", "float32,int8"), "--dtype must contain only float32, bfloat16, float16; got 'int8'"),
        (("--dtype", ""), "--dtype must contain only"),
        (("--repeats", "0"), "--repeats must be at least 1; got 0"),
        (("--repeats", "many"), "--repeats"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    code, out, err = run(*arguments, "--out", str(tmp_path / "out"))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert words in err
    assert list(tmp_path.iterdir()) == []


def test_out_that_is_a_file_is_refused_before_measuring(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    code, _, err = run(*TINY, "--out", str(file))
    assert code == 2
    assert "--out must be a folder" in err
    assert file.read_text() == "mine"
