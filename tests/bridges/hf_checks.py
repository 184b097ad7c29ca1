"""Shared by the tests of transformers' layers: models with distinct weights, and common assertions."""

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
    """A model in eval mode with distinct weights, large enough for attention to matter."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for part in model.parameters():
            # Equal norms and biases would hide a mix-up, and small weights make attention uniform.
            part.add_(torch.randn(part.shape) * (0.3 if part.dim() == 1 else 0.1))
    return model.to(dtype).eval()


def ids_of(batch: int = 2, length: int = 9, seed: int = 0) -> Tensor:
    """Tokens of a vocabulary of 50."""
    return torch.randint(1, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def decoded(model: Any, ids: Tensor, calls: tuple[int, ...] | None = None, cache: Any = None) -> Tensor:
    """Logits of calls of ``calls`` tokens each; by default a prompt, then decode steps."""
    calls = calls or {9: (9,), 16: (9, 1, 1, 3, 1, 1)}[ids.shape[1]]
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(list(calls), 1)], 1)


def learns_between_calls_without_gradients(model: Any, call: Callable[[Any], Tensor]) -> None:
    """Assert that calls without gradients between training steps do not change the gradients."""
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
            actual, right = gradients(model), gradients(fresh)
            assert actual.keys() == right.keys()
            for key, expected in right.items():
                torch.testing.assert_close(actual[key], expected, rtol=1e-4, atol=1e-4)
            for step in steps:
                step.step()


def trains_with_the_gradients_of_eager(model: Any, times: int) -> None:
    """Swap a model and assert ``times`` times that its gradients match the original's."""
    ids, upstream = ids_of(), torch.randn(2, 9, 50, generator=torch.Generator().manual_seed(3))

    def gradients(of: Any) -> dict[str, Tensor]:
        output = of(ids, use_cache=False).logits
        gradients = torch.autograd.grad(output, list(of.parameters()), upstream.to(output.dtype))
        return dict(zip(dict(of.named_parameters()), gradients, strict=True))

    exact, textbook = gradients(copy.deepcopy(model).double()), gradients(model)
    ch.swap(model)
    for _ in range(times):
        actual = gradients(model)
        for key, truth in exact.items():
            within_budget(key, actual[key], textbook[key], truth, terms=18 * 72)


def attending(calls: list[str]) -> list[str]:
    """Fused calls except single feedforwards."""
    return [call for call in calls if call != "feedforward"]
