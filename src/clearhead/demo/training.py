"""Training the classifier of the demo: its task for the engine, its recipe, its accuracy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead.demo.digits import CLASSES, INTENSITIES, TOKENS, Digits, jittered, shifted
from clearhead.nn import SequenceClassifier
from clearhead.shapes import Float
from clearhead.train.batches import Batch
from clearhead.train.engine import Engine, Outcome, Weighed, seeded
from clearhead.train.options import TrainingOptions
from clearhead.train.progress import ProgressReporter

__all__ = ["Recipe", "log_probabilities", "new_model", "train"]

_SHUFFLE, _CHANGE = 1, 2  # stream numbers of the random generators


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of the demo's model, tuned on a part of the training digits, not on the held-out fifth."""

    embed_dim: int = 64
    num_heads: int = 4
    num_layers: int = 2
    feedforward_dim: int = 128
    dropout: float = 0.0  # the augmentation prevents overfitting at a lower cost
    epochs: int = 75
    batch_size: int = 64
    lr: float = 3e-3
    embedding_std: float = 0.3
    weight_decay: float = 0.05
    shifted: float = 0.3
    jittered: float = 0.5
    jitter: int = 2


def new_model(recipe: Recipe, seed: int) -> SequenceClassifier:
    """An untrained classifier of 64 intensity tokens."""
    with seeded(seed):
        model = SequenceClassifier(
            INTENSITIES,
            recipe.embed_dim,
            recipe.num_heads,
            recipe.num_layers,
            CLASSES,
            max_len=TOKENS,
            dropout=recipe.dropout,
            feedforward_dim=recipe.feedforward_dim,
        )
        for part in model.embedding.modules():
            # The vocabulary is small and its tokens frequent, so a large initial spread learns several times faster.
            if isinstance(part, nn.Embedding):
                nn.init.normal_(part.weight, std=recipe.embedding_std)
        return model


class _DigitTask:
    """The training task. The held-out digits are evaluated once, at the end, so they select nothing."""

    monitor = "accuracy"
    larger_is_better = True

    def __init__(self, train: Digits, held_out: Digits, recipe: Recipe, seed: int) -> None:
        self._train, self._held_out, self._recipe, self._seed = train, held_out, recipe, seed
        self._per_epoch = math.ceil(len(train) / recipe.batch_size)
        self.steps = self._per_epoch * recipe.epochs

    def batch(self, step: int) -> Batch:
        """A shuffled, augmented batch of the training digits."""
        recipe = self._recipe
        epoch, place = divmod(step, self._per_epoch)
        with seeded(self._seed, _SHUFFLE, epoch):
            order = torch.randperm(len(self._train))
        chosen = order[place * recipe.batch_size : (place + 1) * recipe.batch_size]
        with seeded(self._seed, _CHANGE, step):
            ids = jittered(shifted(self._train.ids[chosen], recipe.shifted), recipe.jittered, recipe.jitter)
        return Batch(ids, torch.full((len(chosen),), TOKENS), self._train.labels[chosen])

    def slack(self, value: float) -> float:
        """0, because the single evaluation selects nothing."""
        return 0.0

    def evaluates_after(self, steps: int) -> bool:
        """False: the engine evaluates at the end without being asked."""
        return False

    def weigh(self, model: nn.Module, batch: Batch) -> Weighed:
        """Cross-entropy and the number of correct predictions of a batch."""
        logits = model(batch.ids)
        loss = nn.functional.cross_entropy(logits, batch.targets)
        return Weighed(loss, (logits.argmax(dim=-1) == batch.targets).sum(), len(batch.targets))

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Accuracy on the held-out fifth."""
        logits = model(self._held_out.ids.to(device)).cpu()
        right = logits.argmax(dim=-1) == self._held_out.labels
        return {"accuracy": right.double().mean().item()}


def train(
    model: SequenceClassifier, digits: Digits, held_out: Digits, recipe: Recipe, *, seed: int, watcher: ProgressReporter
) -> Outcome:
    """Train ``model`` in place; the outcome has ``held_out["accuracy"]``, the accuracy on the held-out digits."""
    options = TrainingOptions(lr=recipe.lr, weight_decay=recipe.weight_decay, final_lr=0.01, device="cpu", seed=seed)
    task = _DigitTask(digits, held_out, recipe, seed)
    return Engine(model, task, options, watcher=watcher, function="clearhead demo").fit()


def log_probabilities(model: nn.Module, ids: Tensor) -> Float[Tensor, "count classes"]:
    """Log-probability of each class, in eval mode."""
    model.eval()
    with torch.no_grad():
        return torch.log_softmax(model(ids), dim=-1)
