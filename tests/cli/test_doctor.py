"""clearhead doctor from outside, and the facts behind it."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
import torch
from typer.testing import CliRunner

from clearhead import doctor
from clearhead.cli.app import app
from clearhead.dispatch import BACKENDS


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure small things: the tests look at what is said, not how fast the machine is."""
    monkeypatch.setattr(doctor, "MATRIX", 64)
    monkeypatch.setattr(doctor, "ATTENTION", (1, 2, 32, 8))
    monkeypatch.setattr(doctor, "SECONDS_EACH", 0.0)


def test_doctor_shows_every_backend_and_a_verdict() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.stderr
    for name in BACKENDS:
        assert name in result.stdout
    for words in ("machine", "software", "measured, GFLOP/s", torch.__version__, "usable cores"):
        assert words in result.stdout
    last = result.stdout.strip().splitlines()[-1]
    assert last == "nothing is missing." or last.startswith("missing or in the way: ")


def test_json_has_every_rate_or_its_reason() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.stderr
    read = json.loads(result.stdout)
    assert list(read["backends"]) == list(BACKENDS)
    assert read["torch"]["version"] == torch.__version__
    assert len(read["rates"]) == 4 + len(BACKENDS)
    for rate in read["rates"]:
        assert (rate["gflops"] is None) == bool(rate["reason"])
        assert rate["gflops"] is None or rate["gflops"] > 0
    assert read["verdict"]


def test_unusable_backend_shows_the_reason() -> None:
    rates = {rate.what.split(", ")[-1]: rate for rate in doctor.diagnose().rates}
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device, so flex can run")
    assert rates["flex"].gflops is None
    assert "CUDA" in str(rates["flex"].reason)
    assert rates["tiled"].gflops is not None


def test_missing_extras_show_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = ["torch>=2", 'no-such-thing>=1; extra == "train"', 'numpy>=1; extra == "train"', 'x; extra == "dev"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: declared)
    diagnosis = doctor.diagnose()
    assert diagnosis.extras == {"train": {"no-such-thing": None, "numpy": metadata.version("numpy")}}
    assert "no-such-thing (install clearhead[train])" in diagnosis.verdict


@pytest.mark.slow
def test_missing_compiler_and_too_many_threads_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: 10_000)
    verdict = doctor.diagnose().verdict
    assert "a C++ compiler" in verdict
    assert "set OMP_NUM_THREADS=" in verdict


def test_verdict_without_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = doctor.diagnose()
    assert doctor.Diagnosis(**{**vars(diagnosis), "missing": []}).verdict == "nothing is missing."


def test_an_unknown_option_is_one_line_and_exit_code_2() -> None:
    result = CliRunner().invoke(app, ["doctor", "--loud"])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
