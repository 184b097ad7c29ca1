"""Gradients of a fused layer: subsets, second derivatives and batched gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from tests.agreement import needs_native
from tests.budget import within_budget
from tests.nn.layers.definition import (
    block,
    budget_of,
    draw,
    factors_of,
    formula,
    fused,
    output_and_gradients,
    same,
    seeds_of,
    tokens,
    upstream_of,
)

pytestmark = [needs_native, pytest.mark.covering(1)]

# ---- gradients that are not needed --------------------------------------------------------------------------

FROZEN: dict[str, Callable[[str], bool]] = {
    "norms": lambda name: "norm" in name,
    "first norm": lambda name: name.startswith("attention_norm"),
    "second norm": lambda name: name.startswith("feedforward_norm"),
    "weight of the first norm": lambda name: name == "attention_norm.weight",
    "bias of the second norm": lambda name: name == "feedforward_norm.bias",
    "feedforward": lambda name: name.startswith("feedforward."),
    "last layer of the feedforward": lambda name: "contract" in name,
    "last layer of the attention": lambda name: "output_projection" in name,
    "queries, keys and values": lambda name: any(part in name for part in ("query_", "key_", "value_")),
    "keys": lambda name: "key_projection" in name,
    "x": lambda name: name == "x",
    "x and norms": lambda name: name == "x" or "norm" in name,
    "all but x": lambda name: name != "x",
    "all but the attention": lambda name: not name.startswith("attention."),
    "all but the feedforward": lambda name: not name.startswith("feedforward."),
    "weights": lambda name: name.endswith("weight"),
    "biases": lambda name: name.endswith("bias"),
    "biases and x": lambda name: name.endswith("bias") or name == "x",
    "gate": lambda name: "gate" in name,
    "what a gate multiplies": lambda name: "expand" in name,
}


@pytest.mark.parametrize("needed", FROZEN)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_only_needed_gradients_are_computed(norm_first: bool, gated: bool, dropout: float, needed: str) -> None:
    module, x = block(norm_first=norm_first, dropout=dropout, gated=gated), tokens()
    if needed == "gate" and not gated:
        pytest.skip("there is none")
    mask = ch.Causal()
    inputs = {"x": x, **dict(module.named_parameters())}
    whole = dict(zip(inputs, output_and_gradients(module, x, mask)[1:], strict=True))
    wide, exact_x = copy.deepcopy(module).double(), x.detach().double().requires_grad_()
    factors = factors_of(module, x, seeds_of(module))

    def plainly(module: Any, x: Tensor) -> Tensor:
        return formula(module, x, mask, factors)

    texts = [output_and_gradients(*pair, call=plainly, layer=False)[1:] for pair in ((module, x), (wide, exact_x))]
    textbook, exact = (dict(zip(inputs, text, strict=True)) for text in texts)
    for name, part in inputs.items():
        part.requires_grad_(FROZEN[needed](name))
    for _ in range(2):
        torch.manual_seed(7)
        output = fused(module, x, mask=mask)
        output.backward(upstream_of(output))
        for name, part in inputs.items():
            if not FROZEN[needed](name):
                assert part.grad is None, name
                continue
            assert part.grad is not None, name
            if "bias" in name and "norm" not in name and not FROZEN[needed](name.replace("bias", "weight")):
                # A separate sum, not part of the GEMM.
                within_budget(name, part.grad, textbook[name], exact[name], terms=14)
            else:
                assert torch.equal(part.grad, whole[name]), name
            part.grad = None


def test_frozen_layer_has_no_grad_fn() -> None:
    module, x = block().requires_grad_(False), tokens().detach()
    right = formula(copy.deepcopy(module).double(), x.double())
    for _ in range(2):
        output = fused(module, x)
        assert output.grad_fn is None
        within_budget("output", output, formula(module, x), right, terms=128)


# ---- autograd -----------------------------------------------------------------------------------------------


SECOND: dict[str, dict[str, Any]] = {
    "gelu": {},
    "relu": {"activation": "relu"},
    "silu, gated": {"activation": "silu", "gated": True},
    "rotary, grouped heads, rms": {"rotary": 20.0, "num_kv_heads": 2, "norm": "rms"},
    "rules": {"scores": [ch.Alibi(4), ch.SoftCap(2.0)]},
}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_create_graph_gives_the_same_gradients(norm_first: bool, gated: bool, dropout: float) -> None:
    module, x = block(norm_first=norm_first, dropout=dropout, gated=gated), tokens()
    for _ in range(2):
        torch.manual_seed(7)
        output = module(x)
        gradients = torch.autograd.grad(output, [x, *module.parameters()], upstream_of(output), create_graph=True)
        assert gradients[0].requires_grad
        factors = factors_of(module, x, seeds_of(module))
        budget_of(module, x, None, [output.detach(), *(part.detach() for part in gradients)], factors)


@pytest.mark.parametrize("options", SECOND.values(), ids=SECOND)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_second_derivatives_of_tokens_and_every_parameter(
    norm_first: bool, dropout: float, options: dict[str, Any]
) -> None:
    module, x = block(norm_first=norm_first, dropout=dropout, **options), tokens()
    mask, factors = ch.Padding(torch.tensor([7, 3])), factors_of(module, x, seeds_of(module))

    def seconds(module: Any, x: Tensor, call: Callable[[Any, Tensor], Tensor]) -> list[Tensor]:
        learned = [x, *module.parameters()]
        torch.manual_seed(7)
        output = call(module, x)
        first = torch.autograd.grad((output * upstream_of(output)).square().sum(), learned, create_graph=True)
        total = sum(((part * upstream_of(part, 5)).sum() for part in first), torch.zeros((), dtype=x.dtype))
        return list(torch.autograd.grad(total, learned))

    def plainly(module: Any, x: Tensor) -> Tensor:
        return formula(module, x, mask, factors)

    actual = seconds(module, x, lambda module, x: fused(module, x, mask=mask))
    textbook = seconds(module, x, plainly)
    exact = seconds(copy.deepcopy(module).double(), x.detach().double().requires_grad_(), plainly)
    for place, three in enumerate(zip(actual, textbook, exact, strict=True)):
        within_budget(str(place), *three, terms=128)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_batched_gradients_match_the_formula(norm_first: bool) -> None:
    module, x = block(norm_first=norm_first), tokens()
    upstream = torch.stack([draw(2, 7, 32, seed=seed) for seed in (3, 9)])
    inputs = [x, *module.parameters()]
    many = torch.autograd.grad(fused(module, x), inputs, upstream, is_grads_batched=True)
    for place, one in enumerate(upstream):
        budget_of(module, x, None, [module(x).detach(), *(part[place] for part in many)], upstream=one)


def test_vectorized_jacobian_matches_the_formula() -> None:
    module, x = block(width=8, heads=2), tokens(batch=1, length=3, width=8)
    actual = torch.autograd.functional.jacobian(module, x, vectorize=True)
    wide = copy.deepcopy(module).double()
    textbook = torch.autograd.functional.jacobian(lambda x: formula(module, x), x)
    exact = torch.autograd.functional.jacobian(lambda x: formula(wide, x), x.double())
    within_budget("jacobian", actual, textbook, exact, terms=32)


def test_backward_twice_gives_the_same_bits() -> None:
    module, x = block(), tokens()
    inputs = [x, *module.parameters()]
    output = module(x)
    pair = [torch.autograd.grad(output, inputs, upstream_of(output), retain_graph=True) for _ in range(2)]
    same(*pair)
    budget_of(module, x, None, [output.detach(), *pair[0]])


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_saved_tensor_hooks_do_not_change_gradients(norm_first: bool) -> None:
    module, x = block(norm_first=norm_first, dropout=0.2), tokens()
    right = output_and_gradients(module, x)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda one: one.clone(), lambda one: one):
            same(output_and_gradients(module, x), right)
        with torch.autograd.graph.save_on_cpu():
            same(output_and_gradients(module, x), right)


def test_an_output_may_be_modified_in_place() -> None:
    module, x = block(), tokens()
    plain = torch.autograd.grad(module(x).mul(2.0).sum(), x)[0]
    output = module(x)
    output.mul_(2.0)
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], plain)


def test_modifying_a_weight_before_backward_raises() -> None:
    module = block()
    for change in (
        module.feedforward.contract.weight,
        module.attention_norm.weight,
        module.attention.key_projection.weight,
    ):
        output = module(tokens())
        with torch.no_grad():
            change.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
