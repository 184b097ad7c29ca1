"""The loop: it learns, it is reproducible, it stops early, it keeps the best, it says when the loss breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from clearhead.errors import DataError
from clearhead.train import Sequences, train_classifier
from clearhead.train.batches import Batch
from clearhead.train.classify import ClassifierTask, class_scores
from clearhead.train.engine import Engine, InMemory, Weighed, seeded
from clearhead.train.options import ClassifierOptions, TrainingOptions
from clearhead.train.progress import Shown

SMALL: dict[str, Any] = {"embed_dim": 16, "num_heads": 2, "num_layers": 1, "batch_size": 16, "dropout": 0.1}


def _examples(count: int, seed: int) -> Sequences:
    """Rows of ids 1 to 8; the class is whether id 1 occurs."""
    random = torch.Generator().manual_seed(seed)
    ids, targets = [], []
    for place in range(count):
        length = int(torch.randint(2, 9, (), generator=random))
        row = torch.randint(2, 9, (length,), generator=random).tolist()
        if place % 2:
            row[int(torch.randint(0, length, (), generator=random))] = 1
        ids.append(row)
        targets.append(place % 2)
    return Sequences(ids, targets)


def _train(**changes: Any) -> Any:
    options = ClassifierOptions(**(SMALL | {"epochs": 6, "lr": 1e-2, "token_dropout": 0.0} | changes))
    return train_classifier(
        _examples(256, 0), _examples(64, 1), vocab_size=9, num_classes=2, options=options, unknown_id=8
    )


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"checkpoint_activations": True}, {"average": 0.9}])
def test_classifier_learns_under_every_option(changes: dict[str, Any]) -> None:
    assert _train(**changes).outcome.held_out["accuracy"] >= 0.95


def test_seed_decides_the_weights() -> None:
    first, repeated, other = (_train(epochs=1, token_dropout=0.1, seed=seed).model.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], repeated[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_checkpointed_activations_give_the_same_weights() -> None:
    plain, saved = (_train(epochs=1, checkpoint_activations=flag).model.state_dict() for flag in (False, True))
    assert all(torch.allclose(plain[name], saved[name], atol=1e-5) for name in plain)


def test_random_state_of_torch_is_unmodified() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    _train(epochs=1)
    assert torch.equal(torch.rand(3), expected)


def test_scores_are_independent_of_padding_and_batch() -> None:
    model = _train(epochs=1).model
    examples = _examples(40, 2)
    together = class_scores(model, examples, torch.device("cpu"))
    alone = torch.cat([class_scores(model, examples.taken([place]), torch.device("cpu")) for place in range(40)])
    torch.testing.assert_close(together, alone)


class _Slope:
    """One weight that walks down; its held-out number follows a script."""

    monitor, larger_is_better = "score", True

    def __init__(self, scores: list[float], loss: float = 1.0, slack: float = 0.0) -> None:
        self.scores, self.loss, self.steps, self._slack = scores, loss, len(scores), slack

    def slack(self, value: float) -> float:
        return self._slack

    def batch(self, step: int) -> Batch:
        return Batch(torch.zeros(1, 1, dtype=torch.long), torch.tensor([1]), torch.zeros(1))

    def evaluates_after(self, steps: int) -> bool:
        return True

    def weigh(self, model: nn.Module, batch: Batch) -> Weighed:
        weight = next(model.parameters())
        return Weighed(weight.sum() * self.loss, torch.tensor(0), 1)

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        weight = next(model.parameters()).item()
        steps = round(-weight / 0.5)
        return {"score": self.scores[steps - 1], "weight": weight}


def _slope(task: _Slope, **changes: Any) -> tuple[Any, InMemory]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    keeper = InMemory()
    options = TrainingOptions(**({"lr": 0.5, "warmup": 0.0, "final_lr": 1.0, "weight_decay": 0.0} | changes))
    return Engine(model, task, options, keeper=keeper).fit(), keeper


def test_best_weights_are_restored_after_early_stopping() -> None:
    outcome, keeper = _slope(_Slope([0.1, 0.9, 0.5, 0.5, 0.5, 0.5, 0.5, 0.95]), patience=3)
    assert (outcome.best_step, outcome.steps) == (2, 5)
    assert outcome.held_out["weight"] == pytest.approx(-1.0, abs=1e-4)
    assert [record["score"] for record in keeper.records if record["kind"] == "held_out"] == [0.1, 0.9, 0.5, 0.5, 0.5]


def test_later_of_equal_evaluations_is_best() -> None:
    # 0.85 is within 0.06 of the best, 0.9; 0.8 is not, although it is within 0.06 of 0.85: it may not creep down.
    outcome, _ = _slope(_Slope([0.5, 0.9, 0.85, 0.8, 0.8], slack=0.06), patience=5)
    assert (outcome.best_step, outcome.steps) == (3, 5)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_non_finite_loss_raises_one_line(loss: float) -> None:
    engine = Engine(nn.Linear(1, 1, bias=False), _Slope([0.5], loss=loss), TrainingOptions())
    with pytest.raises(DataError, match=r"^train: loss must be finite; got (nan|inf|-inf) at step 0\. Lower --lr"):
        engine.fit()


def test_reporter_receives_speed_and_remaining_time_and_closes_once() -> None:
    events: list[Any] = []

    class Watch:
        def stepped(self, shown: Shown) -> None:
            events.append(shown)

        def said(self, line: str) -> None:
            events.append(line)

        def closed(self) -> None:
            events.append("closed")

    options = ClassifierOptions(**(SMALL | {"epochs": 1}))
    train_classifier(_examples(64, 0), _examples(64, 1), vocab_size=9, num_classes=2, options=options, watcher=Watch())
    shown = [item for item in events if isinstance(item, Shown)]
    assert [item.step for item in shown] == [1, 2, 3, 4]
    assert shown[-1].seconds_left == 0
    assert all(item.tokens_per_second > 0 for item in shown)
    assert events.count("closed") == 1


def test_seeded_depends_on_every_part_of_its_key() -> None:
    drawn = []
    for place in ((0,), (0, 0), (0, 1), (1, 0)):
        with seeded(*place):
            drawn.append(torch.rand(1).item())
    assert len(set(drawn)) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "epochs"), [(100, 1500 // 7), (16 * 1500, 1), (16 * 5000, 1)])
def test_epochs_0_gives_about_1500_steps(rows: int, epochs: int) -> None:
    examples = Sequences([[1]] * rows, [0] * rows)
    task = ClassifierTask(examples, examples, ClassifierOptions(**SMALL), None)
    per_epoch = -(-rows // 16)
    assert task.steps == pytest.approx(epochs * per_epoch, rel=0.01)
