"""Training over several processes gives the losses of one process, whatever the mesh, and resumes on any mesh."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from clearhead.distributed.launch import run_ranks
from clearhead.errors import DataError, ShapeError
from clearhead.train import ClassifierOptions, LanguageOptions, Sequences, train_text_language_model
from clearhead.train.classify import ClassifierTask, build_classifier
from clearhead.train.engine import Engine
from clearhead.train.language import LanguageTask, build_language_model
from clearhead.train.options import ParallelOptions
from clearhead.train.progress import Shown
from clearhead.train.ranks import Ranks
from clearhead.train.run import RunFolder

#: What the issue allows, relative, in float32.
TOLERANCE = 1e-6

LM: dict[str, Any] = {
    "embed_dim": 32, "num_heads": 4, "num_layers": 2, "context": 16, "batch_size": 8, "dropout": 0.2, "eval_every": 7,
    "device": "cpu",
}  # fmt: skip
CLASSIFY: dict[str, Any] = {
    "embed_dim": 32, "num_heads": 4, "num_layers": 1, "batch_size": 9, "epochs": 1, "attention_dropout": 0.1,
    "device": "cpu",
}  # fmt: skip


class _Losses:
    """Collects the mean loss since the last evaluation, after each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def stepped(self, shown: Shown) -> None:
        self.losses.append(shown.loss)

    def said(self, line: str) -> None:
        """Do nothing."""

    def closed(self) -> None:
        """Do nothing."""


def _language(degrees: ParallelOptions | None, changes: dict[str, Any]) -> list[float]:
    options = LanguageOptions(**(LM | changes))
    ids = torch.randint(0, 30, (2000,), generator=torch.Generator().manual_seed(1))
    ranks = Ranks() if degrees is None else Ranks(degrees)
    task, model = LanguageTask(ids, ids[:200], options, "test", ranks), build_language_model(options, vocab_size=30)
    return _trained(model, task, options, ranks)


def _classifier(degrees: ParallelOptions | None, changes: dict[str, Any]) -> list[float]:
    """Sequences of 1 to 23 tokens, in batches with padding and without, and a last batch of fewer than four."""
    options = ClassifierOptions(**(CLASSIFY | changes))
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 24, (164,), generator=generator).tolist()
    rows = [torch.randint(0, 30, (length,), generator=generator).tolist() for length in lengths]
    examples = Sequences(rows, [sum(row) % 3 for row in rows])
    ranks = Ranks() if degrees is None else Ranks(degrees)
    task = ClassifierTask(examples, examples.taken(range(20)), options, 29, ranks)
    return _trained(build_classifier(options, vocab_size=30, num_classes=3), task, options, ranks)


def _trained(model: Any, task: Any, options: Any, ranks: Ranks) -> list[float]:
    torch.set_num_threads(1)
    losses = _Losses()
    held_out = Engine(model, task, options, watcher=losses, ranks=ranks).fit().held_out
    return [held_out["accuracy"], held_out["loss"], *losses.losses]


TASKS = {"lm": _language, "classify": _classifier}


def _each(task: str, meshes: list[ParallelOptions], changes: dict[str, Any]) -> list[list[float]]:
    return [TASKS[task](degrees, changes) for degrees in meshes]


def _mesh(data: int = 1, shard: int = 1, tensor: int = 1, context: int = 1) -> ParallelOptions:
    return ParallelOptions(data_parallel=data, shard=shard, tensor_parallel=tensor, context_parallel=context)


def _check(task: str, meshes: list[ParallelOptions], changes: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    expected = torch.tensor(TASKS[task](None, changes), dtype=torch.float64)
    every = run_ranks(_each, meshes[0].processes, task, meshes, changes, timeout=400)
    for rank, results in enumerate(every):
        assert results == every[0], f"rank {rank} has other losses than rank 0"
    # Logits that round to 16 bits may tie, so a token more or less is right.
    first = 0 if tolerance == TOLERANCE else 1
    for degrees, losses in zip(meshes, every[0], strict=True):
        result = torch.tensor(losses, dtype=torch.float64)
        torch.testing.assert_close(
            result[first:], expected[first:], rtol=tolerance, atol=0.0, msg=lambda text, d=degrees: f"{d}: {text}"
        )


@pytest.mark.slow
def test_two_processes_have_the_losses_of_one() -> None:
    _check("lm", [_mesh(data=2), _mesh(tensor=2)], {"steps": 9})


TWO = [_mesh(data=2), _mesh(shard=2), _mesh(tensor=2), _mesh(context=2)]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"average": 0.9, "checkpoint_activations": True}, {"accumulate": 3}])
def test_every_axis_has_the_losses_of_one_process_over_50_steps(changes: dict[str, Any]) -> None:
    _check("lm", TWO, {"steps": 50, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"accumulate": 2, "average": 0.9}, {"pooling": "first"}])
def test_padded_sequences_have_the_losses_of_one_process(changes: dict[str, Any]) -> None:
    _check("classify", TWO[:3], changes)


@pytest.mark.slow
def test_divided_padded_sequences_have_the_losses_of_one_process() -> None:
    _check("classify", TWO, {"neighbours": 0, "attention_dropout": 0.0})


@pytest.mark.slow
def test_meshes_of_two_axes_have_the_losses_of_one_process() -> None:
    meshes = [_mesh(data=2, shard=2), _mesh(shard=2, tensor=2), _mesh(data=2, context=2), _mesh(data=4)]
    _check("lm", meshes, {"steps": 12})
    _check("classify", meshes[:2], {})


@pytest.mark.slow
def test_compiled_blocks_have_the_losses_of_one_process() -> None:
    _check("lm", [_mesh(data=2)], {"steps": 8, "dropout": 0.0, "compile": True})


@pytest.mark.slow
def test_bfloat16_has_losses_within_its_rounding() -> None:
    # Sums of a part round to bfloat16's 2**-8 of a gradient; the loss averages over hundreds of targets.
    _check("lm", [_mesh(data=2), _mesh(shard=2)], {"steps": 12, "precision": "bf16"}, tolerance=2.0**-10)


# ---- run folders -----------------------------------------------------------------------------------------------------


class _Stopped(Exception):
    """Stands for a kill of every rank."""


def _run(data: str, out: str, degrees: ParallelOptions, resume: bool, stop_at: int, ranks: bool = True) -> None:
    torch.set_num_threads(1)
    steps = count()

    def stopping(*_: object) -> None:
        if next(steps) == stop_at:
            raise _Stopped

    handle = register_optimizer_step_pre_hook(stopping)
    options = LanguageOptions(**(LM | {"steps": 24, "eval_every": 8, "checkpoint_every": 5, "average": 0.5}))
    try:
        train_text_language_model(data, out=out, options=options, resume=resume, parallel=degrees)
    except _Stopped:
        return
    finally:
        handle.remove()


def _on(degrees: ParallelOptions, *arguments: Any) -> None:
    if degrees.processes == 1:
        _run(*arguments[:2], degrees, *arguments[2:])
    else:
        run_ranks(_run, degrees.processes, *arguments[:2], degrees, *arguments[2:], timeout=200)


def _records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (_mesh(data=2), _mesh(shard=2)),
        (_mesh(shard=2), _mesh()),
        (_mesh(), _mesh(data=2, shard=2)),
        (_mesh(shard=2, tensor=2), _mesh(tensor=2)),
        (_mesh(context=2), _mesh(shard=4)),
    ],
)
def test_run_resumes_on_another_mesh(
    before: ParallelOptions, after: ParallelOptions, play: Path, tmp_path: Path
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    _on(_mesh(), str(play), str(whole), False, -1)
    _on(before, str(play), str(stopped), False, 13)
    last = RunFolder(stopped).last_checkpoint
    assert last is not None
    assert last.is_dir() == (before.processes > 1)
    _on(after, str(play), str(stopped), True, -1)
    expected, result = _records(whole), _records(stopped)
    assert [record["step"] for record in result] == [record["step"] for record in expected]
    for one, other in zip(expected, result, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=TOLERANCE)
    names = {path.name for path in (stopped / "checkpoint").iterdir()}
    assert len(names) == 1, "an older checkpoint is left"
    from clearhead.train import load_run

    ids = torch.arange(10)[None]
    models = [load_run(path).model for path in (whole, stopped)]
    with torch.no_grad():
        torch.testing.assert_close(models[1](ids), models[0](ids), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_checkpoint_of_ranks_holds_no_pickle_and_damage_is_one_line(play: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    _on(_mesh(shard=2), str(play), str(out), False, 13)
    folder = RunFolder(out).last_checkpoint
    assert folder is not None
    files = sorted(folder.iterdir())
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    shard = next(path for path in files if path.suffix == ".safetensors")
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"step-\d+ must have complete safetensors files; got .*\. The checkpoint is"):
        _on(_mesh(), str(play), str(out), True, -1)


# ---- wrong degrees ---------------------------------------------------------------------------------------------------


def test_degrees_that_do_not_multiply_to_the_processes_raise() -> None:
    with pytest.raises(
        ShapeError, match=r"^train: the degrees must multiply to 1, the number of processes; got --data-p"
    ):
        ParallelOptions(data_parallel=2).checked("train", 1)
    with pytest.raises(
        ShapeError, match=r"got --data-parallel 1 --shard 3\. Start 3 processes: torchrun --standalone --np"
    ):
        ParallelOptions(shard=3).checked("train", 4)
    assert ParallelOptions(shard=2).checked("train", 8) == _mesh(data=4, shard=2)


@pytest.mark.parametrize(
    ("degrees", "changes", "flag"),
    [
        (_mesh(data=4), {"batch_size": 3}, "--batch-size"),
        (_mesh(data=2), {"accumulate": 9}, "--batch-size"),
        (_mesh(tensor=8), {}, "--num-heads"),
        (_mesh(tensor=2), {"feedforward_dim": 33}, "--feedforward-dim"),
        (_mesh(context=16), {}, "--context"),
        (_mesh(data=2), {"compile": True}, "--compile"),
    ],
)
def test_options_that_a_mesh_cannot_train_raise(degrees: ParallelOptions, changes: dict[str, Any], flag: str) -> None:
    options = LanguageOptions(**(LM | changes))
    ranks = Ranks()
    ranks.options, ranks.size = degrees, degrees.processes
    with pytest.raises(ShapeError, match=f"^train lm: {flag} must "):
        ranks.check("train lm", options, options.context)


def test_divided_sequences_cannot_mix_neighbours() -> None:
    ranks = Ranks()
    ranks.options, ranks.size = _mesh(context=2), 2
    with pytest.raises(ShapeError, match="--neighbours must be 0 with --context-parallel; got 1"):
        ranks.check("train classify", ClassifierOptions(), 256)


def _refused(data: str, out: str) -> str:
    options = LanguageOptions(**(LM | {"steps": 1}))
    with pytest.raises(DataError) as caught:
        train_text_language_model(data, out=out, options=options)
    return str(caught.value)


def test_error_of_the_first_process_is_raised_by_all(play: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("mine")
    said = run_ranks(_refused, 2, str(play), str(tmp_path))
    assert said[0] == said[1]
    assert "must be a new or empty folder; got a folder with other files" in said[0]
