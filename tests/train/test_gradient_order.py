"""Training in micro-batches under ``set_invariant(True)``: the weights of one batch, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import clearhead as ch
from clearhead.errors import UnsupportedError
from clearhead.train import (
    ClassifierOptions,
    LanguageOptions,
    Sequences,
    train_classifier,
    train_language_model,
    train_text_language_model,
)
from clearhead.train.gradient_order import GradientSum
from clearhead.train.progress import Progress, Silent

CLASSIFY: dict[str, Any] = {
    **{"embed_dim": 32, "num_heads": 2, "num_layers": 1, "batch_size": 16, "epochs": 1, "dropout": 0.1},
    **{"token_dropout": 0.0},
}
OPTIONS: dict[str, Any] = {
    **{"embed_dim": 32, "num_heads": 2, "num_layers": 2, "context": 40, "batch_size": 16, "dropout": 0.1},
    **{"eval_every": 1_000, "seed": 3},
}


def _ids(count: int) -> Tensor:
    text = torch.randint(0, 20, (count,), generator=torch.Generator().manual_seed(0))
    return torch.where(torch.arange(count) % 3 == 0, text, (torch.arange(count) * 7) % 20)


def _weights(steps: int, **changes: Any) -> dict[str, Tensor]:
    options = LanguageOptions(**{**OPTIONS, "steps": steps, **changes})
    with ch.invariant():
        trained = train_language_model(_ids(4_000), _ids(200), vocab_size=20, options=options)
    return trained.model.state_dict()


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("steps", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_micro_batches_train_the_weights_of_one_batch(steps: int) -> None:
    whole = _weights(steps)
    for accumulate in (4, 16):
        assert _equal(whole, _weights(steps, accumulate=accumulate))


def _classified(**changes: Any) -> dict[str, Tensor]:
    """Sequences of 1 to 23 tokens, in batches of several sizes."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 24, (60,), generator=generator).tolist()
    rows = [torch.randint(0, 30, (length,), generator=generator).tolist() for length in lengths]
    examples = Sequences(rows, [sum(row) % 3 for row in rows])
    options = ClassifierOptions(**{**CLASSIFY, **changes})
    with ch.invariant():
        trained = train_classifier(
            examples, examples.taken(range(20)), vocab_size=30, num_classes=3, options=options, unknown_id=29
        )
    return trained.model.state_dict()


@pytest.mark.parametrize("pooling", ["mean", pytest.param("max", marks=pytest.mark.slow)])
def test_micro_batches_of_padded_sequences(pooling: str) -> None:
    whole = _classified(pooling=pooling)
    assert _equal(whole, _classified(pooling=pooling, accumulate=4))


class _Stopped(Silent):
    """Stops training after some steps, as an interrupt does."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def stepped(self, shown: Progress) -> None:
        if shown.step == self.steps:
            raise KeyboardInterrupt


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


def test_sizes_that_are_no_power_of_two_raise() -> None:
    with pytest.raises(UnsupportedError, match="Parts of 1, 2, 4 or all 12 sequences"):
        _weights(1, batch_size=12, accumulate=2)
    with pytest.raises(UnsupportedError, match="--precision"):
        _weights(1, accumulate=4, precision="bf16")


def test_each_use_of_a_tied_parameter_is_added_by_itself() -> None:
    model = ch.nn.LanguageModel(20, 16, 2, 1, max_len=8)
    tied = model.head.weight
    total = GradientSum(model)
    with total:
        assert model.head.weight is not tied
        assert model.head.weight.data_ptr() == tied.data_ptr()
        model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
        total.add(True)
    total.store()
    assert model.head.weight is tied is model.embedding.token.weight
    summed = tied.grad
    model.zero_grad()
    model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
    assert summed is not None
    assert tied.grad is not None
    assert torch.allclose(summed, tied.grad)
