"""Generation: one token after another, drawn from a model's predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from clearhead.arguments import FARTHEST, number, repr_of, seed_of, whole, whole_number
from clearhead.errors import ShapeError
from clearhead.nn.embedding import check_ids, widened
from clearhead.shapes import Float, Int

__all__ = ["Sampler", "as_token", "check_prompt", "evaluating", "extend"]


#: Temperature below which only the likeliest token has weight, and the division would overflow.
_COLDEST: Final = 1e-30


class Sampler:
    """Draws the next token of each sequence.

    Args:
        temperature: divides the logits; below 1 sharper, 0 always the likeliest token.
        top_k: draw among this many likeliest tokens; by default among all.
        seed: makes the draw reproducible; by default torch's own generator.
        device: where the logits will be.

    Raises:
        ShapeError: a negative temperature, or a ``top_k`` below 1.
    """

    def __init__(
        self, function: str, *, temperature: float, top_k: int | None, seed: int | None, device: torch.device
    ) -> None:
        warmth = number(
            function,
            "temperature",
            temperature,
            must="be a number of at least 0",
            fits=lambda given: given >= 0.0,
            then="0.0 always takes the likeliest token.",
        )
        self.function = function
        self.temperature = 0.0 if warmth < _COLDEST else warmth
        self.top_k = None if top_k is None else whole(function, "top_k", top_k, low=1, then="None keeps all.")
        chosen = None if seed is None else seed_of(function, seed)
        self.generator = None if chosen is None else torch.Generator(device=device).manual_seed(chosen)

    def draw(self, logits: Float[Tensor, "batch vocab_size"]) -> Int[Tensor, "batch 1"]:
        """One token id for each row.

        Raises:
            ShapeError: the largest logit of a row is NaN or infinite.
        """
        if self.temperature == 0.0:
            largest, token = logits.max(dim=-1, keepdim=True)
            self._check(largest)
            return token
        logits = logits.float()
        largest = logits.amax(dim=-1, keepdim=True)
        self._check(largest)
        logits = (logits - largest) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        return torch.multinomial(logits.softmax(dim=-1), 1, generator=self.generator)

    def _check(self, largest: Float[Tensor, "batch 1"]) -> None:
        """Raise if the largest logit of a row is NaN or infinite."""
        total = largest.item() if largest.numel() == 1 else largest.float().sum().item()
        if not math.isfinite(total):
            must, then = "be finite", "Look for NaN in the model's weights: its training may have diverged."
            raise ShapeError.about(self.function, "logits", must=must, got=repr(total), then=then)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Context: the module in evaluation mode, without gradients; its mode is restored."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def extend(
    ids: Int[Tensor, "batch len"],
    max_new_tokens: int,
    next_logits: Callable[[Tensor], Tensor],
    sampler: Sampler,
    stop: int | None,
) -> Int[Tensor, "batch longer"]:
    """Append tokens one at a time; a sequence that has drawn ``stop`` is filled up with it."""
    ids = widened(ids)
    done = torch.zeros(ids.shape[0], 1, dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        drawn = sampler.draw(next_logits(ids)).to(ids.dtype)
        if stop is not None:
            drawn = drawn.masked_fill(done, stop)
            done = done | (drawn == stop)
        ids = torch.cat([ids, drawn], dim=1)
        if stop is not None and bool(done.all()):
            break
    return ids


def as_token(function: str, argument: str, token: object) -> int:
    """A token id: a whole number from 0."""
    number = whole_number(token)
    if number is None or not -FARTHEST <= number <= FARTHEST:
        raise ShapeError.about(
            function, argument, must="be a token id, a whole number", got=repr_of(token), then="Pass an int."
        )
    return number


def check_prompt(function: str, argument: str, ids: Tensor, max_new_tokens: object) -> int:
    """``max_new_tokens`` as a number; raises without a prompt."""
    _, length = check_ids(function, argument, ids, 2**62)
    if length == 0:
        raise ShapeError.about(
            function, argument, must="hold at least one token", got=tuple(ids.shape), then="Begin with a start token."
        )
    return whole(function, "max_new_tokens", max_new_tokens, low=0, high=2**31)
