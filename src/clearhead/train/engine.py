"""The loop: steps, evaluations, early stopping, checkpoints. It knows tensors, not text.

Every step draws its batch and its dropout from (seed, step) alone. A run that was killed and goes on from
a checkpoint therefore meets the same numbers, bit for bit, as one that was never interrupted, as long as
machine, torch and thread count are the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.errors import DataError
from clearhead.train.batches import Batch
from clearhead.train.checkpoint import Place
from clearhead.train.optimizer import Average, adamw, learning_rate
from clearhead.train.options import TrainingOptions
from clearhead.train.progress import Shown, Silent, Watcher

__all__ = ["Engine", "Keeper", "Outcome", "Task", "Weighed", "seeded"]


@dataclass(frozen=True)
class Weighed:
    """What one batch gave: the loss to descend and how many of how many predictions were right."""

    loss: Tensor
    correct: Tensor
    counted: int


class Task(Protocol):
    """What is to be learned. ``batch`` must depend on the step alone."""

    steps: int
    monitor: str
    """The number of an evaluation that decides which weights are best."""
    larger_is_better: bool

    def slack(self, value: float) -> float:
        """How far below the best an evaluation may lie and still be as good, given how few examples it has."""

    def batch(self, step: int) -> Batch:
        """The batch of one step."""

    def evaluates_after(self, steps: int) -> bool:
        """Whether the held-out part is measured once so many steps are taken."""

    def weigh(self, model: nn.Module, batch: Batch) -> Weighed:
        """The loss of one batch, with its graph."""

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Numbers on the held-out part; called without gradients, in eval mode."""


class Keeper(Protocol):
    """Who keeps what training makes: a run folder, or nobody."""

    def resumed(self, model: nn.Module, average: Average, optimizer: torch.optim.Optimizer) -> Place:
        """The place to start from, its state put into the arguments."""

    def log(self, step: int, record: dict[str, Any]) -> None:
        """Keep one record of numbers."""

    def best(self, model: nn.Module) -> None:
        """Keep these weights as the best so far."""

    def checkpoint(self, model: nn.Module, average: Average, optimizer: torch.optim.Optimizer, place: Place) -> None:
        """Keep the whole state."""

    def restore_best(self, model: nn.Module) -> None:
        """Put the best weights into the model."""


class InMemory:
    """Keeps the best weights in memory and nothing else."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._best: dict[str, Tensor] = {}

    def resumed(self, model: nn.Module, average: Average, optimizer: torch.optim.Optimizer) -> Place:
        """The start."""
        return Place()

    def log(self, step: int, record: dict[str, Any]) -> None:
        """Keep the record in ``records``."""
        self.records.append({"step": step, **record})

    def best(self, model: nn.Module) -> None:
        """Copy the weights."""
        self._best = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def checkpoint(self, model: nn.Module, average: Average, optimizer: torch.optim.Optimizer, place: Place) -> None:
        """Nothing."""

    def restore_best(self, model: nn.Module) -> None:
        """Copy the weights back."""
        model.load_state_dict(self._best)


@dataclass(frozen=True)
class Outcome:
    """How training ended: the held-out numbers of the best weights, their step, all steps taken, seconds."""

    held_out: dict[str, float]
    best_step: int
    steps: int
    seconds: float


@contextmanager
def seeded(seed: int, *place: int) -> Iterator[None]:
    """Torch's random numbers inside follow from ``seed`` and ``place``; outside they are untouched."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        stream = np.random.SeedSequence(seed, spawn_key=place)
        start = int(stream.generate_state(1, np.uint64)[0])
        # torch.manual_seed would also note where it was called from, for a CUDA that is not there: 1.5 ms a step.
        torch.default_generator.manual_seed(start)
        if devices:
            torch.cuda.manual_seed(start)
        yield


class Engine:
    """Trains one model on one task.

    Args: the model (on its device), the task, the options, who keeps the results, who watches, and the name
    by which errors speak of the caller. Cost: one forward and backward a step.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        options: TrainingOptions,
        *,
        keeper: Keeper | None = None,
        watcher: Watcher | None = None,
        function: str = "train",
    ) -> None:
        self.model, self.task, self.options, self._function = model, task, options, function
        self.keeper: Keeper = InMemory() if keeper is None else keeper
        self._watcher: Watcher = Silent() if watcher is None else watcher
        self._device = next(model.parameters()).device
        self._optimizer = adamw(model, options)
        self._average = Average(model, options.average)

    def fit(self) -> Outcome:
        """Train to the end or to the early stop; the model then holds the best weights."""
        place = self.keeper.resumed(self.model, self._average, self._optimizer)
        started = time.monotonic() - place.seconds
        first = place.step
        if first:
            self._watcher.said(f"resumed at step {first} of {self.task.steps}")
        entered = time.monotonic()
        tokens = 0
        try:
            while place.step < self.task.steps and not place.stopped:
                loss, size = self._step(place)
                tokens += size
                self._show(place, loss, tokens, time.monotonic() - entered, first)
                ends = place.step == self.task.steps
                place.seconds = time.monotonic() - started
                evaluates = ends or self.task.evaluates_after(place.step)
                if evaluates:
                    self._evaluate(place)
                if evaluates or place.step % self.options.checkpoint_every == 0:
                    self.keeper.checkpoint(self.model, self._average, self._optimizer, place)
        finally:
            self._watcher.closed()
        self.keeper.restore_best(self.model)
        return Outcome(self._measured(), place.best_step, place.step, place.seconds)

    def _step(self, place: Place) -> tuple[float, int]:
        self.model.train()
        rate = learning_rate(place.step, self.task.steps, self.options)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        batch = self.task.batch(place.step)
        with seeded(self.options.seed, place.step):
            with self._precision():
                weighed = self.task.weigh(self.model, batch.to(self._device))
            loss = weighed.loss.item()
            if not math.isfinite(loss):
                raise self._not_finite(place, loss)
            self._optimizer.zero_grad(set_to_none=True)
            weighed.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self._optimizer.step()
        self._average.update(place.step)
        size = int(batch.lengths.sum())
        place.step += 1
        place.loss_sum += loss * weighed.counted
        place.correct += int(weighed.correct)
        place.counted += weighed.counted
        place.tokens += size
        return loss, size

    def _precision(self) -> torch.autocast:
        wanted = self.options.precision == "bf16"
        return torch.autocast(self._device.type, torch.bfloat16, enabled=wanted)

    def _not_finite(self, place: Place, loss: float) -> DataError:
        must, got = "stay finite", f"{loss} at step {place.step}"
        then = "Lower --lr or use --precision fp32; the last checkpoint is kept."
        return DataError.about(self._function, "loss", must=must, got=got, then=then)

    def _measured(self) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad(), self._precision():
            return self.task.evaluate(self.model, self._device)

    def _evaluate(self, place: Place) -> None:
        with self._average.lent():
            measured = self._measured()
            value = measured[self.task.monitor]
            if not math.isfinite(value):
                raise self._not_finite(place, value)
            signed = value if self.task.larger_is_better else -value
            best = signed if place.best is None else max(place.best, signed)
            # Of evaluations that cannot be told apart the later one wins: it has learned for longer, at a lower
            # learning rate, and the highest of many noisy numbers is mostly a lucky one.
            if signed >= best - self.task.slack(value):
                place.best_step, place.stale = place.step, 0
                self.keeper.best(self.model)
            else:
                place.stale += 1
            place.best = best
        place.stopped = place.stale >= self.options.patience
        train = {"loss": place.loss_sum / place.counted, "accuracy": place.correct / place.counted}
        times = {"seconds": round(place.seconds, 3)}
        self.keeper.log(place.step, {"kind": "train", **train, **times})
        self.keeper.log(place.step, {"kind": "held_out", **measured, **times})
        shown = "  ".join(f"held-out {name} {number:.4f}" for name, number in measured.items())
        mark = " *" if place.best_step == place.step else ""
        self._watcher.said(f"step {place.step}: train loss {train['loss']:.4f}  {shown}{mark}")
        place.loss_sum, place.correct, place.counted, place.tokens = 0.0, 0, 0, 0

    def _show(self, place: Place, loss: float, tokens: int, seconds: float, first: int) -> None:
        per_step = seconds / (place.step - first)
        shown = Shown(
            step=place.step,
            steps=self.task.steps,
            loss=place.loss_sum / place.counted,
            accuracy=place.correct / place.counted,
            tokens_per_second=tokens / max(seconds, 1e-9),
            seconds_left=per_step * (self.task.steps - place.step),
        )
        self._watcher.stepped(shown)
