"""clearhead bench from outside."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clearhead.cli.app import app

TINY = ("--shape", "1,2,16,8", "--dtype", "float32", "--repeats", "3")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", *arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_it_prints_tables_and_writes_json_and_a_plot(tmp_path: Path) -> None:
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


def test_without_the_extra_it_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--shape", "1,2,3"), "--shape must be four whole numbers of at least 1; got '1,2,3'"),
        (("--shape", "1,2,3,four"), "--shape must be four whole numbers"),
        (("--shape", "0,2,3,4"), "--shape must be four whole numbers"),
        (("--shape", "1,1,-3,4"), "--shape must be four whole numbers"),
        (("--shape", "1,1,100000,4"), "--shape must have a length of at most 32768"),
        (("--shape", "9999,9999,99,99"), "numbers in all"),
        (("--dtype", "float32,int8"), "--dtype must hold only float32, bfloat16, float16; got 'int8'"),
        (("--dtype", ""), "--dtype must hold only"),
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


def test_a_file_in_place_of_the_folder_is_refused_before_measuring(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    code, _, err = run(*TINY, "--out", str(file))
    assert code == 2
    assert "--out must be a folder" in err
    assert file.read_text() == "mine"
