"""Layers that read the same input: project_each() and linear_each() against separate layers of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.utils.flop_counter import FlopCounterMode

from clearhead import choices as sizes
from clearhead.nn.linear import Linear, linear_each
from clearhead.projection import KINDS, linear, paths, project_each
from tests.budget import within_budget

PATHS = [
    pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=f"{why}"))
    for name, path in paths.PATHS.items()
    for why in [path.absent(torch.float32)]
]
FORWARD, INPUT, WEIGHT = KINDS


@pytest.fixture(autouse=True, params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One path forced, and the smallest product large enough."""
    monkeypatch.setattr(sizes, "SMALL", 1)
    monkeypatch.setattr(sizes, "SMALL_UNPREPARED", 1)
    monkeypatch.setenv("CLEARHEAD_PROJECTION", request.param)
    return str(request.param)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of product for which a path was chosen, in order; empty where ``F.linear`` itself ran."""
    kinds: list[str] = []
    own = linear.path_of
    monkeypatch.setattr(linear, "path_of", lambda kind, *sizes: kinds.append(kind) or own(kind, *sizes))
    return kinds


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _layers(
    *widths: int, inputs: int = 40, bias: str = "all", dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases, every one a leaf; ``bias``: all of them, none, or every second one."""
    weights = [_numbers(width, inputs, seed=10 + place).to(dtype) for place, width in enumerate(widths)]
    biases: list[Tensor | None] = [_numbers(width, seed=50 + place).to(dtype) for place, width in enumerate(widths)]
    if bias != "all":
        biases = [each if bias == "some" and place % 2 else None for place, each in enumerate(biases)]
    return [weight.requires_grad_() for weight in weights], [
        None if each is None else each.requires_grad_() for each in biases
    ]


def _separate(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def _gradients(
    function: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    used: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> list[Tensor | None]:
    """Outputs, then the gradients of x, of every weight and of every bias; None where there is none."""
    x, *leaves = (
        None if each is None else each.detach().to(dtype or each.dtype).requires_grad_(each.requires_grad)
        for each in (x, *weights, *biases)
    )
    outputs = function(x, leaves[: len(weights)], leaves[len(weights) :])
    places = range(len(outputs)) if used is None else used
    torch.autograd.backward(
        [outputs[place] for place in places],
        [_numbers(*outputs[place].shape, seed=90 + place).to(outputs[place].dtype) for place in places],
    )
    return [*(output.detach() for output in outputs), *(each if each is None else each.grad for each in (x, *leaves))]


def _assert_same(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], used: Sequence[int] | None = None
) -> None:
    """Outputs and gradients, those that are not there too, are those of separate layers."""
    found = _gradients(project_each, x, weights, biases, used)
    own = _gradients(_separate, x, weights, biases, used)
    exact = _gradients(_separate, x, weights, biases, used, torch.float64)
    terms = max(x.numel() // max(x.shape[-1], 1), sum(len(weight) for weight in weights))
    for place, (result, textbook, reference) in enumerate(zip(found, own, exact, strict=True)):
        assert (result is None) == (textbook is None), place
        if result is not None and textbook is not None and reference is not None:
            assert result.dtype == x.dtype
            within_budget(str(place), result, textbook, reference, terms=terms)


@pytest.mark.parametrize("bias", ["all", "none", "some"])
@pytest.mark.parametrize("widths", [(24, 24, 24), (64, 17, 1), (33, 8), (5,), (8, 16, 24, 7, 40, 3)], ids=str)
@pytest.mark.parametrize("leading", [(70,), (3, 7), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_and_gradients_are_those_of_separate_layers(
    path: str, leading: tuple[int, ...], widths: tuple[int, ...], bias: str, dtype: torch.dtype
) -> None:
    if (why := paths.PATHS[path].absent(dtype)) is not None:
        pytest.skip(why)
    _assert_same(_numbers(*leading, 40).to(dtype).requires_grad_(), *_layers(*widths, bias=bias, dtype=dtype))


def test_the_gradients_of_x_are_one_product(chosen: list[str]) -> None:
    weights, biases = _layers(8, 16, 24, 7, 40)
    _gradients(project_each, _numbers(6, 40).requires_grad_(), weights, biases)
    assert chosen == [FORWARD] * 5 + [WEIGHT] * 5 + [INPUT]


def test_the_kernels_round_the_sum_of_several_layers_once(path: str) -> None:
    """Up to as many as one product takes; whole numbers, whose sums in float32 are exact."""
    if path != "native":
        pytest.skip("the others add what is rounded already")
    x = torch.zeros(9, 40, dtype=torch.bfloat16, requires_grad=True)
    weights = [_numbers(24, 40, seed=seed).mul(4).round() for seed in range(4)]
    grads = [_numbers(9, 24, seed=9 + seed).mul(4).round() for seed in range(4)]
    outputs = project_each(x, [weight.bfloat16() for weight in weights], [None] * 4)
    torch.autograd.backward(outputs, [grad.bfloat16() for grad in grads])
    exact = sum(grad @ weight for grad, weight in zip(grads, weights, strict=True))
    assert torch.equal(x.grad, exact.bfloat16())  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("used", [(0,), (1, 2), (0, 2), (2, 1)], ids=str)
def test_an_output_that_nobody_uses_has_no_gradients(chosen: list[str], used: tuple[int, ...]) -> None:
    x, layers = _numbers(30, 40).requires_grad_(), _layers(24, 16, 33)
    found = _gradients(project_each, x, *layers, used)
    assert chosen == [FORWARD] * 3 + [WEIGHT] * len(used) + [INPUT]
    assert [grad is not None for grad in found[4:]] == 2 * [place in used for place in range(3)]
    _assert_same(x, *layers, used)


class _Nothing(torch.autograd.Function):
    """Its backward has no gradient for anything."""

    @staticmethod
    def forward(ctx: object, *given: Tensor) -> Tensor:
        return torch.zeros(())

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[None, ...]:
        return None, None


def test_where_no_gradient_arrives_none_leaves(chosen: list[str]) -> None:
    x, (weights, biases) = _numbers(30, 40).requires_grad_(), _layers(24, 16)
    _Nothing.apply(*project_each(x, weights, biases)).backward()
    assert all(each is not None and each.grad is None for each in (x, *weights, *biases))
    assert chosen == [FORWARD] * 2


def test_an_input_without_a_gradient(chosen: list[str]) -> None:
    x, layers = _numbers(30, 40), _layers(24, 16)
    assert _gradients(project_each, x, *layers)[2] is None
    assert INPUT not in chosen
    _assert_same(x, *layers)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_weights_have_no_gradients(chosen: list[str], frozen: int) -> None:
    x, (weights, biases) = _numbers(30, 40).requires_grad_(), _layers(24, 16, 8)
    weights[frozen].requires_grad_(False)
    assert biases[2] is not None
    biases[2].requires_grad_(False)
    found = _gradients(project_each, x, weights, biases)
    assert [each is not None for each in found[3:]] == [True, frozen != 0, frozen != 1, True, True, True, False]
    assert chosen == [FORWARD] * 3 + [WEIGHT] * 2 + [INPUT]
    _assert_same(x, weights, biases)
    _assert_same(x, weights, [None] * 3)
    _assert_same(x, [weight.requires_grad_(False) for weight in weights], biases)


def test_a_gradient_of_a_bias_is_the_sum_of_the_rows() -> None:
    """Exactly, of whole numbers, also where the weight that it stands beside is frozen."""
    for frozen in (False, True):
        x, (weights, biases) = _numbers(2, 300, 40).requires_grad_(), _layers(24, 17)
        weights[1].requires_grad_(not frozen)
        grads = [_numbers(2, 300, width, seed=width).mul(4).round() for width in (24, 17)]
        torch.autograd.backward(project_each(x, weights, biases), grads)
        for bias, grad in zip(biases, grads, strict=True):
            assert torch.equal(bias.grad, grad.sum((0, 1)))  # type: ignore[union-attr, arg-type]


def test_gradients_that_are_expanded_or_transposed() -> None:
    """As ``sum()`` and a split into heads send them back."""
    x, (weights, biases) = _numbers(2, 6, 40).requires_grad_(), _layers(24, 16, 8)
    leaves = [x, *weights, *(bias for bias in biases if bias is not None)]
    found, own = (
        torch.autograd.grad(
            one.sum() + (two.view(2, 6, 4, 4).transpose(1, 2) ** 2).sum() + three[..., ::2].sum(), leaves
        )
        for one, two, three in (function(x, weights, biases) for function in (project_each, _separate))
    )
    torch.testing.assert_close(found, own)


def test_second_derivatives() -> None:
    results = []
    for function, dtype in ((project_each, torch.float32), (_separate, torch.float32), (_separate, torch.float64)):
        weights, biases = _layers(3, 6, inputs=4, dtype=dtype)
        x = _numbers(5, 4).to(dtype).requires_grad_()
        one, two = function(x, weights, biases)
        (first,) = torch.autograd.grad(one.sin().sum() * two.tanh().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.pow(2).sum(), [x, *weights, *biases]))  # type: ignore[list-item]
    for place, (found, own, exact) in enumerate(zip(*results, strict=True)):
        within_budget(str(place), found, own, exact, terms=30)


def test_batched_gradients_as_vectorised_jacobians_take_them() -> None:
    x, (weights, biases) = _numbers(5, 4).requires_grad_(), _layers(3, 6, inputs=4)
    leaves = [x, *weights, *(bias for bias in biases if bias is not None)]
    grads = _numbers(7, 5, 3, seed=1), _numbers(7, 5, 6, seed=2)
    found, own = (
        torch.autograd.grad(function(x, weights, biases), leaves, grads, is_grads_batched=True)
        for function in (project_each, _separate)
    )
    torch.testing.assert_close(found, own)


def test_a_watcher_sees_operators_that_it_knows(chosen: list[str]) -> None:
    x, layers = _numbers(6, 40).requires_grad_(), _layers(24, 16)
    with FlopCounterMode(display=False) as counter:
        outputs = project_each(x, *layers)
    assert counter.get_total_flops() == 2 * 6 * 40 * (24 + 16)
    assert chosen == []
    outputs = project_each(x, *layers)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward([output.sum() for output in outputs])
    assert counter.get_total_flops() == 2 * (2 * 6 * 40 * (24 + 16))
    assert chosen == [FORWARD] * 2


def test_compiled_it_is_separate_layers(chosen: list[str]) -> None:
    x, (weights, biases) = _numbers(6, 40).requires_grad_(), _layers(24, 16)
    compiled = torch.compile(project_each, fullgraph=True, backend="aot_eager")
    found, own = (_gradients(function, x, weights, biases) for function in (compiled, _separate))
    torch.testing.assert_close(found, own)
    layers = [Linear(40, 8), Linear(40, 16)]
    compiled = torch.compile(lambda x: linear_each(layers, x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), tuple(nn.Linear.forward(layer, x) for layer in layers))
    assert chosen == []


def test_transforms_of_functions_are_not_silently_wrong() -> None:
    x, (weights, biases) = _numbers(3, 5, 4), _layers(3, 6, inputs=4)
    found, own = (
        torch.func.vmap(function, (0, None, None))(x, weights, biases) for function in (project_each, _separate)
    )
    torch.testing.assert_close(found, own)
    found, own = (torch.func.jacrev(function)(x[0], weights, biases) for function in (project_each, _separate))
    torch.testing.assert_close(found, own)


def test_same_inputs_same_bits() -> None:
    x, layers = _numbers(600, 40).requires_grad_(), _layers(24, 16, 33, 8, 7)
    first, second = (_gradients(project_each, x, *layers) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))  # type: ignore[arg-type]


def test_a_layer_too_small_to_choose_leaves_all_separate(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x, layers = _numbers(30, 40).requires_grad_(), _layers(24, 1, 33)
    monkeypatch.setattr(sizes, "SMALL", 30 * 40 * 2)
    _gradients(project_each, x, *layers)
    assert sorted(chosen) == sorted([FORWARD, INPUT, WEIGHT] * 2)
    _assert_same(x, *layers)


def test_dtypes_that_do_not_fit_are_told_as_linear_tells_it(chosen: list[str]) -> None:
    x, (weights, biases) = _numbers(30, 40).requires_grad_(), _layers(24, 16)
    weights[1] = weights[1].detach().bfloat16().requires_grad_()
    with pytest.raises(RuntimeError) as own:
        F.linear(x, weights[1], biases[1])
    with pytest.raises(RuntimeError) as found:
        project_each(x, weights, biases)
    assert str(found.value) == str(own.value)
    with torch.autocast("cpu"):
        assert [output.dtype for output in project_each(x, weights, biases)] == [torch.bfloat16] * 2
    # The first layer fits, and ran alone before the second was refused.
    assert chosen == [FORWARD]


def test_there_are_as_many_biases_as_weights() -> None:
    weights, biases = _layers(24, 16)
    assert project_each(_numbers(3, 40), [], []) == ()
    with pytest.raises(ValueError, match="zip"):
        project_each(_numbers(3, 40), weights, biases[:1])


def test_a_weight_changed_between_forward_and_backward_is_noticed() -> None:
    x, (weights, biases) = _numbers(6, 40).requires_grad_(), _layers(24, 16)
    outputs = project_each(x, weights, biases)
    with torch.no_grad():
        weights[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward([output.sum() for output in outputs])


@pytest.mark.parametrize("leading", [(10,), (2, 5)], ids=str)
def test_an_output_may_be_changed_in_place_as_linears_may(leading: tuple[int, ...]) -> None:
    x, (weights, biases) = _numbers(*leading, 40).requires_grad_(), _layers(24, 16)
    found, own = (
        torch.autograd.grad(sum(output.relu_().sum() for output in function(x, weights, biases)), [x, *weights])
        for function in (project_each, _separate)
    )
    torch.testing.assert_close(found, own)


# linear_each: whether the layers' own calls matter to anybody.


def _three() -> list[Linear]:
    torch.manual_seed(0)
    return [Linear(40, 24), Linear(40, 16, bias=False), Linear(40, 33)]


def _backward(layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Outputs of linear_each after its backward, and x's gradient."""
    x = _numbers(6, 40).requires_grad_()
    outputs = linear_each(layers, x)
    sum(output.square().sum() for output in outputs).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    return (*(output.detach() for output in outputs), x.grad)


def test_plain_layers_go_together(chosen: list[str]) -> None:
    layers = _three()
    theirs = copy.deepcopy(layers)
    found = _backward(layers)
    assert chosen == [FORWARD] * 3 + [WEIGHT] * 3 + [INPUT]
    x = _numbers(6, 40).requires_grad_()
    outputs = [layer(x) for layer in theirs]
    sum(output.square().sum() for output in outputs).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(found, (*outputs, x.grad))
    for layer, other in zip(layers, theirs, strict=True):
        for own, their in zip(layer.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(own.grad, their.grad)


HOOKS = {
    "forward": lambda layer, seen: layer.register_forward_hook(lambda *given: seen.append("seen")),
    "forward, always": lambda layer, seen: layer.register_forward_hook(
        lambda *given: seen.append("seen"), always_call=True
    ),
    "forward with keywords": lambda layer, seen: layer.register_forward_hook(
        lambda *given: seen.append("seen"), with_kwargs=True
    ),
    "before forward": lambda layer, seen: layer.register_forward_pre_hook(lambda *given: seen.append("seen")),
    "backward": lambda layer, seen: layer.register_full_backward_hook(lambda *given: seen.append("seen")),
    "before backward": lambda layer, seen: layer.register_full_backward_pre_hook(lambda *given: seen.append("seen")),
}


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_fire_and_once_gone_matter_no_more(chosen: list[str], kind: str, place: int) -> None:
    layers, seen = _three(), []
    plain = _backward(layers)
    handle = HOOKS[kind](layers[place], seen)
    chosen.clear()
    hooked = _backward(layers)
    assert seen == ["seen"]
    assert chosen.count(INPUT) == 3
    torch.testing.assert_close(hooked, plain)
    handle.remove()
    chosen.clear()
    _backward(layers)
    assert seen == ["seen"]
    assert chosen.count(INPUT) == 1


def test_a_hook_may_change_what_passes() -> None:
    layers = _three()
    layers[1].register_forward_hook(lambda module, given, output: output * 0)
    assert [bool(output.any()) for output in _backward(layers)] == [True, False, True, True]


@pytest.mark.parametrize(
    "register",
    [register_module_forward_hook, register_module_forward_pre_hook, register_module_full_backward_hook],
)
def test_hooks_on_all_modules_fire_for_every_layer(register: Callable[..., object]) -> None:
    layers, seen = _three(), []
    handle = register(lambda module, *given: seen.append(module))
    try:
        _backward(layers)
    finally:
        handle.remove()  # type: ignore[attr-defined]
    assert sorted(map(id, seen)) == sorted(map(id, layers))


class _Doubled(Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class _Called(Linear):
    def __call__(self, input: Tensor) -> Tensor:
        return 2 * super().__call__(input)


@pytest.mark.parametrize("kind", ["subclass", "subclass that is called", "instance", "parametrized", "torch's"])
def test_a_forward_of_its_own_is_respected(kind: str) -> None:
    layers: list[nn.Module] = [*_three()]
    own = layers[1]
    factor = 2.0
    if kind == "instance":
        plain = own.forward
        own.forward = lambda input: 2 * plain(input)  # type: ignore[method-assign]
    elif kind == "parametrized":
        nn.utils.parametrize.register_parametrization(own, "weight", _Twice())
    else:
        layers[1] = {"subclass": _Doubled, "subclass that is called": _Called, "torch's": nn.Linear}[kind](
            40, 16, bias=False
        )
        layers[1].load_state_dict(own.state_dict())
        factor = 1.0 if kind == "torch's" else 2.0
    found, expected = _backward(layers), _backward(_three())
    torch.testing.assert_close(found[:3], (expected[0], factor * expected[1], expected[2]))


class _Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight
