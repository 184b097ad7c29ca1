"""The command under torchrun: errors once, a dead rank named, restarts with the same numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from clearhead.train import load_run

pytestmark = pytest.mark.slow

LM = [
    "train", "lm", "--steps", "40", "--eval-every", "15", "--checkpoint-every", "4", "--context", "16", "--embed-dim",
    "16", "--num-layers", "2", "--dropout", "0.1",
]  # fmt: skip
#: Seconds in which the death of a rank ends the job.
MINUTE = 60.0


def _start(
    words: Sequence[str], errors: Path, *, ranks: int = 2, launcher: Sequence[str] = (), **variables: str
) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *launcher,
        "-m", "clearhead", *words,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    with errors.open("w") as stderr:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)


def _said(errors: Path) -> list[str]:
    """What clearhead wrote to stderr: torchrun's own lines begin otherwise."""
    return [line for line in errors.read_text().splitlines() if line.startswith(("train lm:", "clearhead:"))]


def _pid(launcher: int, rank: int) -> int:
    """The process of a rank: a child of torchrun with its number in the environment."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == launcher and f"\0RANK={rank}\0" in "\0" + (folder / "environ").read_text():
                    return int(folder.name)
            except OSError:
                continue
    raise AssertionError(f"rank {rank} is not there")


def _wait_for_step(out: Path, step: int) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        steps = [int(path.name.removeprefix("step-")) for path in (out / "checkpoint").glob("step-*")]
        if steps and max(steps) >= step:
            return
        time.sleep(0.01)
    raise AssertionError("no checkpoint")


def _records(out: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


@pytest.fixture(scope="module")
def undisturbed(play: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks."""
    out = tmp_path_factory.mktemp("ranks") / "whole"
    process = _start([*LM, "--data", str(play), "--out", str(out)], out.with_suffix(".errors"))
    stdout, _ = process.communicate(timeout=200)
    assert process.returncode == 0, out.with_suffix(".errors").read_text()
    assert stdout.count("best weights: step") == 1, "one rank reports"
    return out


def test_run_of_ranks_is_read_like_any_other(undisturbed: Path) -> None:
    run = load_run(undisturbed)
    assert run.model.generate(torch.tensor([[1]]), 4, seed=0).shape == (1, 5)
    said = undisturbed.with_suffix(".errors").read_text()
    assert said.count("tokens to train on") == 1, "one rank shows progress"


@pytest.mark.parametrize("rank", [0, 1])
def test_restarted_ranks_go_on_with_the_same_numbers(rank: int, undisturbed: Path, play: Path, tmp_path: Path) -> None:
    out, errors = tmp_path / "run", tmp_path / "errors"
    words = [*LM, "--data", str(play), "--out", str(out)]
    process = _start(words, errors, launcher=["--max-restarts", "1"])
    _wait_for_step(out, 12)
    os.kill(_pid(process.pid, rank), signal.SIGKILL)
    process.communicate(timeout=200)
    assert process.returncode == 0, errors.read_text()
    assert "resumed at step" in errors.read_text()
    assert _records(out) == _records(undisturbed)


def test_invariant_ranks_train_the_weights_of_one_process_killed_or_not(play: Path, tmp_path: Path) -> None:
    def weights(name: str, ranks: int, *words: str, kills: bool = False) -> dict[str, Tensor]:
        out, errors = tmp_path / name, tmp_path / f"{name}.errors"
        given = [*LM, *words, "--data", str(play), "--out", str(out)]
        launcher = ["--max-restarts", "1"] if kills else []
        process = _start(given, errors, ranks=ranks, launcher=launcher, CLEARHEAD_INVARIANT="1")
        if kills:
            _wait_for_step(out, 12)
            os.kill(_pid(process.pid, 1), signal.SIGKILL)
        process.communicate(timeout=200)
        assert process.returncode == 0, errors.read_text()
        assert ("resumed at step" in errors.read_text()) == kills
        return load_file(out / "model.safetensors")

    expected = weights("one", 1)
    for result in (
        weights("two", 2),
        weights("parts", 2, "--accumulate", "3"),
        weights("four", 4),
        weights("killed", 2, kills=True),
    ):
        assert all(torch.equal(expected[name], result[name]) for name in expected)


@pytest.mark.parametrize(("rank", "how"), [(rank, how) for rank in (0, 1) for how in (signal.SIGKILL, signal.SIGSTOP)])
def test_dead_rank_is_named_and_ends_the_job_within_a_minute(
    rank: int, how: signal.Signals, play: Path, tmp_path: Path
) -> None:
    out, errors = tmp_path / "run", tmp_path / "errors"
    process = _start([*LM, "--steps", "5000", "--data", str(play), "--out", str(out)], errors)
    _wait_for_step(out, 4)
    pid = _pid(process.pid, rank)
    os.kill(pid, how)
    killed = time.monotonic()
    try:
        process.communicate(timeout=2 * MINUTE)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # torchrun gives a rank that does not answer SIGTERM half a minute more; the line is there before.
    assert time.monotonic() - killed < MINUTE + 30.0
    assert process.returncode != 0
    lines = _said(errors)
    assert len(lines) == 1, errors.read_text()
    assert lines[0].startswith(f"train lm: rank {rank} died (process {pid} on ")
    checkpoints = [path.name for path in (out / "checkpoint").iterdir() if not path.name.startswith(".")]
    assert len(checkpoints) in (1, 2)
    for folder in (out / "checkpoint").glob("step-*"):
        assert (folder / "place.json").exists(), "a checkpoint is half-written"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--data-parallel", "3"],
            "train lm: the degrees must multiply to 2, the number of processes; got --data-para",
        ),
        (["--batch-size", "1"], "train lm: --batch-size must be at least 2, the parts of a batch; got 1."),
        (
            ["--tensor-parallel", "2", "--num-heads", "1"],
            "train lm: --num-heads must divide by --tensor-parallel 2; go",
        ),
        (["--data", "nowhere.txt"], "train lm: "),
    ],
)
def test_wrong_use_is_one_line_and_no_hang(words: list[str], line: str, play: Path, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    data = [] if "--data" in words else ["--data", str(play)]
    process = _start([*LM, *data, "--out", str(tmp_path / "run"), *words], errors)
    process.communicate(timeout=120)
    assert process.returncode != 0
    lines = _said(errors)
    assert len(lines) == 1, errors.read_text()
    assert lines[0].startswith(line)
    assert not (tmp_path / "run").exists()
