"""ScoreFunction and MaskFunction: gradients of closed-over tensors, and errors of wrong functions."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch

BACKENDS = ["tiled", "reference"]
GLOBAL_SLOPE = torch.tensor(0.3, requires_grad=True)


def _inputs(length: int = 300, heads: int = 2, **options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, heads, length, 8, generator=generator, **options) for _ in range(3)]


def _grads(rule: ch.ScoreRule, wanted: list[Tensor], backend: str, **options: Any) -> list[Tensor]:
    output = ch.attention(*_inputs(), scores=rule, backend=backend, **options)
    return list(torch.autograd.grad(output.square().sum(), wanted))


def _helper(score: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - GLOBAL_SLOPE * (i - j).abs()


class Holder:
    def __init__(self, slope: Tensor) -> None:
        self.tensors = {"slopes": [slope]}

    def rule(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - self.tensors["slopes"][0] * (i - j).abs()

    def __call__(self, *arguments: Tensor) -> Tensor:
        return self.rule(*arguments)


def _with(slope: Tensor) -> dict[str, Callable[..., Tensor]]:
    layer = torch.nn.Module()
    layer.register_parameter("slope", torch.nn.Parameter(slope.detach()))
    objects, made = {"inner": [slope]}, slope * 1.0

    def inner(i: Tensor, j: Tensor) -> Tensor:
        return slope * (i - j).abs()

    def bound(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *, slope: Tensor) -> Tensor:
        return score - slope * (i - j).abs()

    return {
        "closure": lambda s, b, h, i, j: s - slope * (i - j).abs(),
        "not a leaf": lambda s, b, h, i, j: s - made * (i - j).abs(),
        "collection": lambda s, b, h, i, j: s - objects["inner"][0] * (i - j).abs(),
        "function within": lambda s, b, h, i, j: s - inner(i, j),
        "default": lambda s, b, h, i, j, slope=slope: s - slope * (i - j).abs(),
        "partial": partial(bound, slope=slope),
        "method": Holder(slope).rule,
        "callable object": Holder(slope),
    }


@pytest.mark.parametrize("way", _with(torch.tensor(0.1)))
def test_learned_tensors_are_found_in_all_containers(way: str) -> None:
    slope = torch.tensor(0.3, requires_grad=True)
    rule = ch.ScoreFunction(_with(slope)[way])
    (grad,) = _grads(rule, [slope], "tiled")
    other = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    output = ch.attention(*(x.double() for x in _inputs()), scores=ch.Alibi(slopes=other), backend="reference")
    (right,) = torch.autograd.grad(output.square().sum(), other)
    torch.testing.assert_close(grad.double(), right[0], rtol=1e-5, atol=1e-6)


def test_a_global_that_a_helper_names_is_found() -> None:
    rule = ch.ScoreFunction(lambda s, b, h, i, j: _helper(s, i, j))
    (grad,), (right,) = (_grads(rule, [GLOBAL_SLOPE], backend) for backend in BACKENDS)
    torch.testing.assert_close(grad, right, rtol=1e-5, atol=1e-6)


def test_unreachable_learned_tensor_is_refused() -> None:
    hidden = [torch.tensor(0.3, requires_grad=True)] * 2000
    inputs = [tensor.requires_grad_() for tensor in _inputs()]
    rule = ch.ScoreFunction(lambda s, b, h, i, j: s - hidden[0] * (i - j).abs())
    with pytest.raises(ch.UnsupportedError, match="fn must name the learned tensors it reads; got one of shape"):
        ch.attention(*inputs, scores=rule, backend="tiled")


def _raises(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    if int(i.max()) >= 128:
        raise LookupError("two\nlines")
    return s


def _writes(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s.sub_(1.0)


def _writes_a_part(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    s[..., 0] = 0.0
    return s + 1.0


def _writes_positions(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    i += 1
    return s - (i - j)


BAD: dict[str, tuple[Callable[..., Any], type[ch.ClearheadError], str]] = {
    "shape": (lambda s, b, h, i, j: s.sum(-1), ch.ShapeError, "return float32 of the tile's shape"),
    "less than the tile": (lambda s, b, h, i, j: (i - j).float(), ch.ShapeError, "return float32 of the tile's shape"),
    "dtype": (lambda s, b, h, i, j: s.double(), ch.ShapeError, "got float64 of shape"),
    "half": (lambda s, b, h, i, j: s.half(), ch.ShapeError, "got float16 of shape"),
    "no tensor": (lambda s, b, h, i, j: None, ch.ShapeError, "return a tensor; got NoneType"),
    "raises": (_raises, ch.ShapeError, "got LookupError: two lines from _raises on the tile batch 0, heads 0 to 1, q"),
    "writes": (_writes, ch.UnsupportedError, "leave its arguments as they are; got one that _writes wrote into"),
    "writes a part": (_writes_a_part, ch.UnsupportedError, "leave its arguments as they are"),
    "writes positions": (_writes_positions, ch.UnsupportedError, "leave its arguments as they are"),
}
_LINE = r"^(Score|Mask)Function: fn must .+; got .+ on the tile batch \d.*, heads \d.*, queries \d.*, keys \d.*\. .+\.$"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("name", BAD)
def test_a_wrong_score_function_is_named(name: str, backend: str, inference: bool) -> None:
    fn, error, words = BAD[name]
    with torch.inference_mode(inference), pytest.raises(error) as caught:
        ch.attention(*_inputs(), scores=ch.ScoreFunction(fn), backend=backend)
    text = str(caught.value)
    assert words in text
    assert re.fullmatch(_LINE, text), text
    assert getattr(fn, "__qualname__") in text  # noqa: B009
    if name == "raises":
        assert isinstance(caught.value.__cause__, LookupError)


def test_error_names_the_failing_tile() -> None:
    with pytest.raises(ch.ShapeError, match="queries 128 to 255, keys 0 to 299"):
        ch.attention(*_inputs(), scores=ch.ScoreFunction(_raises), backend="tiled")


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, score: Tensor) -> Tensor:
        return score * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("no slope here")


def _raises_with_gradients(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    if s.requires_grad:
        raise LookupError("only now")
    return s


def _spoils_its_graph(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    result = torch.exp(s)
    scaled = result * 1.0
    result.add_(1.0)
    return scaled


@pytest.mark.parametrize(
    ("fn", "error", "cause", "words"),
    [
        (_raises_with_gradients, ch.ShapeError, LookupError, "LookupError: only now from _raises_with_gradients"),
        (lambda s, b, h, i, j: _NoBackward.apply(s), ch.UnsupportedError, ArithmeticError, "fn must have a derivative"),
        (_spoils_its_graph, ch.UnsupportedError, RuntimeError, "fn must have a derivative; got RuntimeError: one of"),
    ],
    ids=["forward rerun", "backward", "graph"],
)
def test_error_in_backward_names_the_function(
    fn: Callable[..., Tensor], error: type[ch.ClearheadError], cause: type[Exception], words: str
) -> None:
    inputs = [tensor.requires_grad_() for tensor in _inputs()]
    output = ch.attention(*inputs, scores=ch.ScoreFunction(fn), backend="tiled")
    with pytest.raises(error) as caught:
        output.sum().backward()
    assert words in str(caught.value)
    assert re.fullmatch(_LINE, str(caught.value)), str(caught.value)
    assert isinstance(caught.value.__cause__, cause)


def _mask_writes(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    j += 1
    return i >= j


def _mask_raises(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    raise LookupError("no such mask")


BAD_MASKS: dict[str, tuple[Callable[..., Any], type[ch.ClearheadError], str]] = {
    "shape": (lambda b, h, i, j: torch.ones(7, 5, dtype=torch.bool), ch.MaskError, "return bool that broadcasts to"),
    "dtype": (lambda b, h, i, j: i - j, ch.MaskError, "return bool that broadcasts to"),
    "no tensor": (lambda b, h, i, j: True, ch.MaskError, "return a tensor; got bool"),
    "raises": (_mask_raises, ch.MaskError, "got LookupError: no such mask from _mask_raises"),
    "writes": (_mask_writes, ch.UnsupportedError, "leave its arguments as they are; got one that _mask_writes"),
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("name", BAD_MASKS)
def test_a_wrong_mask_function_is_named(name: str, inference: bool) -> None:
    fn, error, words = BAD_MASKS[name]
    with torch.inference_mode(inference), pytest.raises(error) as caught:
        ch.attention(*_inputs(), mask=ch.MaskFunction(fn), backend="tiled")
    assert words in str(caught.value)
    assert re.fullmatch(_LINE, str(caught.value)), str(caught.value)
    if name == "raises":
        assert isinstance(caught.value.__cause__, LookupError)


def test_stored_scores_are_not_modified() -> None:
    stored = []

    def keeping(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        stored.append((s, s.clone()))
        return s

    ch.attention(*_inputs(), scores=ch.ScoreFunction(keeping), backend="tiled")
    # One call on one place, which finds the learned tensors, then three tiles.
    assert len(stored) == 4
    assert all(torch.equal(one, copy) for one, copy in stored)


def test_returned_tensor_is_not_modified() -> None:
    bias = torch.randn(1, 2, 100, 100)
    copy = bias.clone()
    inputs = [tensor.requires_grad_() for tensor in _inputs(100)]
    rule = ch.ScoreFunction(lambda s, b, h, i, j: bias)
    ch.attention(*inputs, mask=ch.Causal(), scores=rule, backend="tiled").sum().backward()
    assert torch.equal(bias, copy)
    assert inputs[0].grad is not None
    assert not inputs[0].grad.any()


class Tied(torch.nn.Module):
    """A rule's table is computed from a parameter that the rule's module contains too."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.3, 0.1]))
        self.change = change

    def rule(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 1.5 * s - self.slope[h] * (i - j).abs()

    def forward(self, inputs: list[Tensor], backend: str) -> Tensor:
        self.slope = self.change(self.weight)
        return ch.attention(*inputs, scores=ch.ScoreFunction(self.rule), backend=backend)


TIED: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda w: w.flip(0),
    "view": lambda w: w[:],
    "sum": lambda w: w + 1.0,
    "itself": lambda w: w,
    "softplus": torch.nn.functional.softplus,
    "exponential": torch.exp,
}


@pytest.mark.parametrize("length", [20, 700])
@pytest.mark.parametrize("name", TIED)
def test_derived_tensor_counts_once(name: str, length: int) -> None:
    grads = []
    for backend in ("tiled", "reference"):
        module = Tied(TIED[name])
        module(_inputs(length), backend).square().sum().backward()
        assert module.weight.grad is not None
        grads.append(module.weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_rules_that_share_a_parameter_count_it_once() -> None:
    weight = torch.randn(2, 9, generator=torch.Generator().manual_seed(1), requires_grad=True)
    grads = []
    for backend in ("tiled", "reference"):
        rules = [ch.RelativeBias(weight), ch.RelativeBias(weight.flip(1))]
        output = ch.attention(*_inputs(50), scores=rules, backend=backend)
        grads += torch.autograd.grad(output.square().sum(), weight)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_tensor_computed_once_serves_every_tile() -> None:
    class Made(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(3, 2)
            self.gate = self.net(torch.ones(3))

        def forward(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s * torch.sigmoid(self.gate[h])

    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(1, 2, 600, 4, generator=generator) for _ in range(3)]
    rule = Made()
    grads = [
        torch.autograd.grad(
            ch.attention(*inputs, scores=ch.ScoreFunction(rule), backend=backend).square().sum(),
            list(rule.parameters()),
            retain_graph=True,
        )
        for backend in ("tiled", "reference")
    ]
    for one, right in zip(*grads, strict=True):
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("elsewhere", [lambda x: x.to("meta"), lambda x: x.to_sparse()])
def test_result_on_another_device_is_refused(elsewhere: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(1, 1, 5, 4)
    with pytest.raises(ch.ShapeError, match="ScoreFunction: fn must return a plain tensor on cpu"):
        ch.attention(x, x, x, scores=ch.ScoreFunction(lambda s, b, h, i, j: elsewhere(s)))
    with pytest.raises(ch.MaskError, match="MaskFunction: fn must return a plain tensor on cpu"):
        ch.attention(x, x, x, mask=ch.MaskFunction(lambda b, h, i, j: elsewhere(i >= j)))


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("mask", [None, lambda b, h, i, j: (i * j + LENGTHS) % 3 > 0])
def test_batch_sized_tensor_may_be_added(mask: Callable[..., Tensor] | None, backend: str) -> None:
    """Tiles of some batch entries alone would not fit it."""
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(3, 4, 150, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    wide = torch.randn(3, 1, 1, 1, generator=generator, dtype=torch.float64, requires_grad=True)

    def step(fn: Callable[..., Tensor], predicate: Callable[..., Tensor] | None, backend: str) -> list[Tensor]:
        mask = None if predicate is None else ch.MaskFunction(predicate)
        output = ch.attention(*inputs, scores=ch.ScoreFunction(fn), mask=mask, backend=backend)
        return [output, *torch.autograd.grad(output.square().sum(), wide)]

    results = step(lambda s, b, h, i, j: s * (1 + wide), mask, backend)
    other = None if mask is None else lambda b, h, i, j: (i * j + LENGTHS[b, 0, 0, 0]) % 3 > 0
    right = step(lambda s, b, h, i, j: s * (1 + wide[b, 0, 0, 0]), other, "reference")
    for one, expected in zip(results, right, strict=True):
        torch.testing.assert_close(one, expected)


LENGTHS = torch.tensor([0, 1, 2]).view(3, 1, 1, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_numbers_are_refused(backend: str) -> None:
    """Backward would work out other scores than forward."""
    dropped = torch.nn.Dropout(0.1)
    with pytest.raises(ch.UnsupportedError, match="ScoreFunction: fn must draw no random numbers") as caught:
        ch.attention(*_inputs(20), scores=ch.ScoreFunction(lambda s, b, h, i, j: dropped(s)), backend=backend)
    assert re.fullmatch(_LINE, str(caught.value)), str(caught.value)
    ch.attention(*_inputs(20), scores=ch.ScoreFunction(lambda s, b, h, i, j: dropped.eval()(s)), backend=backend)
    with pytest.raises(ch.UnsupportedError, match="MaskFunction: fn must draw no random numbers"):
        ch.attention(*_inputs(20), mask=ch.MaskFunction(lambda b, h, i, j: torch.rand(20) > 0.5), backend=backend)


def test_draws_of_other_threads_are_ignored() -> None:
    def fn(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        other = threading.Thread(target=torch.rand, args=(1,))
        other.start()
        other.join()
        return s * 0.5

    query, key, value = _inputs(20)
    output = ch.attention(query, key, value, scores=ch.ScoreFunction(fn), backend="tiled")
    torch.testing.assert_close(output, ch.attention(query, key, value, scale=0.5 * query.shape[-1] ** -0.5))


@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like, torch.bernoulli, lambda s: s.clone().uniform_()])
def test_every_way_to_draw_is_detected(draw: Callable[[Tensor], Tensor]) -> None:
    rule = ch.ScoreFunction(lambda s, b, h, i, j: s + draw(s.detach().sigmoid()))
    with pytest.raises(ch.UnsupportedError, match="fn must draw no random numbers"):
        ch.attention(*_inputs(20), scores=rule, backend="tiled")


class Annealed(torch.nn.Module):
    """Reads a buffer, and counts its calls in another."""

    strength: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("strength", torch.tensor(0.3))
        self.register_buffer("calls", torch.tensor(0))

    def rule(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        self.calls.add_(1)
        return s * self.strength - 0.01 * (i * j + 0 * self.calls).sqrt()


VERBS: dict[str, Callable[..., Tensor]] = {
    "tiled": partial(ch.attention, backend="tiled"),
    "top_k": partial(ch.sparse.top_k_attention, k=5),
}


@pytest.mark.parametrize("name", VERBS)
def test_writing_into_tensors_before_backward_raises(name: str) -> None:
    layer, inputs, ids = Annealed(), [tensor.requires_grad_() for tensor in _inputs()], torch.arange(300) % 7
    options = {"scores": ch.ScoreFunction(layer.rule), "mask": ch.MaskFunction(lambda b, h, i, j: ids[i] != ids[j] + 1)}
    # The function itself writes the count.
    VERBS[name](*inputs, **options).sum().backward()
    for written in (layer.strength, ids):
        output = VERBS[name](*inputs, **options)
        written.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_writing_into_top_k_rules_before_backward_raises() -> None:
    table = torch.randn(2, 9, requires_grad=True)
    output = ch.sparse.top_k_attention(*_inputs(), k=5, scores=ch.RelativeBias(table))
    with torch.no_grad():
        table.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
