"""The training loop: steps, evaluations, early stopping and checkpoints, on tensors.

Batch and dropout of a step depend on (seed, step) alone. A run that resumes from a checkpoint is therefore bitwise
identical to an uninterrupted one, with the same machine, torch version and number of threads.
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

from clearhead.batch_part import batch_part
from clearhead.choices import is_invariant
from clearhead.errors import DataError
from clearhead.train.batches import Batch
from clearhead.train.checkpoint import Place
from clearhead.train.gradient_order import GradientSum, check_order
from clearhead.train.optimizer import Average, adamw, learning_rate
from clearhead.train.options import TrainingOptions
from clearhead.train.progress import ProgressReporter, Shown, Silent
from clearhead.train.ranks import BatchShare, Ranks
from clearhead.train.sharding import reshard, scale_gradients, sync_gradients

__all__ = ["Engine", "Keeper", "Outcome", "Task", "Trained", "Weighed", "metrics_of", "seeded"]


@dataclass(frozen=True)
class Weighed:
    """The loss and accuracy of one batch.

    Attributes:
        loss: the scalar loss, with its autograd graph.
        correct: number of correct predictions, a scalar tensor.
        counted: number of predictions.
    """

    loss: Tensor
    correct: Tensor
    counted: int


class Task(Protocol):
    """A learning task: batches, loss and evaluation. ``batch`` must depend on the step alone."""

    steps: int
    """Number of training steps."""
    monitor: str
    """Name of the metric that decides which weights are best."""
    larger_is_better: bool
    """Whether a larger metric is better."""

    def slack(self, value: float) -> float:
        """How much worse than the best an evaluation may be and still count as equal.

        Args:
            value: the metric of the evaluation.

        Returns:
            The tolerance, at least 0; it depends on the number of held-out examples.
        """

    def batch(self, step: int) -> Batch:
        """The batch of one step.

        Args:
            step: the number of finished steps, from 0; the batch must depend on nothing else.
        """

    def evaluates_after(self, steps: int) -> bool:
        """Whether the held-out part is evaluated after ``steps`` steps.

        Args:
            steps: the number of finished steps.
        """

    def weigh(self, model: nn.Module, batch: Batch) -> Weighed:
        """The loss of one batch, with its graph.

        Args:
            model: the model, in training mode.
            batch: a batch on the device of the model.

        Returns:
            The mean loss, and the numbers of correct and of counted targets.
        """

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Metrics on the held-out part; called without gradients, in evaluation mode.

        Args:
            model: the model.
            device: its device, to which the batches are moved.

        Returns:
            Metrics by name, among them ``monitor``.
        """


class Keeper(Protocol):
    """Stores the results of training, for example in a run folder."""

    def resumed(self, model: nn.Module, average: Average, optimizer: torch.optim.Optimizer) -> Place:
        """The position to start from; its state is loaded into the arguments."""

    def log(self, step: int, record: dict[str, Any]) -> None:
        """Store one record of metrics."""

    def best(self, model: nn.Module) -> None:
        """Store the weights as the best so far."""

    def checkpoint(self, model: nn.Module, average: Average, optimizer: torch.optim.Optimizer, place: Place) -> None:
        """Store the whole state."""

    def restore_best(self, model: nn.Module) -> None:
        """Load the best weights into the model."""


class InMemory:
    """Stores the best weights and the records in memory, and no checkpoints."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._best: dict[str, Tensor] = {}

    def resumed(self, model: nn.Module, average: Average, optimizer: torch.optim.Optimizer) -> Place:
        """Start at step 0."""
        return Place()

    def log(self, step: int, record: dict[str, Any]) -> None:
        """Append the record to ``records``."""
        self.records.append({"step": step, **record})

    def best(self, model: nn.Module) -> None:
        """Copy the weights."""
        self._best = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def checkpoint(self, model: nn.Module, average: Average, optimizer: torch.optim.Optimizer, place: Place) -> None:
        """Do nothing."""

    def restore_best(self, model: nn.Module) -> None:
        """Copy the weights back."""
        model.load_state_dict(self._best)


@dataclass(frozen=True)
class Outcome:
    """The result of training.

    Attributes:
        held_out: metrics of the best weights on the held-out part, by name.
        best_step: the step of the best weights.
        steps: number of steps taken.
        seconds: training time in seconds.
    """

    held_out: dict[str, float]
    best_step: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class Trained:
    """A trained model.

    Attributes:
        model: the model with its best weights, in evaluation mode.
        outcome: the result of training.
    """

    model: nn.Module
    outcome: Outcome


def metrics_of(outcome: Outcome, **held_out: float) -> dict[str, Any]:
    """The contents of ``metrics.json``, with these besides the held-out metrics."""
    return {
        "held_out": outcome.held_out | held_out,
        "best_step": outcome.best_step,
        "steps": outcome.steps,
        "seconds": round(outcome.seconds, 3),
    }


@contextmanager
def seeded(seed: int, *place: int) -> Iterator[None]:
    """Set torch's random state from ``seed`` and ``place``, and restore it at the end."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        stream = np.random.SeedSequence(seed, spawn_key=place)
        start = int(stream.generate_state(1, np.uint64)[0])
        # torch.manual_seed also records its caller for CUDA, which costs 1.5 ms per step.
        torch.default_generator.manual_seed(start)
        if devices:
            torch.cuda.manual_seed(start)
        yield


class Engine:
    """Trains one model on one task.

    Args:
        model: the model, on its device.
        task: batches, loss and evaluation.
        options: options of training.
        keeper: stores results and checkpoints; by default in memory.
        watcher: shows progress; by default nothing is shown.
        function: name of the caller in error texts.
        ranks: the processes that share the training; by default this one alone.

    Cost: one forward and backward pass per step, and the evaluations.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        options: TrainingOptions,
        *,
        keeper: Keeper | None = None,
        watcher: ProgressReporter | None = None,
        function: str = "train",
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = Ranks() if ranks is None else ranks
        check_order(function, self._ranks.options)
        self.task, self.options, self._function = task, options, function
        self.model = self._ranks.parallelized(model)
        self.keeper: Keeper = InMemory() if keeper is None else keeper
        self._watcher: ProgressReporter = Silent() if watcher is None else watcher
        self._device = next(model.parameters()).device
        self._optimizer = adamw(self.model, options)
        self._average = Average(self.model, options.average)

    def fit(self) -> Outcome:
        """Train to the last step or until early stopping; the model then has the best weights.

        Returns:
            The ``Outcome``.

        Raises:
            DataError: the loss or the monitored metric is NaN or infinite.
        """
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
        self._optimizer.zero_grad(set_to_none=True)
        loss_sum, correct, counted = self._gradients(batch, place.step)
        loss = loss_sum / counted
        if not math.isfinite(loss):
            raise self._not_finite(place, loss)
        scale_gradients(self.model, self._ranks.mean_over / counted)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self._optimizer.step()
        self._average.update(place.step)
        size = int(batch.lengths.sum())
        place.step += 1
        place.loss_sum += loss_sum
        place.correct += int(correct)
        place.counted += int(counted)
        place.tokens += size
        return loss, size

    def _gradients(self, batch: Batch, step: int) -> list[float]:
        """Add up the gradients of the summed loss; that loss, and the numbers of correct and of counted targets."""
        if is_invariant():
            return self._gradients_in_order(batch, step)
        sums = [0.0, 0.0, 0.0]
        count = self.options.accumulate
        for place, share in enumerate(self._ranks.shares(batch, count)):
            if count > 1 and self._ranks.size > 1:
                sync_gradients(self.model, place + 1 == count)
            weighed = self._weigh(share, step)
            if share.counts:
                sums = list(map(float.__add__, sums, weighed))
        return self._ranks.total(sums)

    def _gradients_in_order(self, batch: Batch, step: int) -> list[float]:
        """The same with gradients in the order of a tree over the sequences, in any micro-batches and processes."""
        sums = [0.0, 0.0, 0.0]
        ranks, parts = self._ranks, self.options.accumulate
        total = GradientSum(self.model, len(batch.ids), parts=parts, rank=ranks.index, ranks=ranks.parts)
        with total:
            for node in total.nodes:
                sums = list(map(float.__add__, sums, self._weigh(ranks.node_share(batch, node), step)))
                total.add(node)
        total.store()
        return self._ranks.total(sums)

    def _weigh(self, share: BatchShare, step: int) -> list[float]:
        """One share's summed loss, whose gradients are left in the parameters, and the numbers of its targets."""
        with seeded(self.options.seed, step), batch_part(share.part):
            with self._precision():
                weighed = self.task.weigh(self.model, share.batch.to(self._device))
            counted = weighed.counted if share.counts else 0
            # Gradients of means would have the wrong weights where shares have different numbers of targets.
            (weighed.loss * counted).backward()
        return [weighed.loss.item() * weighed.counted, float(weighed.correct), float(weighed.counted)]

    def _precision(self) -> torch.autocast:
        wanted = self.options.precision == "bf16"
        return torch.autocast(self._device.type, torch.bfloat16, enabled=wanted)

    def _not_finite(self, place: Place, loss: float) -> DataError:
        must, got = "be finite", f"{loss} at step {place.step}"
        then = "Lower --lr or use --precision fp32. The last checkpoint is unmodified."
        return DataError.about(self._function, "loss", must=must, got=got, then=then)

    def _measured(self) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad(), self._precision():
            measured = self.task.evaluate(self.model, self._device)
        if self._ranks.size > 1:
            reshard(self.model)
        return measured

    def _evaluate(self, place: Place) -> None:
        with self._average.lent():
            measured = self._measured()
            value = measured[self.task.monitor]
            if not math.isfinite(value):
                raise self._not_finite(place, value)
            signed = value if self.task.larger_is_better else -value
            best = signed if place.best is None else max(place.best, signed)
            # Of statistically equal evaluations the later one wins: it was trained for longer at a lower learning
            # rate, and the maximum of many noisy metrics is biased.
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
