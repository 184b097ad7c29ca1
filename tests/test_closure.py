"""A user's function keeps the values that its variables had when attention was called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.closure import bound_now

WIDTH = 3
STEPS = 0


def _by_global(i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() <= WIDTH


def _through_a_helper(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return _by_global(i, j)


def _counting(x: int) -> int:
    global STEPS
    STEPS += 1
    return x + STEPS


class Ruled:
    def __init__(self) -> None:
        self.width = 2

    def rule(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j).abs() <= self.width


BACKENDS = ["auto", "tiled", "reference"]


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(1, 2, 40, 8, generator=generator, requires_grad=True) for _ in range(3)]


def _trained(backend: str, late: bool) -> list[Tensor]:
    """Two layers of a loop whose variable has changed by backward; or functions with variables of their own."""
    slopes = torch.tensor([0.05, 0.3, 9.0], requires_grad=True)
    inputs = _inputs()
    query, key, value = inputs
    for n in range(2):
        number = n
        if late:
            rule = ch.ScoreFunction(lambda s, b, h, i, j: s - slopes[n] * (i * j).sqrt())  # noqa: B023
            mask = ch.MaskFunction(lambda b, h, i, j: (i * j) % (n + 5) > 0)  # noqa: B023
        else:
            rule = ch.ScoreFunction(lambda s, b, h, i, j, number=number: s - slopes[number] * (i * j).sqrt())
            mask = ch.MaskFunction(lambda b, h, i, j, number=number: (i * j) % (number + 5) > 0)
        query = query + ch.attention(query, key, value, mask=mask, scores=rule, backend=backend)
    n = 2
    return list(torch.autograd.grad(query.square().sum(), [*inputs, slopes]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_loop_over_layers_uses_each_layers_variables(backend: str) -> None:
    for actual, right in zip(_trained(backend, late=True), _trained(backend, late=False), strict=True):
        assert torch.equal(actual, right)


@pytest.mark.parametrize("backend", BACKENDS)
def test_globals_read_by_helpers_are_bound(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(change: bool) -> Tensor:
        inputs = _inputs()
        monkeypatch.setitem(globals(), "WIDTH", 3)
        output = ch.attention(*inputs, mask=ch.MaskFunction(_through_a_helper), backend=backend)
        if change:
            monkeypatch.setitem(globals(), "WIDTH", 20)
        return torch.autograd.grad(output.square().sum(), inputs[0])[0]

    assert torch.equal(step(True), step(False))


def test_bound_functions_return_the_same() -> None:
    inner = lambda x: x + shift  # noqa: E731
    shift = 4

    def outer(x: int, *, times: int = 2) -> int:
        return inner(x) * times

    def fact(n: int) -> int:
        return 1 if n < 2 else n * fact(n - 1)

    bound, recursive, whole = bound_now(outer), bound_now(fact), bound_now(partial(outer, times=3))
    shift = 100
    assert bound(1) == 10
    assert whole(1) == 15
    assert recursive(5) == 120
    assert bound.__qualname__ == outer.__qualname__
    assert outer(1) == 202


def test_written_variables_are_shared() -> None:
    count = 0

    def counted(x: int) -> int:
        nonlocal count
        count += 1
        return x

    bound_now(counted)(1)
    assert count == 1
    before = STEPS
    bound_now(_counting)(1)
    assert before + 1 == STEPS


def test_methods_and_objects_are_not_copied() -> None:
    attribute = Ruled()
    places = [torch.tensor([[0]])] * 3 + [torch.arange(5)[None]]
    assert int(bound_now(attribute.rule)(*places).sum()) == 3
    call: Callable[..., Any] = torch.nn.Identity()
    assert bound_now(call) is call


def test_an_empty_cell_may_be_filled_later() -> None:
    def early() -> int:
        return later

    bound = bound_now(early)
    later = 3
    assert bound() == 3


class Gate(torch.nn.Module):
    """A rule with a number a head, and one layer that is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(torch.tensor([0.5, -1.0]))
        self.last: Tensor | None = None

    def rule(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * torch.sigmoid(self.gate[h])

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Callable[..., Tensor]) -> Tensor:
        self.last = call(query, key, value, scores=ch.ScoreFunction(self.rule))
        return self.last


CALLS: dict[str, Callable[..., Tensor]] = {
    "tiled": partial(ch.attention, backend="tiled"),
    "top_k": partial(ch.sparse.top_k_attention, k=5),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_functional_call_tensors_are_used_in_backward(name: str, frozen: bool) -> None:
    layer, inputs = Gate().requires_grad_(not frozen), _inputs()
    replacement = torch.tensor([2.0, 0.1], requires_grad=True)
    output = torch.func.functional_call(layer, {"gate": replacement}, (*inputs, CALLS[name]))
    right = CALLS[name](*inputs, scores=ch.ScoreFunction(lambda s, b, h, i, j: s * torch.sigmoid(replacement[h])))
    torch.testing.assert_close(output, right)
    for one, other in zip(
        *(torch.autograd.grad(o.square().sum(), [*inputs, replacement]) for o in (output, right)), strict=True
    ):
        torch.testing.assert_close(one, other)
    assert layer.gate is not replacement


@pytest.mark.parametrize("name", CALLS)
def test_a_module_may_keep_its_last_output(name: str) -> None:
    layer, inputs = Gate(), _inputs()
    for _ in range(3):
        layer.zero_grad()
        layer(*inputs, CALLS[name]).square().sum().backward()
    assert layer.gate.grad is not None
    right = torch.autograd.grad(Gate()(*inputs, CALLS[name]).square().sum(), inputs[0])[0]
    assert inputs[0].grad is not None
    torch.testing.assert_close(inputs[0].grad / 3, right)


def test_object_with_a_tensor_per_layer_trains_all() -> None:
    class Scaled:
        by: Tensor

        def __call__(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s * torch.sigmoid(self.by[h])

    grads = []
    for backend in ("tiled", "reference"):
        rule, inputs, learned = Scaled(), _inputs(), torch.tensor([0.3, -0.7], requires_grad=True)
        query = inputs[0]
        for n in range(3):
            rule.by = learned * (n + 1)
            query = ch.attention(query, *inputs[1:], scores=ch.ScoreFunction(rule), backend=backend)
        grads.append(torch.autograd.grad(query.square().sum(), [*inputs, learned]))
    for one, right in zip(*grads, strict=True):
        torch.testing.assert_close(one, right)


def _as_partial(gate: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def rule(gate: Callable[[Tensor], Tensor], s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * gate(h)

    return partial(rule, gate)


def _as_default(gate: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda s, b, h, i, j, gate=gate: s * gate(h)


def _decorated(gate: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    decorated = torch.enable_grad()(gate)
    return torch.compiler.disable(lambda s, b, h, i, j: s * decorated(h))


@pytest.mark.parametrize("way", [_as_partial, _as_default, _decorated])
def test_helper_keeps_its_variables(
    way: Callable[[Callable[[Tensor], Tensor]], Callable[..., Tensor]],
) -> None:
    grads = []
    for backend in ("tiled", "reference"):
        inputs, gates = _inputs(), torch.tensor([[0.5, 1.0], [-1.0, 2.0]], requires_grad=True)
        query = inputs[0]
        for n in range(2):
            rule = way(lambda h: torch.sigmoid(gates[n][h]))  # noqa: B023
            query = ch.attention(query, *inputs[1:], scores=ch.ScoreFunction(rule), backend=backend)
        grads.append(torch.autograd.grad(query.square().sum(), [*inputs, gates]))
    for one, right in zip(*grads, strict=True):
        torch.testing.assert_close(one, right)


def test_compiled_helper_keeps_its_graph() -> None:
    helper = torch.compile(lambda d: (d == 7).float() * 3.0, backend="eager")
    inputs = _inputs()
    rule = ch.ScoreFunction(lambda s, b, h, i, j: s + helper(i - j))
    one, other = (ch.attention(*inputs, scores=rule, backend=backend) for backend in ("tiled", "reference"))
    torch.testing.assert_close(one, other)


def test_function_may_use_globals_builtin() -> None:
    inputs = _inputs()
    one = ch.attention(*inputs, mask=ch.MaskFunction(lambda b, h, i, j: (i * j) % globals()["WIDTH"] > 0))
    other = ch.attention(*inputs, mask=ch.MaskFunction(lambda b, h, i, j: (i * j) % eval("WIDTH") > 0))
    assert torch.equal(one, other)


@dataclass
class Settings:
    gate: Tensor


class Slotted:
    __slots__ = ("gate",)

    def __init__(self, gate: Tensor) -> None:
        self.gate = gate


class Derived:
    """Its value is computed by a property that calls a method."""

    def __init__(self, gate: Tensor) -> None:
        self._raw = gate

    def _made(self) -> Tensor:
        return self._raw * 1.0

    @property
    def gate(self) -> Tensor:
        return self._made()


def _as_class(gate: Tensor) -> type:
    return type("Constants", (), {"gate": gate})


@pytest.mark.parametrize("holder", [SimpleNamespace, Settings, Slotted, Derived, _as_class])
def test_attributes_of_plain_objects_are_found(holder: Callable[..., Any]) -> None:
    grads = []
    for backend in ("tiled", "reference"):
        inputs, gate = _inputs(), torch.tensor([0.5, -1.0], requires_grad=True)
        container = holder(gate=gate) if holder is SimpleNamespace else holder(gate)
        rule = ch.ScoreFunction(lambda s, b, h, i, j, container=container: s * container.gate[h])
        output = ch.attention(*inputs, scores=rule, backend=backend)
        grads.append(torch.autograd.grad(output.square().sum(), [*inputs, gate]))
    for one, right in zip(*grads, strict=True):
        torch.testing.assert_close(one, right)


def test_plain_object_with_a_tensor_per_layer_trains_all() -> None:
    grads = []
    for backend in ("tiled", "reference"):
        inputs, gates = _inputs(), torch.tensor([[0.5, -1.0], [2.0, 0.3]], requires_grad=True)
        container, query = SimpleNamespace(gate=None), inputs[0]
        for gate in gates.unbind():
            container.gate = gate
            rule = ch.ScoreFunction(lambda s, b, h, i, j, container=container: s * container.gate[h])
            query = ch.attention(query, *inputs[1:], scores=rule, backend=backend)
        grads.append(torch.autograd.grad(query.square().sum(), [*inputs, gates]))
    for one, right in zip(*grads, strict=True):
        torch.testing.assert_close(one, right)


def test_functions_defined_within_a_compiled_one_match_eager() -> None:
    inputs, gate = _inputs(), torch.tensor([0.5, -1.0], requires_grad=True)

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        doubled = gate * 2.0
        rule = ch.ScoreFunction(lambda s, b, h, i, j: s * doubled[h])
        mask = ch.MaskFunction(lambda b, h, i, j: (i * j) % 5 != 1)
        return ch.attention(query, key, value, scores=rule, mask=mask)

    outputs = [
        torch.autograd.grad(call(*inputs).square().sum(), [*inputs, gate])
        for call in (torch.compile(layer, backend="aot_eager"), layer)
    ]
    for one, right in zip(*outputs, strict=True):
        torch.testing.assert_close(one, right)
