"""Tensors that a user's score function closes over, on ``tiled``: which get a gradient, and which are refused."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from tests.agreement import draw


def inputs(grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (draw(1, 2, 6, 4, seed=seed, grad=grad) for seed in range(3))
    return query, key, value


class _Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Parameter(torch.ones(()))
        self.unused = torch.nn.Parameter(torch.ones(3))

    def rule(self, score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return score * self.used


@pytest.mark.parametrize("grad", [False, True])
def test_unreachable_learned_tensor_is_refused_in_forward(grad: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(()))
    memoised = lru_cache(lambda: weight)
    rule = ch.ScoreFunction(lambda score, b, h, i, j: score * memoised())
    with pytest.raises(ch.UnsupportedError, match="name the learned tensors it reads"):
        ch.attention(*inputs(grad), scores=rule, backend="tiled")
    with torch.no_grad():
        assert not ch.attention(*inputs(grad), scores=rule, backend="tiled").requires_grad


def test_tensor_read_by_no_tile_has_no_gradient() -> None:
    module, tensors = _Module(), inputs(True)
    ch.attention(*tensors, scores=ch.ScoreFunction(module.rule), backend="tiled").square().sum().backward()
    assert module.used.grad is not None
    assert module.unused.grad is None


@pytest.mark.parametrize("rule", [ch.RelativeBias, ch.DenseBias], ids=lambda rule: rule.__name__)
def test_rule_applied_to_no_tile_has_a_gradient_of_zero(rule: Any) -> None:
    bias = torch.zeros(2, 5) if rule is ch.RelativeBias else torch.zeros(6, 6)
    bias.requires_grad_()
    nothing = ch.Window(0) & ~ch.Window(0)
    output = ch.attention(*inputs(False), scores=rule(bias), mask=nothing, backend="tiled")
    assert torch.equal(torch.autograd.grad(output.sum(), bias)[0], torch.zeros_like(bias))


def test_writing_into_a_closed_over_tensor_raises() -> None:
    """Writes to other tensors of the module are allowed."""
    module, tensors = _Module(), inputs(True)
    output = ch.attention(*tensors, scores=ch.ScoreFunction(module.rule), backend="tiled")
    with torch.no_grad():
        module.unused.fill_(7.0)
    output.sum().backward(retain_graph=True)
    with torch.no_grad():
        module.used.fill_(7.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_function_that_fails_on_one_place_still_runs() -> None:
    added = torch.linspace(0.0, 1.0, 6, requires_grad=True)
    tensors = inputs(True)
    rule = ch.ScoreFunction(lambda score, b, h, i, j: score + added * score)
    actual, right = (
        torch.autograd.grad(ch.attention(*tensors, scores=rule, backend=name).square().sum(), [*tensors, added])
        for name in ("tiled", "reference")
    )
    for one, other in zip(actual, right, strict=True):
        torch.testing.assert_close(one, other)


def test_second_derivative_through_row_weights_alone_is_the_references() -> None:
    def second(backend: str) -> Tensor:
        weights = torch.ones(1, 1, 2, 6, requires_grad=True)
        want = ch.Want(row_weights=weights)
        mixed = ch.observe_attention(*inputs(False), want=want, backend=backend).row_weights
        assert mixed is not None
        (grad,) = torch.autograd.grad(mixed.pow(3).sum(), weights, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), weights)[0]

    torch.testing.assert_close(second("tiled"), second("reference"))
