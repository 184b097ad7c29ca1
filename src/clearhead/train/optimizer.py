"""AdamW with weight decay of matrices only, the learning rate schedule, and the running average of weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from clearhead.train.options import TrainingOptions

__all__ = ["Average", "adamw", "learning_rate"]


def learning_rate(step: int, steps: int, options: TrainingOptions) -> float:
    """The learning rate of step ``step`` of ``steps``: a linear warmup, then a cosine decay.

    >>> options = TrainingOptions(lr=1.0, warmup=0.5)
    >>> [round(learning_rate(step, 4, options), 3) for step in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    rise = round(options.warmup * steps)
    if step < rise:
        return options.lr * (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return options.lr * (options.final_lr + (1 - options.final_lr) * 0.5 * (1 + math.cos(math.pi * done)))


def adamw(model: nn.Module, options: TrainingOptions) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) with weight decay of matrices, not of embeddings, biases or norms."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [item for item in parameters if item.ndim >= 2 and id(item) not in tables]
    chosen = {id(item) for item in matrices}
    others = [item for item in parameters if id(item) not in chosen]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    used = [group for group in groups if group["params"]]
    return torch.optim.AdamW(used, lr=options.lr, betas=(0.9, options.beta2), foreach=True)


class Average:
    """An exponential moving average of a model's weights (Polyak and Juditsky 1992), used in evaluations.

    With ``decay=0`` there is no average, and evaluations use the model's weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._model = model
        self.weights = {name: value.detach().clone() for name, value in self._floats()} if decay else {}

    def _floats(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, value) for name, value in self._model.named_parameters() if value.is_floating_point())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the model's weights, with a smaller decay in the first steps."""
        if not self.weights:
            return
        decay = min(self.decay, (1 + step) / (10 + step))
        current = [value for _, value in self._floats()]
        get_ema_multi_avg_fn(decay)(list(self.weights.values()), current, step)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Put the averaged weights into the model within a ``with`` block, and restore its weights at the end."""
        if not self.weights:
            yield
            return
        saved = {name: value.detach().clone() for name, value in self._floats()}
        _copy(self._model, self.weights)
        try:
            yield
        finally:
            _copy(self._model, saved)


@torch.no_grad()
def _copy(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, value in model.named_parameters():
        if name in weights:
            value.copy_(weights[name])
