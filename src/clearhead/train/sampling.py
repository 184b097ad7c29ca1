"""Streaming text generation with a trained language model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from clearhead.errors import ShapeError
from clearhead.nn import LanguageModel
from clearhead.nn.generation import Sampler, evaluating
from clearhead.train.saved import Run

__all__ = ["stream"]

_REPLACEMENT = "�"


def stream(
    run: Run,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int | None = None,
    function: str = "generate",
) -> Iterator[str]:
    """The continuation of ``prompt``, piece by piece.

    Pieces end at complete characters: a token with part of a character is yielded with the rest. Raises
    ``ClearheadError`` before the first piece for an invalid prompt or number.
    """
    run.require("lm", function)
    if max_new_tokens < 1:
        must, then = "be at least 1", "Choose another value."
        raise ShapeError.about(function, "max_new_tokens", must=must, got=max_new_tokens, then=then)
    device = next(run.model.parameters()).device
    sampler = Sampler(function, temperature=temperature, top_k=top_k, seed=seed)
    ids = torch.tensor([run.encode(prompt)], device=device)
    return _pieces(run, ids, max_new_tokens, sampler)


def _pieces(run: Run, ids: Tensor, max_new_tokens: int, sampler: Sampler) -> Iterator[str]:
    model = run.model
    assert isinstance(model, LanguageModel)
    cache = model.new_cache()
    added: list[int] = []
    given = ""
    sequences = sampler.sequences(ids)
    with evaluating(model):
        for _ in range(max_new_tokens):
            if ids.shape[1] > model.max_len:  # positions shift, so cached keys are invalid
                logits = model(ids[:, -model.max_len :])
            else:
                logits = model(ids[:, cache.length :], cache=cache)
            drawn = sampler.draw(logits[:, -1], sequences, [len(added)])
            ids = torch.cat([ids, drawn], dim=1)
            added.append(int(drawn))
            text = run.tokenizer.decode(added)
            whole = text.rstrip(_REPLACEMENT)
            if len(whole) > len(given):
                yield whole[len(given) :]
                given = whole
    if len(text) > len(given):
        yield text[len(given) :]
