"""A folder has one writer at a time; a writer that was killed locks nothing."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from tests.processes import started
from tests.threads import on_threads

from clearhead.cli.app import app
from clearhead.errors import DataError
from clearhead.train import ClassifierOptions, load_run, train_text_classifier
from clearhead.train.lock import LOCK, one_writer

from .conftest import TINY

SMALL = ["--num-heads", "2", "--batch-size", "8", "--checkpoint-every", "1"]


def _until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.005)


def _hold(folder: Path, ready: Path) -> None:
    with one_writer(folder, function="train", say=print):
        ready.touch()
        time.sleep(300)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[ForkServerProcess]:
    """Another process, which holds the folder ``run``."""
    process = started(_hold, tmp_path / "run", tmp_path / "ready", errors=tmp_path / "errors")
    _until((tmp_path / "ready").exists)
    yield process
    process.kill()
    process.join()


def _enter(folder: Path) -> None:
    with one_writer(folder, function="train", say=pytest.fail):
        pass


def test_second_writer_is_refused_in_one_line(holder: ForkServerProcess, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        _enter(tmp_path / "run")
    said = str(refused.value)
    assert said.startswith(f"train: {tmp_path / 'run'} must have one writer at a time; got process {holder.pid} on ")
    assert said.endswith(" as well. Wait until it ends, or choose another --out.")
    _enter(tmp_path / "other")


def test_killed_writer_locks_nothing(holder: ForkServerProcess, tmp_path: Path) -> None:
    holder.kill()
    holder.join()
    assert holder.exitcode == -signal.SIGKILL
    assert (tmp_path / "run" / LOCK).exists()
    _enter(tmp_path / "run")
    assert not (tmp_path / "run" / LOCK).exists()


def test_threads_of_one_process_are_refused_too(tmp_path: Path) -> None:
    with one_writer(tmp_path, function="train", say=pytest.fail), pytest.raises(DataError, match="one writer"):
        _enter(tmp_path)
    _enter(tmp_path)


def test_lock_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    _enter(tmp_path / "full")
    _enter(tmp_path / "a" / "b")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full"]
    with one_writer(tmp_path / "new", function="train", say=pytest.fail):
        (tmp_path / "new" / "result").touch()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["result"]


@pytest.mark.parametrize("folder", ["run", "runs/of/today"])
def test_many_threads_have_the_folder_in_turns(tmp_path: Path, folder: str) -> None:
    """The end of one writer removes the file, and the folders, that another one has just made or opened."""
    inside, most, entered, odd = 0, 0, 0, list[BaseException]()
    guard = threading.Lock()

    def work(_: int) -> None:
        nonlocal inside, most, entered
        for _ in range(200):
            try:
                with one_writer(tmp_path / folder, function="train", say=pytest.fail):
                    with guard:
                        inside += 1
                        most, entered = max(most, inside), entered + 1
                    time.sleep(0)
                    with guard:
                        inside -= 1
            except DataError as failure:
                if "one writer" not in str(failure):
                    odd.append(failure)

    on_threads(4, work)
    assert (odd, most) == ([], 1)
    assert entered > 10


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o500)
    with pytest.raises(DataError, match=r"train: --out must be writable; got .*run: Permission denied"):
        _enter(tmp_path / "run")


@pytest.mark.parametrize("place", ["file", "file/run", "link"])
def test_place_that_is_no_folder_is_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere/at/all")
    with pytest.raises(DataError, match=r"train: --out must be writable; got .*: (Not a directory|File exists)"):
        _enter(tmp_path / place)


def test_lock_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(DataError, match="--out must be writable"):
        _enter(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "text"


def test_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr("clearhead.train.lock.fcntl", None)
    with one_writer(tmp_path / "run", function="train", say=said.append):
        pass
    assert said == [f"{tmp_path / 'run'} is on a system without file locks: run one command at a time in it"]


@pytest.mark.parametrize(
    "words",
    [
        ("train", "classify", "--data", "{table}", "--out"),
        ("train", "lm", "--data", "{play}", "--out"),
        ("bench", "--quick", "--out"),
        ("bench", "--quick", "--suite", "forward", "--out"),
        ("demo", "--quick", "--out"),
    ],
    ids=" ".join,
)
def test_every_command_that_fills_a_folder_is_refused(
    holder: ForkServerProcess, tmp_path: Path, table: Path, play: Path, words: tuple[str, ...]
) -> None:
    from typer.testing import CliRunner

    command = [word.format(table=table, play=play) for word in words]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "run")])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert f"{tmp_path / 'run'} must have one writer at a time; got process {holder.pid} on " in done.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]


def _train(table: Path, out: Path, width: int) -> None:
    size = ["--embed-dim", str(width), "--num-layers", "1", "--epochs", "4"]
    app(["train", "classify", "--data", str(table), "--out", str(out), *SMALL, *size])


@pytest.mark.slow
def test_two_trainings_at_once_leave_one_whole_run(table: Path, tmp_path: Path) -> None:
    for delay in (0.0, 0.1, 0.3):
        out = tmp_path / f"run{delay}"
        errors = [tmp_path / f"errors{delay}-{width}" for width in (16, 32)]
        pair = []
        for width, file in zip((16, 32), errors, strict=True):
            pair.append(started(_train, table, out, width, errors=file))
            time.sleep(delay)
        for process in pair:
            process.join(240)
        assert sorted(process.exitcode for process in pair) == [0, 2]
        said = [file.read_text() for file, process in zip(errors, pair, strict=True) if process.exitcode == 2]
        assert "must have one writer at a time" in said[0] or "must be a new or empty folder" in said[0]
        config = json.loads((out / "config.json").read_text())
        assert config["options"]["embed_dim"] == (16, 32)[[process.exitcode for process in pair].index(0)]
        load_run(out)
        steps = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
        assert steps == sorted(steps)
        assert len(steps) == 2 * len(set(steps)), "one record of training and one of the held-out part for each step"


@pytest.mark.slow
def test_run_that_is_read_while_it_trains_is_consistent(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = started(_train, table, out, 16, errors=tmp_path / "errors")
    reads, said = 0, set[str]()
    while process.is_alive():
        try:
            load_run(out).predict(["a good film"])
            reads += 1
        except DataError as failure:
            said.add(str(failure).partition("; got ")[2].partition(".")[0])
    process.join()
    assert process.exitcode == 0
    assert said <= {"no such folder", "no such file", "none yet"}
    assert reads > 1


def test_resume_after_a_kill_needs_no_cleaning(table: Path, tmp_path: Path) -> None:
    options = ClassifierOptions(**TINY, epochs=1)
    run = tmp_path / "run"
    run.mkdir()
    (run / LOCK).write_text("process 1 on host")
    metrics = train_text_classifier(table, out=run, options=options, resume=True)
    assert metrics["steps"] > 0
    assert not (run / LOCK).exists()
