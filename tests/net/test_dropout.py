"""Dropout of a module or model: drawn from one seed, the same in backward, and of the right probability."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from tests.net.calls import Call, as_tensor, equal, results
from tests.net.families import FAMILIES, TOKENS, by_structure
from tests.net.modules import MODULES, Module, typical

EACH = pytest.mark.parametrize("name", by_structure([*FAMILIES, *MODULES]))

#: Families whose configs have no dropout.
WITHOUT_DROPOUT = ("clip", "siglip")


def subject(name: str, dropout: float) -> tuple[Any, Call]:
    """A model in training mode and a call of it."""
    if name in FAMILIES:
        return FAMILIES[name].swapped(dropout).train(), FAMILIES[name].call(TOKENS, "none")
    row = typical(name)[0]
    dropping = Module(name, tuple({**row.values, "dropout": dropout, "training": True}.items()))
    return dropping.make(), dropping.call()


def _loss(model: Any, call: Call, seed: int = 7) -> Tensor:
    torch.manual_seed(seed)
    output = as_tensor(model(**call.arguments))
    generator = torch.Generator().manual_seed(3)
    return (output * torch.randn(output.shape, generator=generator)).sum()


@EACH
def test_training_is_reproducible_from_one_seed(name: str) -> None:
    model, call = subject(name, 0.3)
    assert torch.equal(_loss(model, call), _loss(model, call, seed=8)) == (name in WITHOUT_DROPOUT)
    first = results(model, call)
    equal(results(model, call), first)


@EACH
def test_gradients_use_the_dropout_of_forward(name: str) -> None:
    """The loss of one seed changes along a direction of all parameters by the directional derivative."""
    model, call = subject(name, 0.3)
    parameters = [part for part in model.parameters() if part.requires_grad]
    grads = torch.autograd.grad(_loss(model, call), parameters, allow_unused=True)
    generator, step = torch.Generator().manual_seed(5), 3e-4
    pairs = [(part, grad) for part, grad in zip(parameters, grads, strict=True) if grad is not None]
    # The change is largest along the gradient, so rounding matters least.
    norm = torch.stack([grad.norm() for _, grad in pairs]).norm()
    ways = [grad / norm + 0.3 * torch.randn(grad.shape, generator=generator) / grad.numel() ** 0.5 for _, grad in pairs]
    promised = sum(float((grad.double() * way.double()).sum()) for (_, grad), way in zip(pairs, ways, strict=True))
    losses = []
    for sign in (1.0, -2.0):
        with torch.no_grad():
            for (part, _), way in zip(pairs, ways, strict=True):
                part.add_(way, alpha=sign * step)
        losses.append(_loss(model, call).item())
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(promised, rel=0.05)


@EACH
def test_dropout_of_probability_0_has_no_effect(name: str) -> None:
    model, call = subject(name, 0.0)
    trained = results(model, call)
    equal(results(model, call, seed=8), trained)
