"""The dropout of swapped layers: probability, independence and seeds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clearhead.bridges import swap
from clearhead.integrations.torch.parts import SwappedDropout, SwappedLinear

ENTRIES = 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_has_its_probability_and_independent_elements(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.ones(2**10, 2**10, dtype=dtype, requires_grad=True)
    y = SwappedDropout(p)(x)
    survived = (y != 0).double()
    deviation = (p * (1 - p) / ENTRIES) ** 0.5
    assert abs(survived.mean() - (1 - p)) < 5 * deviation + 2**-17
    # Neighbours, and the eight elements that share a draw, are dropped equally often and independently.
    for together in (survived.view(-1, 4), survived.view(-1, 8, 16)[..., 3]):
        times, count = together.shape
        assert (together.mean(dim=0) - (1 - p)).abs().max() < 5 * (p * (1 - p) / times) ** 0.5 + 2**-17
        both = (1 - p) ** 2
        covariance = (together.T @ together / times - both).masked_fill(torch.eye(count).bool(), 0.0)
        assert covariance.abs().max() < 5 * (both * (1 - both) / times) ** 0.5 + 2**-16
    # p is rounded to 1/65536: the relative error of 1 - p grows as 1 - p shrinks.
    rtol = 2 * torch.finfo(dtype).eps + 2**-17 / (1 - p)
    torch.testing.assert_close(y.detach(), (survived / (1 - p)).to(dtype), rtol=rtol, atol=0)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y.detach())


def test_dropout_follows_mode_probability_and_seed() -> None:
    x = torch.randn(2**8, 2**8)
    module = SwappedDropout(0.5)
    assert module.eval()(x) is x
    for p, expected in ((0.0, x), (1.0, torch.zeros_like(x))):
        assert torch.equal(SwappedDropout(p)(x), expected)
    torch.manual_seed(1)
    first = module.train()(x)
    torch.manual_seed(1)
    assert torch.equal(module(x), first)
    torch.manual_seed(2)
    assert not torch.equal(module(x), first)
    few = torch.ones(4, 4)
    torch.manual_seed(3)
    drawn = module(few)
    torch.manual_seed(3)
    assert torch.equal(module(few.double()), drawn.double())


def test_only_layers_get_swapped_parts() -> None:
    model = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2), nn.Linear(8, 8), nn.Dropout(0.1), nn.MultiheadAttention(8, 2)
    )
    swap(model)
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(SwappedLinear) == 2
    assert kinds.count(SwappedDropout) == 3
    assert type(model[1]) is nn.Linear
    assert type(model[2]) is nn.Dropout
