"""Tokens, gradients and parameters of a fused layer that are not contiguous."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from tests.agreement import needs_native
from tests.nn.layers.definition import block, budget_of, draw, fused, output_and_gradients, same, tokens, upstream_of

pytestmark = [needs_native, pytest.mark.covering(1)]

LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batches inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda x: torch.cat([torch.full_like(x, torch.nan), x], -1).chunk(2, -1)[1],
    "every second": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "negative": lambda x: torch._neg_view(-x),
}


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("lay", LAID)
@pytest.mark.parametrize("dense_first", [True, False])
def test_strides_of_tokens_and_gradients_do_not_change_bits(dense_first: bool, lay: str, norm_first: bool) -> None:
    module, x = block(norm_first=norm_first), tokens()
    upstream = upstream_of(module(x))
    right = output_and_gradients(module, x, upstream=upstream)
    for round_ in range(12):
        strided, which = (round_ // 4 == 1) == dense_first, round_ % 4
        leaf = x.detach().clone().requires_grad_()
        given = LAID[lay](leaf) if strided and which != 1 else leaf
        arrived = LAID[lay](upstream) if strided and which != 0 else upstream
        output = fused(module, given)
        same([output.detach(), *torch.autograd.grad(output, [leaf, *module.parameters()], arrived)], right)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("watching", [False, True])
def test_lazily_negated_tokens_give_the_same_bits(watching: bool, norm_first: bool) -> None:
    module, x = block(norm_first=norm_first), tokens().detach()
    right = module(x).detach()
    for _ in range(4):
        given = torch._neg_view(-x)
        assert given.is_neg()
        with ch.observe(module, ch.Want(lse=True)) if watching else contextlib.nullcontext():
            assert torch.equal(module(given), right)


WEIGHTS = [
    "attention.query_projection.weight", "attention.output_projection.weight", "feedforward.expand.weight",
    "feedforward.contract.weight", "attention.value_projection.bias", "attention.output_projection.bias",
    "feedforward.expand.bias", "feedforward.contract.bias", "attention_norm.weight", "attention_norm.bias",
    "feedforward_norm.weight", "feedforward_norm.bias",
]  # fmt: skip


@pytest.mark.parametrize("dense_first", [True, False])
@pytest.mark.parametrize("name", WEIGHTS)
def test_strides_of_parameters_match_the_formula(name: str, dense_first: bool) -> None:
    """Column-major, slices of a wider tensor, every second element."""
    module, x = block(), tokens()
    place, _, last = name.rpartition(".")
    dense = module.get_submodule(place).get_parameter(last).detach()
    strided = [torch.stack([dense, torch.full_like(dense, torch.nan)], -1)[..., 0]]
    if dense.ndim == 2:
        strided += [dense.t().contiguous().t(), torch.cat([dense, torch.full_like(dense, torch.nan)], 1).chunk(2, 1)[0]]
    order = [[dense], strided] if dense_first else [strided, [dense]]
    for laid in (one for some in order for one in some):
        assert torch.equal(laid, dense)
        setattr(module.get_submodule(place), last, nn.Parameter(laid))
        for _ in range(3):
            budget_of(module, x, None, output_and_gradients(module, x, layer=None))


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_expanded_tokens_and_gradients_match_the_formula(norm_first: bool) -> None:
    module, one = block(norm_first=norm_first), draw(1, 7, 32)
    for _ in range(4):
        x = one.clone().expand(3, 7, 32).requires_grad_()
        output = module(x)
        row = draw(32, seed=5).expand(3, 7, 32)
        results = [output.detach(), *torch.autograd.grad(output, [x, *module.parameters()], row)]
        budget_of(module, x.detach().clone().requires_grad_(), None, results, upstream=row)
