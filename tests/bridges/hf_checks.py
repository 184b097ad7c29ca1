"""What tests of transformers' layers share: models whose parts all differ, and what each of them has to hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import clearhead as ch
from tests.budget import within_budget

__all__ = [
    "decoded",
    "distinct",
    "ids_of",
    "learns_between_calls_without_gradients",
    "trains_with_the_gradients_of_eager",
]


def distinct(make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> Any:
    """A model in eval mode, its weights large enough for attention to matter, and no two parts' the same."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for part in model.parameters():
            # Ones and zeros would hide one norm's weights, or a bias, behind another's; and small weights attention.
            part.add_(torch.randn(part.shape) * (0.3 if part.dim() == 1 else 0.1))
    return model.to(dtype).eval()


def ids_of(batch: int = 2, length: int = 9, seed: int = 0) -> Tensor:
    """Tokens of a vocabulary of 50."""
    return torch.randint(1, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def decoded(model: Any, ids: Tensor, calls: tuple[int, ...] | None = None, cache: Any = None) -> Tensor:
    """Logits of calls of so many tokens each: by default some at once and the rest one by one; of nine, all at once."""
    calls = calls or {9: (9,), 16: (9, 1, 1, 3, 1, 1)}[ids.shape[1]]
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(list(calls), 1)], 1)


def learns_between_calls_without_gradients(model: Any, call: Callable[[Any], Tensor]) -> None:
    """Gradients of a model that is called without them in between are those of one that is not, step after step."""
    fresh = copy.deepcopy(model)
    for each in (model, fresh):
        ch.swap(each)
    steps = [torch.optim.SGD(each.parameters(), 1e-5) for each in (model, fresh)]

    def gradients(of: Any) -> dict[str, Tensor]:
        of.zero_grad(set_to_none=True)
        call(of).square().sum().backward()
        return {key: part.grad for key, part in of.named_parameters() if part.grad is not None}

    for _ in range(2):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                call(model)
            found, right = gradients(model), gradients(fresh)
            assert found.keys() == right.keys()
            for key, own in right.items():
                torch.testing.assert_close(found[key], own, rtol=1e-4, atol=1e-4)
            for step in steps:
                step.step()


def trains_with_the_gradients_of_eager(model: Any, times: int) -> None:
    """So many steps of training of a model, which is swapped for that, have its own gradients."""
    ids, upstream = ids_of(), torch.randn(2, 9, 50, generator=torch.Generator().manual_seed(3))

    def gradients(of: Any) -> dict[str, Tensor]:
        output = of(ids, use_cache=False).logits
        found = torch.autograd.grad(output, list(of.parameters()), upstream.to(output.dtype))
        return dict(zip(dict(of.named_parameters()), found, strict=True))

    exact, textbook = gradients(copy.deepcopy(model).double()), gradients(model)
    ch.swap(model)
    for _ in range(times):
        found = gradients(model)
        for key, truth in exact.items():
            within_budget(key, found[key], textbook[key], truth, terms=18 * 72)


def attending(calls: list[str]) -> list[str]:
    """Fused calls without feedforwards by themselves."""
    return [call for call in calls if call != "feedforward"]
