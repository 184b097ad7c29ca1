"""A user's function keeps what its variables held when attention was called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    """Two layers of a loop whose variable has moved on when backward comes; or functions that hold their own."""
    slopes = torch.tensor([0.05, 0.3, 9.0], requires_grad=True)
    inputs = _inputs()
    query, key, value = inputs
    for n in range(2):
        own = n
        if late:
            rule = ch.ScoreFunction(lambda s, b, h, i, j: s - slopes[n] * (i * j).sqrt())  # noqa: B023
            mask = ch.MaskFunction(lambda b, h, i, j: (i * j) % (n + 5) > 0)  # noqa: B023
        else:
            rule = ch.ScoreFunction(lambda s, b, h, i, j, own=own: s - slopes[own] * (i * j).sqrt())
            mask = ch.MaskFunction(lambda b, h, i, j, own=own: (i * j) % (own + 5) > 0)
        query = query + ch.attention(query, key, value, mask=mask, scores=rule, backend=backend)
    n = 2
    return list(torch.autograd.grad(query.square().sum(), [*inputs, slopes]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loop_over_layers_trains_each_with_its_own_number(backend: str) -> None:
    for found, right in zip(_trained(backend, late=True), _trained(backend, late=False), strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_global_that_a_helper_reads_is_kept_too(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(change: bool) -> Tensor:
        inputs = _inputs()
        monkeypatch.setitem(globals(), "WIDTH", 3)
        output = ch.attention(*inputs, mask=ch.MaskFunction(_through_a_helper), backend=backend)
        if change:
            monkeypatch.setitem(globals(), "WIDTH", 20)
        return torch.autograd.grad(output.square().sum(), inputs[0])[0]

    assert torch.equal(step(True), step(False))


def test_what_is_bound_answers_as_before() -> None:
    inner = lambda x: x + shift  # noqa: E731
    shift = 4

    def outer(x: int, *, times: int = 2) -> int:
        return inner(x) * times

    def fact(n: int) -> int:
        return 1 if n < 2 else n * fact(n - 1)

    bound, again, whole = bound_now(outer), bound_now(fact), bound_now(partial(outer, times=3))
    shift = 100
    assert bound(1) == 10
    assert whole(1) == 15
    assert again(5) == 120
    assert bound.__qualname__ == outer.__qualname__
    assert outer(1) == 202


def test_what_a_function_writes_stays_shared() -> None:
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


def test_methods_and_objects_are_taken_as_they_are() -> None:
    held = Ruled()
    places = [torch.tensor([[0]])] * 3 + [torch.arange(5)[None]]
    assert int(bound_now(held.rule)(*places).sum()) == 3
    call: Callable[..., Any] = torch.nn.Identity()
    assert bound_now(call) is call


def test_an_empty_cell_may_be_filled_later() -> None:
    def early() -> int:
        return later

    bound = bound_now(early)
    later = 3
    assert bound() == 3
