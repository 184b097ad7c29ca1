"""Layers with one input: project_each() and linear_each() match separate torch layers."""

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
from tests.gemms import name_gemm

PATHS = [
    pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=f"{why}"))
    for name, path in paths.PATHS.items()
    for why in [path.absent(torch.float32)]
]
FORWARD, INPUT, WEIGHT = KINDS


@pytest.fixture(autouse=True, params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one path for GEMMs of any size."""
    monkeypatch.setattr(sizes, "SMALL", 1)
    monkeypatch.setattr(sizes, "SMALL_UNPREPARED", 1)
    name_gemm(monkeypatch, request.param)
    return str(request.param)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The GEMMs for which a path was chosen, in order; empty if ``F.linear`` ran."""
    kinds: list[str] = []
    original = linear.path_of
    monkeypatch.setattr(linear, "path_of", lambda kind, *sizes: kinds.append(kind) or original(kind, *sizes))
    return kinds


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _layers(
    *widths: int, inputs: int = 40, bias: str = "all", dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases as leaves; ``bias``: all of them, none, or every second one."""
    weights = [_draw(width, inputs, seed=10 + place).to(dtype) for place, width in enumerate(widths)]
    biases: list[Tensor | None] = [_draw(width, seed=50 + place).to(dtype) for place, width in enumerate(widths)]
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
    """Outputs, then gradients of x, weights and biases; None if there is no gradient."""
    x, *leaves = (
        None if each is None else each.detach().to(dtype or each.dtype).requires_grad_(each.requires_grad)
        for each in (x, *weights, *biases)
    )
    outputs = function(x, leaves[: len(weights)], leaves[len(weights) :])
    places = range(len(outputs)) if used is None else used
    torch.autograd.backward(
        [outputs[place] for place in places],
        [_draw(*outputs[place].shape, seed=90 + place).to(outputs[place].dtype) for place in places],
    )
    return [*(output.detach() for output in outputs), *(each if each is None else each.grad for each in (x, *leaves))]


def _assert_same(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], used: Sequence[int] | None = None
) -> None:
    """Assert that outputs and gradients, including missing ones, match separate layers."""
    actual = _gradients(project_each, x, weights, biases, used)
    expected = _gradients(_separate, x, weights, biases, used)
    exact = _gradients(_separate, x, weights, biases, used, torch.float64)
    terms = max(x.numel() // max(x.shape[-1], 1), sum(len(weight) for weight in weights))
    for place, (result, textbook, reference) in enumerate(zip(actual, expected, exact, strict=True)):
        assert (result is None) == (textbook is None), place
        if result is not None and textbook is not None and reference is not None:
            assert result.dtype == x.dtype
            within_budget(str(place), result, textbook, reference, terms=terms)


@pytest.mark.parametrize("bias", ["all", "none", "some"])
@pytest.mark.parametrize("widths", [(24, 24, 24), (64, 17, 1), (33, 8), (5,), (8, 16, 24, 7, 40, 3)], ids=str)
@pytest.mark.parametrize("leading", [(70,), (3, 7), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_gradients_match_separate_layers(
    path: str, leading: tuple[int, ...], widths: tuple[int, ...], bias: str, dtype: torch.dtype
) -> None:
    if (why := paths.PATHS[path].absent(dtype)) is not None:
        pytest.skip(why)
    _assert_same(_draw(*leading, 40).to(dtype).requires_grad_(), *_layers(*widths, bias=bias, dtype=dtype))


def test_the_gradient_of_x_is_one_gemm(chosen: list[str]) -> None:
    weights, biases = _layers(8, 16, 24, 7, 40)
    _gradients(project_each, _draw(6, 40).requires_grad_(), weights, biases)
    assert chosen == [FORWARD] * 5 + [WEIGHT] * 5 + [INPUT]


def test_the_kernels_round_the_sum_of_several_layers_once(path: str) -> None:
    """For as many layers as one GEMM takes; integers, whose float32 sums are exact."""
    if path != "native":
        pytest.skip("the other paths sum rounded terms")
    x = torch.zeros(9, 40, dtype=torch.bfloat16, requires_grad=True)
    weights = [_draw(24, 40, seed=seed).mul(4).round() for seed in range(4)]
    grads = [_draw(9, 24, seed=9 + seed).mul(4).round() for seed in range(4)]
    outputs = project_each(x, [weight.bfloat16() for weight in weights], [None] * 4)
    torch.autograd.backward(outputs, [grad.bfloat16() for grad in grads])
    exact = sum(grad @ weight for grad, weight in zip(grads, weights, strict=True))
    assert torch.equal(x.grad, exact.bfloat16())  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("used", [(0,), (1, 2), (0, 2), (2, 1)], ids=str)
def test_an_unused_output_has_no_gradients(chosen: list[str], used: tuple[int, ...]) -> None:
    x, layers = _draw(30, 40).requires_grad_(), _layers(24, 16, 33)
    results = _gradients(project_each, x, *layers, used)
    assert chosen == [FORWARD] * 3 + [WEIGHT] * len(used) + [INPUT]
    assert [grad is not None for grad in results[4:]] == 2 * [place in used for place in range(3)]
    _assert_same(x, *layers, used)


class _Nothing(torch.autograd.Function):
    """Its backward returns no gradients."""

    @staticmethod
    def forward(ctx: object, *given: Tensor) -> Tensor:
        return torch.zeros(())

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[None, ...]:
        return None, None


def test_no_upstream_gradient_gives_no_gradients(chosen: list[str]) -> None:
    x, (weights, biases) = _draw(30, 40).requires_grad_(), _layers(24, 16)
    _Nothing.apply(*project_each(x, weights, biases)).backward()
    assert all(each is not None and each.grad is None for each in (x, *weights, *biases))
    assert chosen == [FORWARD] * 2


def test_a_frozen_input_gets_no_gradient(chosen: list[str]) -> None:
    x, layers = _draw(30, 40), _layers(24, 16)
    assert _gradients(project_each, x, *layers)[2] is None
    assert INPUT not in chosen
    _assert_same(x, *layers)


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_weights_have_no_gradients(chosen: list[str], frozen: int) -> None:
    x, (weights, biases) = _draw(30, 40).requires_grad_(), _layers(24, 16, 8)
    weights[frozen].requires_grad_(False)
    assert biases[2] is not None
    biases[2].requires_grad_(False)
    results = _gradients(project_each, x, weights, biases)
    assert [each is not None for each in results[3:]] == [True, frozen != 0, frozen != 1, True, True, True, False]
    assert chosen == [FORWARD] * 3 + [WEIGHT] * 2 + [INPUT]
    _assert_same(x, weights, biases)
    _assert_same(x, weights, [None] * 3)
    _assert_same(x, [weight.requires_grad_(False) for weight in weights], biases)


def test_a_gradient_of_a_bias_is_the_sum_of_the_rows() -> None:
    """Exact for integers, also if the weight of the layer is frozen."""
    for frozen in (False, True):
        x, (weights, biases) = _draw(2, 300, 40).requires_grad_(), _layers(24, 17)
        weights[1].requires_grad_(not frozen)
        grads = [_draw(2, 300, width, seed=width).mul(4).round() for width in (24, 17)]
        torch.autograd.backward(project_each(x, weights, biases), grads)
        for bias, grad in zip(biases, grads, strict=True):
            assert torch.equal(bias.grad, grad.sum((0, 1)))  # type: ignore[union-attr, arg-type]


def test_expanded_or_transposed_upstream_gradients() -> None:
    """The strides that ``sum()`` and a split into heads produce."""
    x, (weights, biases) = _draw(2, 6, 40).requires_grad_(), _layers(24, 16, 8)
    leaves = [x, *weights, *(bias for bias in biases if bias is not None)]
    actual, expected = (
        torch.autograd.grad(
            one.sum() + (two.view(2, 6, 4, 4).transpose(1, 2) ** 2).sum() + three[..., ::2].sum(), leaves
        )
        for one, two, three in (function(x, weights, biases) for function in (project_each, _separate))
    )
    torch.testing.assert_close(actual, expected)


def test_second_derivatives() -> None:
    results = []
    for function, dtype in ((project_each, torch.float32), (_separate, torch.float32), (_separate, torch.float64)):
        weights, biases = _layers(3, 6, inputs=4, dtype=dtype)
        x = _draw(5, 4).to(dtype).requires_grad_()
        one, two = function(x, weights, biases)
        (first,) = torch.autograd.grad(one.sin().sum() * two.tanh().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.pow(2).sum(), [x, *weights, *biases]))  # type: ignore[list-item]
    for place, (actual, expected, exact) in enumerate(zip(*results, strict=True)):
        within_budget(str(place), actual, expected, exact, terms=30)


def test_batched_gradients_match_separate_layers() -> None:
    x, (weights, biases) = _draw(5, 4).requires_grad_(), _layers(3, 6, inputs=4)
    leaves = [x, *weights, *(bias for bias in biases if bias is not None)]
    grads = _draw(7, 5, 3, seed=1), _draw(7, 5, 6, seed=2)
    actual, expected = (
        torch.autograd.grad(function(x, weights, biases), leaves, grads, is_grads_batched=True)
        for function in (project_each, _separate)
    )
    torch.testing.assert_close(actual, expected)


def test_flop_counter_counts_the_operators(chosen: list[str]) -> None:
    x, layers = _draw(6, 40).requires_grad_(), _layers(24, 16)
    with FlopCounterMode(display=False) as counter:
        outputs = project_each(x, *layers)
    assert counter.get_total_flops() == 2 * 6 * 40 * (24 + 16)
    assert chosen == []
    outputs = project_each(x, *layers)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward([output.sum() for output in outputs])
    assert counter.get_total_flops() == 2 * (2 * 6 * 40 * (24 + 16))
    assert chosen == [FORWARD] * 2


def test_compiled_code_uses_separate_layers(chosen: list[str]) -> None:
    x, (weights, biases) = _draw(6, 40).requires_grad_(), _layers(24, 16)
    compiled = torch.compile(project_each, fullgraph=True, backend="aot_eager")
    actual, expected = (_gradients(function, x, weights, biases) for function in (compiled, _separate))
    torch.testing.assert_close(actual, expected)
    layers = [Linear(40, 8), Linear(40, 16)]
    compiled = torch.compile(lambda x: linear_each(layers, x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), tuple(nn.Linear.forward(layer, x) for layer in layers))
    assert chosen == []


def test_function_transforms_match_separate_layers() -> None:
    x, (weights, biases) = _draw(3, 5, 4), _layers(3, 6, inputs=4)
    actual, expected = (
        torch.func.vmap(function, (0, None, None))(x, weights, biases) for function in (project_each, _separate)
    )
    torch.testing.assert_close(actual, expected)
    actual, expected = (torch.func.jacrev(function)(x[0], weights, biases) for function in (project_each, _separate))
    torch.testing.assert_close(actual, expected)


def test_equal_inputs_give_equal_bits() -> None:
    x, layers = _draw(600, 40).requires_grad_(), _layers(24, 16, 33, 8, 7)
    first, second = (_gradients(project_each, x, *layers) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))  # type: ignore[arg-type]


def test_one_small_layer_keeps_all_layers_separate(chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x, layers = _draw(30, 40).requires_grad_(), _layers(24, 1, 33)
    monkeypatch.setattr(sizes, "SMALL", 30 * 40 * 2)
    _gradients(project_each, x, *layers)
    assert sorted(chosen) == sorted([FORWARD, INPUT, WEIGHT] * 2)
    _assert_same(x, *layers)


def test_mismatched_dtypes_raise_the_error_of_linear(chosen: list[str]) -> None:
    x, (weights, biases) = _draw(30, 40).requires_grad_(), _layers(24, 16)
    weights[1] = weights[1].detach().bfloat16().requires_grad_()
    with pytest.raises(RuntimeError) as expected:
        F.linear(x, weights[1], biases[1])
    with pytest.raises(RuntimeError) as raised:
        project_each(x, weights, biases)
    assert str(raised.value) == str(expected.value)
    with torch.autocast("cpu"):
        assert [output.dtype for output in project_each(x, weights, biases)] == [torch.bfloat16] * 2
    # The first layer ran alone before the second raised.
    assert chosen == [FORWARD]


def test_numbers_of_weights_and_biases_must_match() -> None:
    weights, biases = _layers(24, 16)
    assert project_each(_draw(3, 40), [], []) == ()
    with pytest.raises(ValueError, match="zip"):
        project_each(_draw(3, 40), weights, biases[:1])


def test_modifying_a_weight_before_backward_raises() -> None:
    x, (weights, biases) = _draw(6, 40).requires_grad_(), _layers(24, 16)
    outputs = project_each(x, weights, biases)
    with torch.no_grad():
        weights[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward([output.sum() for output in outputs])


@pytest.mark.parametrize("leading", [(10,), (2, 5)], ids=str)
def test_outputs_may_be_modified_in_place(leading: tuple[int, ...]) -> None:
    x, (weights, biases) = _draw(*leading, 40).requires_grad_(), _layers(24, 16)
    actual, expected = (
        torch.autograd.grad(sum(output.relu_().sum() for output in function(x, weights, biases)), [x, *weights])
        for function in (project_each, _separate)
    )
    torch.testing.assert_close(actual, expected)


# linear_each: hooks and overridden calls of the layers.


def _three() -> list[Linear]:
    torch.manual_seed(0)
    return [Linear(40, 24), Linear(40, 16, bias=False), Linear(40, 33)]


def _backward(layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Outputs of linear_each after its backward, and x's gradient."""
    x = _draw(6, 40).requires_grad_()
    outputs = linear_each(layers, x)
    sum(output.square().sum() for output in outputs).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    return (*(output.detach() for output in outputs), x.grad)


def test_plain_layers_run_together(chosen: list[str]) -> None:
    layers = _three()
    theirs = copy.deepcopy(layers)
    actual = _backward(layers)
    assert chosen == [FORWARD] * 3 + [WEIGHT] * 3 + [INPUT]
    x = _draw(6, 40).requires_grad_()
    outputs = [layer(x) for layer in theirs]
    sum(output.square().sum() for output in outputs).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(actual, (*outputs, x.grad))
    for layer, other in zip(layers, theirs, strict=True):
        for parameter, their in zip(layer.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, their.grad)


HOOKS = {
    "forward": lambda layer, fired: layer.register_forward_hook(lambda *given: fired.append("fired")),
    "forward, always": lambda layer, fired: layer.register_forward_hook(
        lambda *given: fired.append("fired"), always_call=True
    ),
    "forward with keywords": lambda layer, fired: layer.register_forward_hook(
        lambda *given: fired.append("fired"), with_kwargs=True
    ),
    "before forward": lambda layer, fired: layer.register_forward_pre_hook(lambda *given: fired.append("fired")),
    "backward": lambda layer, fired: layer.register_full_backward_hook(lambda *given: fired.append("fired")),
    "before backward": lambda layer, fired: layer.register_full_backward_pre_hook(lambda *given: fired.append("fired")),
}


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_fire_until_they_are_removed(chosen: list[str], kind: str, place: int) -> None:
    layers, fired = _three(), []
    plain = _backward(layers)
    handle = HOOKS[kind](layers[place], fired)
    chosen.clear()
    hooked = _backward(layers)
    assert fired == ["fired"]
    assert chosen.count(INPUT) == 3
    torch.testing.assert_close(hooked, plain)
    handle.remove()
    chosen.clear()
    _backward(layers)
    assert fired == ["fired"]
    assert chosen.count(INPUT) == 1


def test_a_hook_may_replace_the_output() -> None:
    layers = _three()
    layers[1].register_forward_hook(lambda module, given, output: output * 0)
    assert [bool(output.any()) for output in _backward(layers)] == [True, False, True, True]


@pytest.mark.parametrize(
    "register",
    [register_module_forward_hook, register_module_forward_pre_hook, register_module_full_backward_hook],
)
def test_hooks_on_all_modules_fire_for_every_layer(register: Callable[..., object]) -> None:
    layers, fired = _three(), []
    handle = register(lambda module, *given: fired.append(module))
    try:
        _backward(layers)
    finally:
        handle.remove()  # type: ignore[attr-defined]
    assert sorted(map(id, fired)) == sorted(map(id, layers))


class _Doubled(Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class _Called(Linear):
    def __call__(self, input: Tensor) -> Tensor:
        return 2 * super().__call__(input)


@pytest.mark.parametrize("kind", ["subclass", "subclass that is called", "instance", "parametrized", "torch's"])
def test_an_overridden_forward_is_called(kind: str) -> None:
    layers: list[nn.Module] = [*_three()]
    layer = layers[1]
    factor = 2.0
    if kind == "instance":
        plain = layer.forward
        layer.forward = lambda input: 2 * plain(input)  # type: ignore[method-assign]
    elif kind == "parametrized":
        nn.utils.parametrize.register_parametrization(layer, "weight", _Twice())
    else:
        layers[1] = {"subclass": _Doubled, "subclass that is called": _Called, "torch's": nn.Linear}[kind](
            40, 16, bias=False
        )
        layers[1].load_state_dict(layer.state_dict())
        factor = 1.0 if kind == "torch's" else 2.0
    actual, expected = _backward(layers), _backward(_three())
    torch.testing.assert_close(actual[:3], (expected[0], factor * expected[1], expected[2]))


class _Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight
