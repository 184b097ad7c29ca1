"""A run killed at any moment and resumed is, bit for bit, the run that was never killed."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.processes import started

from clearhead.cli.app import app
from clearhead.errors import DataError
from clearhead.projection import KINDS, choice
from clearhead.train import ClassifierOptions, train_text_classifier
from clearhead.train.batches import bucketed
from clearhead.train.files import clear_leftovers
from clearhead.train.progress import Lines

from .conftest import TINY

CLASSIFY = ["train", "classify", "--epochs", "6", "--average", "0.9", "--patience", "99", "--embed-dim", "16"]
LM = ["train", "lm", "--steps", "60", "--eval-every", "25", "--context", "16", "--embed-dim", "16", "--dropout", "0.1"]
COMMANDS = {"classify": [*CLASSIFY, "--batch-size", "4"], "lm": LM}


def _command(words: list[str]) -> None:
    torch.set_num_threads(1)
    app(words)


def _start(command: list[str], data: Path, out: Path) -> ForkServerProcess:
    words = [*command, "--data", str(data), "--out", str(out), "--checkpoint-every", "3", "--num-heads", "2"]
    return started(_command, words, errors=out.with_suffix(".errors"))


def _finish(command: list[str], data: Path, out: Path) -> None:
    process = _start(command, data, out)
    process.join(timeout=240)
    assert process.exitcode == 0, out.with_suffix(".errors").read_text()


def _kill_after_checkpoints(process: ForkServerProcess, checkpoint: Path, count: int) -> None:
    """Kill the process once it has written ``count`` checkpoints, wherever that finds it."""
    times: set[int] = set()
    deadline = time.monotonic() + 240
    while len(times) < count and process.is_alive() and time.monotonic() < deadline:
        if checkpoint.exists():
            times.add(checkpoint.stat().st_mtime_ns)
        time.sleep(0.0005)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "the run ended before it could be killed"


def _numbers(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


@pytest.mark.slow
@pytest.mark.parametrize("task", COMMANDS)
def test_killed_run_resumes_bitwise(task: str, table: Path, play: Path, tmp_path: Path) -> None:
    data, command = {"classify": table, "lm": play}[task], COMMANDS[task]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    _finish(command, data, whole)
    for round_, count in enumerate((2, 5)):
        process = _start([*command, "--resume"] if round_ else command, data, killed)
        _kill_after_checkpoints(process, killed / "checkpoint" / "last.safetensors", count)
        assert not (killed / "metrics.json").exists()
    _finish([*command, "--resume"], data, killed)

    for name in ("model.safetensors", "checkpoint/last.safetensors"):
        expected, resumed = load_file(whole / name), load_file(killed / name)
        assert expected.keys() == resumed.keys()
        assert all(torch.equal(expected[key], resumed[key]) for key in expected), name
    assert _numbers(killed / "log.jsonl") == _numbers(whole / "log.jsonl")
    metrics = [json.loads((run / "metrics.json").read_text()) for run in (whole, killed)]
    assert metrics[0] | {"seconds": 0} == metrics[1] | {"seconds": 0}


def test_only_leftovers_of_a_kill_are_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    for name in (".half-written-x", "checkpoint/.half-written-y", ".keep", "config.json"):
        (tmp_path / name).touch()
    clear_leftovers(tmp_path)
    assert sorted(item.name for item in tmp_path.rglob("*")) == [".keep", "checkpoint", "config.json"]


class _Killed(BaseException):
    """Stands for a kill inside this process: nothing of ours catches it."""


OPTIONS = ClassifierOptions(**TINY, epochs=2, checkpoint_every=3)


@pytest.fixture(scope="module")
def whole(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never killed."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train_text_classifier(table, out=out, options=OPTIONS)
    return out


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "moment", [pytest.param(moment, marks=[pytest.mark.slow] * (moment % 3 != 1)) for moment in range(1, 12)]
)
def test_kill_between_any_two_writes_resumes_bitwise(
    table: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Every file is written by one function; dying just before its n-th call covers every order of files."""
    killed = tmp_path / "killed"
    calls = 0

    def dying(source: str, target: str) -> None:
        nonlocal calls
        calls += 1
        if calls == moment:
            raise _Killed
        os.rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr("clearhead.train.files.os.replace", dying)
        with pytest.raises(_Killed):
            train_text_classifier(table, out=killed, options=OPTIONS)
    train_text_classifier(table, out=killed, options=OPTIONS, resume=True)
    assert not [item.name for item in killed.rglob(".*")], "temporary files are left"
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert _numbers(killed / "log.jsonl") == _numbers(whole / "log.jsonl")


def test_finished_run_is_unmodified(table: Path, tmp_path: Path) -> None:
    options = ClassifierOptions(**TINY, epochs=1)
    metrics = train_text_classifier(table, out=tmp_path / "run", options=options)
    before = (tmp_path / "run" / "checkpoint" / "last.safetensors").stat().st_mtime_ns
    assert train_text_classifier(table, out=tmp_path / "run", options=options, resume=True) == metrics
    assert (tmp_path / "run" / "checkpoint" / "last.safetensors").stat().st_mtime_ns == before


def test_resuming_with_other_options_or_data_raises(table: Path, tmp_path: Path) -> None:
    options = ClassifierOptions(**TINY, epochs=1)
    train_text_classifier(table, out=tmp_path / "run", options=options)
    other = ClassifierOptions(**TINY, epochs=1, lr=0.5)
    with pytest.raises(DataError, match=r"got options lr = 0\.5 instead of 0\.001\. Repeat the first command"):
        train_text_classifier(table, out=tmp_path / "run", options=other, resume=True)
    changed = tmp_path / "films.csv"
    changed.write_text(table.read_text() + "good,one more\n")
    with pytest.raises(DataError, match=r"must be resumed with the same task, data and options; got data "):
        train_text_classifier(changed, out=tmp_path / "run", options=options, resume=True)


def test_other_number_of_threads_is_reported(table: Path, tmp_path: Path) -> None:
    options = ClassifierOptions(**TINY, epochs=1)
    run = tmp_path / "run"
    train_text_classifier(table, out=run, options=options)
    (run / "metrics.json").unlink()
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"threads": 99}))
    stream = io.StringIO()
    train_text_classifier(table, out=run, options=options, resume=True, watcher=Lines(stream))
    assert "threads differ from those at the start of the run, so rounding may differ" in stream.getvalue()


def test_other_gemm_implementations_are_reported(table: Path, tmp_path: Path) -> None:
    """The run goes on by the table of this processor."""
    options = ClassifierOptions(**TINY, epochs=1)
    run = tmp_path / "run"
    train_text_classifier(table, out=run, options=options)
    config = json.loads((run / "config.json").read_text())
    assert config["products"] == {kind: choice(kind).path for kind in KINDS}
    for products, said in ((config["products"], False), ({"forward": "another"}, True), (None, True)):
        (run / "metrics.json").unlink()
        (run / "config.json").write_text(json.dumps(config | {"products": products}))
        stream = io.StringIO()
        train_text_classifier(table, out=run, options=options, resume=True, watcher=Lines(stream))
        assert ("products differ" in stream.getvalue()) == said


def test_damaged_checkpoint_raises_one_line(table: Path, tmp_path: Path) -> None:
    options = ClassifierOptions(**TINY, epochs=1)
    run = tmp_path / "run"
    train_text_classifier(table, out=run, options=options)
    (run / "metrics.json").unlink()
    checkpoint = run / "checkpoint" / "last.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"last.safetensors must be a complete safetensors file"):
        train_text_classifier(table, out=run, options=options, resume=True)


def test_batch_depends_on_its_step_alone(table: Path) -> None:
    import numpy as np

    from clearhead.train.batches import Sequences
    from clearhead.train.classify import ClassifierTask

    rows = Sequences([[1] * (1 + number % 7) for number in range(50)], [number % 2 for number in range(50)])
    options = ClassifierOptions(**TINY, epochs=3)
    walked = ClassifierTask(rows, rows, options, None)
    for step in range(walked.steps):
        jumped = ClassifierTask(rows, rows, options, None)
        assert torch.equal(jumped.batch(step).ids, walked.batch(step).ids)
    plan = bucketed(np.array([len(row) for row in rows.ids]), batch_size=8, batch_tokens=8192, seed=0, epoch=2)
    assert walked.steps == 3 * len(plan)
