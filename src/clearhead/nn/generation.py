"""Generation: one token after another, drawn from a model's predictions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Final

import torch
from torch import Tensor, nn

from clearhead.arguments import FARTHEST, number, repr_of, seed_of, whole, whole_number
from clearhead.choices import is_portable
from clearhead.errors import ShapeError
from clearhead.nn.embedding import check_ids, widened
from clearhead.shapes import Float, Int

__all__ = ["Sampler", "as_token", "check_cache_dtype", "check_prompt", "evaluating", "extend"]


#: Temperature below which only the likeliest token has weight, and the division would overflow.
_COLDEST: Final = 1e-30
#: Bytes of a sequence's key, and of a drawn number, which float64 holds.
_KEY_BYTES, _DRAWN_BYTES = 16, 6
#: Where ``_exponential`` is 0, and ln 2 as two numbers: the first one times an exponent is exact.
_LEAST_EXPONENT: Final = -700.0
_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10


class Sampler:
    """Draws the next token of each sequence, by a number that belongs to (seed, sequence, step).

    A sequence's number does not depend on the batch: it is that of its prompt, and of how many equal prompts come
    before it. So a prompt is continued alike alone, in any batch, and whatever ends earlier.

    Args:
        temperature: divides the logits; below 1 sharper, 0 always the likeliest token.
        top_k: draw among this many likeliest tokens; by default among all.
        seed: makes the draw reproducible; by default one is drawn from torch's generator.

    Raises:
        ShapeError: a negative temperature, or a ``top_k`` below 1.
    """

    def __init__(self, function: str, *, temperature: float, top_k: int | None, seed: int | None) -> None:
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
        self.seed = None if seed is None else seed_of(function, seed)

    def sequences(self, prompts: Iterable[Int[Tensor, " len"]]) -> list[bytes]:
        """The key of each sequence: of the seed, its prompt, and the number of equal prompts before it."""
        if self.temperature == 0.0:
            return [b"" for _ in prompts]
        seed = int(torch.randint(2**62, ())) if self.seed is None else self.seed
        earlier: Counter[bytes] = Counter()
        keys = []
        for prompt in prompts:
            tokens = b"".join(token.to_bytes(8, "little", signed=True) for token in prompt.tolist())
            place = (seed.to_bytes(8, "little"), earlier[tokens].to_bytes(8, "little"))
            keys.append(blake2b(b"".join((*place, tokens)), digest_size=_KEY_BYTES).digest())
            earlier[tokens] += 1
        return keys

    def draw(
        self, logits: Float[Tensor, "batch vocab_size"], sequences: Sequence[bytes], steps: Sequence[int]
    ) -> Int[Tensor, "batch 1"]:
        """One token id for each row.

        Args:
            logits: ``[batch, vocab_size]``.
            sequences: the key of each row's sequence.
            steps: how many tokens were drawn for it before.

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
        # On the CPU, in float64, the cumulative sums are the same for every batch and device.
        weights = _exponential(logits) if is_portable() else logits.softmax(dim=-1)
        sums = weights.to(device="cpu", dtype=torch.float64).cumsum(dim=-1)
        drawn = torch.tensor([_uniform(key, step) for key, step in zip(sequences, steps, strict=True)])
        # The first token whose sum is larger: never one without weight.
        token = torch.searchsorted(sums, drawn[:, None].to(torch.float64) * sums[:, -1:], right=True)
        return token.to(logits.device)

    def _check(self, largest: Float[Tensor, "batch 1"]) -> None:
        """Raise if the largest logit of a row is NaN or infinite."""
        total = largest.item() if largest.numel() == 1 else largest.float().sum().item()
        if not math.isfinite(total):
            must, then = "be finite", "Look for NaN in the model's weights: its training may have diverged."
            raise ShapeError.about(self.function, "logits", must=must, got=repr(total), then=then)


def _exponential(x: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """``e**x`` in float64, for ``x`` up to 0, by additions and multiplications alone.

    IEEE 754 prescribes how these round; torch's exponential rounds as the processor's instructions do.
    """
    x = x.to(torch.float64)
    bounded = x.clamp(min=_LEAST_EXPONENT)
    whole = torch.round(bounded * (1.0 / math.log(2.0)))
    # ln 2 in two parts: the first product is exact.
    rest = (bounded - whole * _LN2_HIGH) - whole * _LN2_LOW
    series = torch.ones_like(rest)
    for term in range(14, 0, -1):
        series = series * rest * (1.0 / term) + 1.0
    power = (whole.to(torch.int64) + 1023 << 52).view(torch.float64)
    return torch.where(x < _LEAST_EXPONENT, 0.0, series * power)


def _uniform(sequence: bytes, step: int) -> float:
    """The number of a sequence's step, from 0 to below 1."""
    digest = blake2b(step.to_bytes(8, "little"), key=sequence, digest_size=_DRAWN_BYTES).digest()
    return int.from_bytes(digest, "little") / 2.0 ** (8 * _DRAWN_BYTES)


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
    prompts: Iterable[Int[Tensor, " len"]] | None = None,
) -> Int[Tensor, "batch longer"]:
    """Append tokens one at a time; a sequence that has drawn ``stop`` is filled up with it.

    ``prompts`` are those to which the sampler's numbers belong, by default the rows of ``ids``.
    """
    ids = widened(ids)
    sequences = sampler.sequences(ids if prompts is None else prompts)
    done = torch.zeros(ids.shape[0], 1, dtype=torch.bool, device=ids.device)
    for step in range(max_new_tokens):
        drawn = sampler.draw(next_logits(ids), sequences, [step] * len(sequences)).to(ids.dtype)
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


def check_cache_dtype(function: str, cache_dtype: torch.dtype | None, *, cached: bool, has_cache: bool = False) -> None:
    """Raise for a dtype of a cache that the call does not make."""
    if cache_dtype is not None and (has_cache or not cached):
        got, then = "a cache" if has_cache else "cached=False", "Make the cache of this dtype."
        raise ShapeError.about(function, "cache_dtype", must="be None without a new cache", got=got, then=then)


def check_prompt(function: str, argument: str, ids: Tensor, max_new_tokens: object) -> int:
    """``max_new_tokens`` as a number; raises without a prompt."""
    _, length = check_ids(function, argument, ids, 2**62)
    if length == 0:
        raise ShapeError.about(
            function, argument, must="hold at least one token", got=tuple(ids.shape), then="Begin with a start token."
        )
    return whole(function, "max_new_tokens", max_new_tokens, low=0, high=2**31)
