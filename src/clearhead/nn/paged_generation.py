"""Generation of many sequences over one paged cache: those that fit run together, others start when some end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from clearhead.errors import CacheFullError
from clearhead.nn.generation import Sampler
from clearhead.paged_cache import PagedKVCache
from clearhead.paged_step import PagedStep
from clearhead.shapes import Float, Int

__all__ = ["extend_each"]

#: Tokens of prompts that are read in one call, beyond which activations would outgrow the cache.
_MOST_PROMPT_TOKENS: Final = 4096


@dataclass(eq=False)
class _Request:
    """One prompt on its way."""

    place: int
    prompt: Int[Tensor, " len"]
    blocks: int
    key: bytes
    sequence: int = -1
    drawn: list[int] = field(default_factory=list)


def extend_each(
    function: str,
    prompts: Sequence[Int[Tensor, " len"]],
    max_new_tokens: int,
    next_logits: Callable[[Tensor, PagedStep], Float[Tensor, "sequences vocab_size"]],
    sampler: Sampler,
    stop: int | None,
    cache: PagedKVCache,
) -> list[Int[Tensor, " longer"]]:
    """Append up to ``max_new_tokens`` tokens to every prompt.

    Args:
        function: the public name that was called, for errors.
        prompts: int ``[len]`` each.
        max_new_tokens: how many tokens to add.
        next_logits: reads the packed new tokens of a step; gives the scores after the last one of each sequence.
        sampler: draws the tokens.
        stop: a token id that ends a sequence.
        cache: holds the sequences meanwhile; none of them is left in it.
    """
    keys = sampler.sequences(prompts)
    waiting = deque(_requests(function, prompts, keys, max_new_tokens, cache))
    done: list[Tensor] = [*prompts]
    active: list[_Request] = []
    try:
        while (waiting or active) and max_new_tokens > 0:
            started = _start(waiting, active, cache)
            if started:
                _advance(started, [request.prompt for request in started], next_logits, sampler, cache)
                active += started
            else:
                last = [request.prompt.new_tensor(request.drawn[-1:]) for request in active]
                _advance(active, last, next_logits, sampler, cache)
            for request in [each for each in active if len(each.drawn) == max_new_tokens or each.drawn[-1] == stop]:
                active.remove(request)
                cache.remove(request.sequence)
                done[request.place] = torch.cat([request.prompt, request.prompt.new_tensor(request.drawn)])
    finally:
        for request in active:
            if request.sequence in cache.sequences:
                cache.remove(request.sequence)
    return done


def _requests(
    function: str, prompts: Sequence[Tensor], keys: Sequence[bytes], max_new_tokens: int, cache: PagedKVCache
) -> list[_Request]:
    requests = []
    for place, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
        blocks = -(-(len(prompt) + max_new_tokens) // cache.block_size)
        if blocks > cache.free_blocks:
            raise CacheFullError.about(
                function, "cache", must=f"have {blocks} free blocks for prompt {place} and its new tokens",
                got=cache.free_blocks, then="Make the cache with more num_blocks, or remove its sequences.",
            )  # fmt: skip
        requests.append(_Request(place, prompt, blocks, key))
    return requests


def _start(waiting: deque[_Request], active: Sequence[_Request], cache: PagedKVCache) -> list[_Request]:
    """Take the next requests whose blocks fit beside what the active ones may still need."""
    promised = sum(request.blocks - -(-cache.length(request.sequence) // cache.block_size) for request in active)
    available = cache.free_blocks - promised
    started: list[_Request] = []
    tokens = 0
    while (
        waiting
        and waiting[0].blocks <= available
        and (not started or tokens + len(waiting[0].prompt) <= _MOST_PROMPT_TOKENS)
    ):
        request = waiting.popleft()
        available -= request.blocks
        tokens += len(request.prompt)
        started.append(request)
    return started


def _advance(
    requests: Sequence[_Request],
    tokens: Sequence[Tensor],
    next_logits: Callable[[Tensor, PagedStep], Tensor],
    sampler: Sampler,
    cache: PagedKVCache,
) -> None:
    """Read the new tokens of each request, and draw the next."""
    fresh = [request for request in requests if request.sequence < 0]
    for request in fresh:
        request.sequence = cache.add()
    counts = {request.sequence: len(part) for request, part in zip(requests, tokens, strict=True)}
    try:
        with cache.extend(counts) as step:
            logits = next_logits(torch.cat([*tokens]), step)
            drawn = sampler.draw(logits, [each.key for each in requests], [len(each.drawn) for each in requests])
    except BaseException:
        for request in fresh:
            cache.remove(request.sequence)
        raise
    for request, token in zip(requests, drawn[:, 0].tolist(), strict=True):
        request.drawn.append(token)
