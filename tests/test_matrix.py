"""The version matrix: which pairs run, what is recorded, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import matrix
from tools.matrix import Pair, Result


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The pairs that ran; none installs anything, and those with torch 2.12.1 fail."""
    names: list[str] = []

    def try_pair(pair: Pair, tests: object, marked: str, state: str) -> Result:
        names.append(pair.name)
        return Result(matrix.FAILED if pair.torch == "2.12.1" else matrix.PASSED, "1 test", state)

    monkeypatch.setattr(matrix, "try_pair", try_pair)
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "results.json")
    return names


def test_only_runs_the_named_pair(ran: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    matrix.main(["--only", "torch=2.11.0,transformers=4.57.6"])
    assert ran == ["torch-2.11.0-transformers-4.57.6"]
    assert "2.11.0  4.57.6        passed   1 test" in capsys.readouterr().out


def test_recorded_outcome_is_not_run_twice_on_the_same_files(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    only = ["--only", "torch=2.11.0"]
    matrix.main(only)
    matrix.main(only)
    assert len(ran) == len(matrix.TRANSFORMERS)
    matrix.main([*only, "--rerun"])
    assert len(ran) == 2 * len(matrix.TRANSFORMERS)
    monkeypatch.setattr(matrix, "fingerprint", lambda: "other files")
    matrix.main(only)
    assert len(ran) == 3 * len(matrix.TRANSFORMERS)


def test_failed_pair_exits_with_1_and_a_list_runs_nothing(ran: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        matrix.main(["--only", "torch=2.12.1"])
    assert caught.value.code == 1
    matrix.main(["--list"])
    assert len(ran) == len(matrix.TRANSFORMERS)
    assert capsys.readouterr().out.count("not run") == len(matrix.all_pairs()) - len(ran)


def test_interrupted_run_keeps_what_it_recorded(
    ran: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix.main(["--only", "torch=2.11.0,transformers=4.57.6"])

    def interrupted(*arguments: object) -> Result:
        raise KeyboardInterrupt

    monkeypatch.setattr(matrix, "try_pair", interrupted)
    with pytest.raises(SystemExit) as caught:
        matrix.main(["--only", "torch=2.11.0"])
    assert caught.value.code == 130
    assert "interrupted" in capsys.readouterr().err
    matrix.main(["--list", "--only", "torch=2.11.0"])
    assert capsys.readouterr().out.count("passed") == 1


@pytest.mark.parametrize("only", ["torch=1.0", "numpy=2.0", "torch", "torch=2.11.0,"])
def test_unlisted_release_is_refused_in_one_line(only: str, ran: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        matrix.main(["--only", only])
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert said.startswith("matrix: --only must name releases of the matrix; got ")
    assert said.count("\n") == 1
    assert ran == []


@pytest.mark.slow
def test_release_that_pip_does_not_find_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / ".ready").touch()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    result = matrix.try_pair(Pair("0.0.1", "0.0.1"), [], "", "")
    assert result.outcome == matrix.NOT_INSTALLED
    assert "\n" not in result.summary
    assert "No matching distribution" in result.summary
