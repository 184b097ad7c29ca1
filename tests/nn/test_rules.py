"""Score rules of a module: their tensors train, move and are saved with it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.nn import Encoder, MultiHeadAttention

LEARNED = {
    "alibi": (lambda p: ch.Alibi(slopes=p), (2,), "scores.0.slopes"),
    "relative": (lambda p: ch.RelativeBias(p), (2, 5), "scores.0.table"),
    "sink": (lambda p: ch.Sink(p), (2,), "scores.0.logits"),
    "one sink for all": (lambda p: ch.Sink(p), (), "scores.0.logits"),
    "dense": (lambda p: ch.DenseBias(p), (4, 4), "scores.0.bias"),
    "dense by head": (lambda p: ch.DenseBias(p), (1, 2, 4, 4), "scores.0.bias"),
}


@pytest.mark.parametrize("kind", LEARNED)
def test_learned_tensors_are_parameters_that_train(kind: str) -> None:
    make, shape, name = LEARNED[kind]
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape))
    module = MultiHeadAttention(8, 2, scores=make(parameter))
    assert dict(module.named_parameters())[name] is parameter
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    x = torch.randn(2, 4, 8)
    before = module(x)
    for _ in range(2):
        optimizer.zero_grad()
        module(x).square().sum().backward()
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0
        optimizer.step()
    frozen = module.scores.rules()[0]
    assert torch.equal(frozen.tensors()[0].flatten(), parameter.flatten())
    assert not torch.equal(module(x), before)


@pytest.mark.parametrize("kind", LEARNED)
def test_rules_are_saved_copied_and_converted_with_the_module(kind: str) -> None:
    make, shape, name = LEARNED[kind]
    torch.manual_seed(0)
    module = MultiHeadAttention(8, 2, scores=make(nn.Parameter(torch.randn(shape))))
    other = MultiHeadAttention(8, 2, scores=make(nn.Parameter(torch.randn(shape))))
    x = torch.randn(2, 4, 8)
    assert not torch.equal(module(x), other(x))
    assert name in module.state_dict()
    other.load_state_dict(module.state_dict())
    assert torch.equal(module(x), other(x))
    copied = copy.deepcopy(module)
    assert torch.equal(copied(x), module(x))
    copied(x).sum().backward()
    assert dict(copied.named_parameters())[name].grad is not None
    assert dict(module.named_parameters())[name].grad is None
    doubled = module.double()
    assert doubled.scores.rules()[0].tensors()[0].dtype == torch.float64
    doubled(x.double()).sum().backward()
    assert doubled.get_parameter(name).grad is not None


def test_fixed_tensors_are_buffers() -> None:
    module = MultiHeadAttention(8, 2, scores=[ch.SoftCap(5.0), ch.Alibi(2)])
    assert "scores.1.slopes" in dict(module.named_buffers())
    assert "scores.1.slopes" in module.state_dict()
    assert module.to("meta").scores.rules()[1].tensors()[0].device.type == "meta"


def test_tensors_in_a_closure_are_registered_and_train() -> None:
    strength = nn.Parameter(torch.tensor(0.3))
    rule = ch.ScoreFunction(lambda score, batch, head, q_pos, k_pos: score - strength * (q_pos - k_pos).abs())
    module = MultiHeadAttention(8, 2, scores=[rule])
    assert any(parameter is strength for parameter in module.parameters())
    module(torch.randn(1, 5, 8)).square().sum().backward()
    assert strength.grad is not None
    assert strength.grad != 0


def test_blocks_share_a_learned_rule() -> None:
    table = nn.Parameter(torch.zeros(2, 5))
    encoder = Encoder(8, 2, 3, scores=ch.RelativeBias(table))
    assert sum(parameter is table for parameter in encoder.parameters()) == 1
    encoder(torch.randn(1, 4, 8)).square().sum().backward()
    assert table.grad is not None


def test_relative_holds_for_the_whole_list() -> None:
    assert MultiHeadAttention(8, 2, scores=[ch.Alibi(2), ch.SoftCap(5.0)]).scores.relative
    assert not MultiHeadAttention(8, 2, scores=[ch.Alibi(2), ch.DenseBias(torch.zeros(4, 4))]).scores.relative
