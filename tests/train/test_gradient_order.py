"""Training in micro-batches under ``set_invariant(True)``: the weights of one batch, bit by bit."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import clearhead as ch
from clearhead.distributed.launch import run_ranks
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.sequence_sums import sum_of_sequences
from clearhead.train import (
    ClassifierOptions,
    LanguageOptions,
    ParallelOptions,
    Sequences,
    TrainingOptions,
    train_classifier,
    train_language_model,
    train_text_language_model,
)
from clearhead.train.engine import Engine
from clearhead.train.gradient_order import GradientSum, check_order
from clearhead.train.progress import Progress, Silent
from clearhead.train.ranks import Ranks

CLASSIFY: dict[str, Any] = {
    **{"embed_dim": 32, "num_heads": 2, "num_layers": 1, "batch_size": 16, "epochs": 1, "dropout": 0.1},
    **{"token_dropout": 0.0},
}
OPTIONS: dict[str, Any] = {
    **{"embed_dim": 32, "num_heads": 2, "num_layers": 2, "context": 40, "batch_size": 16, "dropout": 0.1},
    **{"eval_every": 2, "seed": 3},
}


def _ids(count: int) -> Tensor:
    text = torch.randint(0, 20, (count,), generator=torch.Generator().manual_seed(0))
    return torch.where(torch.arange(count) % 3 == 0, text, (torch.arange(count) * 7) % 20)


def _weights(steps: int, ranks: Ranks | None = None, **changes: Any) -> dict[str, Tensor]:
    options = LanguageOptions(**{**OPTIONS, "steps": steps, **changes})
    with ch.invariant():
        trained = train_language_model(_ids(4_000), _ids(200), vocab_size=20, options=options, ranks=ranks)
    held_out = torch.tensor(trained.outcome.held_out["loss"], dtype=torch.float64)
    return {**trained.model.state_dict(), "held-out loss": held_out}


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_parts_of_any_size_train_the_weights_of_one_batch() -> None:
    """Parts of 16 sequences: of 1, of 4 and 3, of 3 and 2, of 6 and 5; and of 13 sequences."""
    whole = _weights(5)
    for accumulate in (16, 5, 6, 3):
        assert _equal(whole, _weights(5, accumulate=accumulate))
    assert not _equal(whole, _weights(5, seed=4)), "the weights would be those of any data"
    odd = _weights(3, batch_size=13)
    for accumulate in (2, 5):
        assert _equal(odd, _weights(3, batch_size=13, accumulate=accumulate))


@pytest.mark.covering(0)
@pytest.mark.parametrize("task", ["lm", "classify"])
def test_parts_under_autocast_train_the_weights_of_one_batch(task: str) -> None:
    def weights(**changes: Any) -> dict[str, Tensor]:
        return _weights(3, **changes) if task == "lm" else _classified(**changes)

    whole = weights(precision="bf16")
    assert not _equal(whole, weights()), "nothing would be rounded"
    for accumulate in (16, 5):
        assert _equal(whole, weights(precision="bf16", accumulate=accumulate))


@pytest.mark.slow
def test_parts_train_the_weights_of_one_batch_over_200_steps() -> None:
    whole = _weights(200)
    for accumulate in (3, 4, 6, 16):
        assert _equal(whole, _weights(200, accumulate=accumulate))


def _classified(ranks: Ranks | None = None, **changes: Any) -> dict[str, Tensor]:
    """Sequences of 1 to 23 tokens, in batches of several sizes."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 24, (60,), generator=generator).tolist()
    rows = [torch.randint(0, 30, (length,), generator=generator).tolist() for length in lengths]
    examples = Sequences(rows, [sum(row) % 3 for row in rows])
    options = ClassifierOptions(**{**CLASSIFY, **changes})
    with ch.invariant():
        trained = train_classifier(
            examples, examples.taken(range(20)), vocab_size=30, num_classes=3, options=options, unknown_id=29,
            ranks=ranks,
        )  # fmt: skip
    return trained.model.state_dict()


@pytest.mark.parametrize("pooling", ["mean", pytest.param("max", marks=pytest.mark.slow)])
def test_micro_batches_of_padded_sequences(pooling: str) -> None:
    whole = _classified(pooling=pooling)
    for accumulate in (4, 3):
        assert _equal(whole, _classified(pooling=pooling, accumulate=accumulate))


# ---- several processes -----------------------------------------------------------------------------------------------


def _trained_by_ranks(task: str, cases: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    torch.set_num_threads(1)
    parallel = ParallelOptions(data_parallel=dist.get_world_size())
    with ch.invariant():
        ranks = Ranks(parallel)
        return [(_weights(4, ranks, **case) if task == "lm" else _classified(ranks, **case)) for case in cases]


def _check_ranks(count: int, task: str, cases: list[dict[str, Any]]) -> None:
    expected = [(_weights(4, **case) if task == "lm" else _classified(**case)) for case in cases]
    for rank, results in enumerate(run_ranks(_trained_by_ranks, count, task, cases)):
        for case, one, other in zip(cases, expected, results, strict=True):
            assert _equal(one, other), f"rank {rank} of {count}, {case}"


def test_two_ranks_train_the_weights_of_one() -> None:
    _check_ranks(2, "lm", [{"accumulate": 3}, {"clip": 0.01}])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_train_the_weights_of_one(ranks: int) -> None:
    _check_ranks(ranks, "lm", [{}, {"accumulate": 4}, {"batch_size": 13}, {"clip": 0.01, "average": 0.9}])
    _check_ranks(ranks, "lm", [{"precision": "bf16"}, {"precision": "bf16", "accumulate": 3}])
    _check_ranks(ranks, "classify", [{}, {"accumulate": 3, "batch_size": 14}, {"precision": "bf16"}])
    _check_ranks(ranks, "classify", [{"attention_dropout": 0.2, "token_dropout": 0.3}])


class _Stopped(Silent):
    """Stops training after some steps, as an interrupt does."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def stepped(self, shown: Progress) -> None:
        if shown.step == self.steps:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_in_micro_batches_that_was_interrupted_and_resumed(play: Path, tmp_path: Path) -> None:
    def run(name: str, **options: Any) -> dict[str, Tensor]:
        given = LanguageOptions(**{**OPTIONS, "steps": 6, "checkpoint_every": 2, **options})
        with ch.invariant():
            if name == "resumed":
                with pytest.raises(KeyboardInterrupt):
                    train_text_language_model(play, out=tmp_path / name, options=given, watcher=_Stopped(3))
            train_text_language_model(play, out=tmp_path / name, options=given, resume=name == "resumed")
        return load_file(tmp_path / name / "model.safetensors")

    assert _equal(run("whole"), run("resumed", accumulate=8))


class _Killed(Exception):
    """Stands for a kill of every rank."""


def _run_of_ranks(data: str, out: str, until: int, resume: bool) -> None:
    """Train, killed after ``until`` steps; -1 for never."""
    torch.set_num_threads(1)
    steps = count()

    def stopping(*_: object) -> None:
        if next(steps) == until:
            raise _Killed

    options = LanguageOptions(**OPTIONS, steps=8, checkpoint_every=1, average=0.5)
    handle = register_optimizer_step_pre_hook(stopping)
    try:
        with ch.invariant():
            train_text_language_model(data, out=out, options=options, resume=resume)
    except _Killed:
        return
    finally:
        handle.remove()


@pytest.mark.slow
def test_run_that_resumes_on_another_number_of_ranks_has_the_weights_of_one_process(play: Path, tmp_path: Path) -> None:
    _run_of_ranks(str(play), str(tmp_path / "whole"), -1, False)
    out = str(tmp_path / "resumed")
    run_ranks(_run_of_ranks, 2, str(play), out, 2, False)
    _run_of_ranks(str(play), out, 2, True)
    run_ranks(_run_of_ranks, 3, str(play), out, 2, True)
    run_ranks(_run_of_ranks, 4, str(play), out, -1, True)
    assert _equal(*(load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed")))


@pytest.mark.parametrize("axis", ["shard", "tensor_parallel", "context_parallel"])
def test_axes_that_divide_one_sum_raise(axis: str) -> None:
    flag = f"--{axis.replace('_', '-')}"
    parallel = ParallelOptions(data_parallel=1, **{axis: 2})
    line = rf"^train lm: {flag} must be 1 under set_invariant\(True\); got 2\. [^\n]*--data-parallel keeps the bits\.$"
    with ch.invariant(), pytest.raises(UnsupportedError, match=line):
        check_order("train lm", parallel)
    check_order("train lm", parallel)


def _refused() -> str:
    with ch.invariant(), pytest.raises(UnsupportedError) as caught:
        Engine(torch.nn.Linear(1, 1), None, TrainingOptions(), ranks=Ranks(ParallelOptions(data_parallel=1, shard=2)))  # type: ignore[arg-type]
    return str(caught.value)


def test_refusal_is_raised_by_every_rank() -> None:
    first, second = run_ranks(_refused, 2)
    assert first == second


def _added(sequences: int, parts: int, grads: list[Tensor]) -> Tensor | None:
    """The sum of gradients over all ranks; the second parameter has one on rank 0 alone, the third has none."""
    model, rank, ranks = nn.Linear(3, 5, bias=False), dist.get_rank(), dist.get_world_size()
    model.register_parameter("rare", nn.Parameter(torch.zeros(2)))
    model.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    total = GradientSum(model, sequences, parts=parts, rank=rank, ranks=ranks)
    with total:
        for node in total.nodes:
            model.weight.grad = sum_of_sequences(torch.stack([grads[at] for at in node]))
            model.rare.grad = torch.ones(2) if rank == 0 else None
            total.add(node)
    total.store()
    assert model.unused.grad is None
    assert isinstance(model.rare.grad, Tensor)
    return model.weight.grad


@pytest.mark.parametrize(("sequences", "parts"), [(13, 1), (13, 2), (3, 1)])
def test_nodes_of_ranks_are_added_in_the_order_of_the_tree(sequences: int, parts: int) -> None:
    grads = list(torch.randn(sequences, 5, 3, generator=torch.Generator().manual_seed(0)))
    expected = sum_of_sequences(torch.stack(grads))
    assert all(torch.equal(result, expected) for result in run_ranks(_added, 4, sequences, parts, grads))


def _by_hand(parts: int, batch: int = 6) -> list[Tensor]:
    """The gradients of a model with dropout and a tied weight, by a loop of a user."""
    torch.manual_seed(0)
    model = ch.nn.LanguageModel(20, 16, 2, 1, max_len=8, dropout=0.2)
    ids = torch.randint(20, (batch, 8))
    total = GradientSum(model, batch, parts=parts)
    torch.manual_seed(5)
    with total:
        for rows in total.nodes:
            with total.node(rows):
                model(ids[rows.start : rows.stop]).square().sum().backward()
    total.store()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_loop_of_a_user_has_the_gradients_of_one_batch() -> None:
    with ch.invariant():
        whole = _by_hand(1)
        for parts in (2, 3, 4, 6):
            assert all(map(torch.equal, whole, _by_hand(parts)))
    assert len(whole) > 10


def test_wrong_numbers_of_sequences_parts_and_ranks_raise() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ShapeError, match=r"^GradientSum: sequences must be a whole number of at least 1; got 0\."):
        GradientSum(model, 0)
    with pytest.raises(ShapeError, match=r"^GradientSum: rank must be at most 0; got 1\."):
        GradientSum(model, 2, rank=1)
    line = r"^GradientSum: ranks must be 1 or the 1 of the default process group; got 2\. [^\n]*$"
    with pytest.raises(UnsupportedError, match=line):
        GradientSum(model, 2, ranks=2)


@pytest.mark.usefixtures("_threads_as_before")
def test_norm_of_gradients_has_the_same_bits_for_any_number_of_threads() -> None:
    """Clipping divides by torch's norm, whose order of sums torch does not promise."""
    grads = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (333_333, 70_001, 64)]
    norms = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        norms.append(torch.nn.utils.get_total_norm(grads).item())
    assert len(set(norms)) == 1


def test_each_use_of_a_tied_parameter_is_added_by_itself() -> None:
    model = ch.nn.LanguageModel(20, 16, 2, 1, max_len=8)
    tied = model.head.weight
    total = GradientSum(model, 2)
    with total:
        assert model.head.weight is not tied
        assert model.head.weight.data_ptr() == tied.data_ptr()
        model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
        total.add(range(2))
    total.store()
    assert model.head.weight is tied is model.embedding.token.weight
    summed = tied.grad
    model.zero_grad()
    model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
    assert summed is not None
    assert tied.grad is not None
    assert torch.allclose(summed, tied.grad)
