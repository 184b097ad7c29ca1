"""What is not finite in a layer in one step, and what memory it holds."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.backends import (
    native_dropout,
    native_memory,
    native_norm,
    native_prepared,
    native_projection,
    native_work,
)
from clearhead.nn import attention_step, layer_step
from tests.budget import within_budget
from tests.nn.layers.definition import (
    DTYPES,
    KINDS,
    Block,
    block,
    by_modules,
    draw,
    forget,
    is_layer,
    numbers,
    same,
    tokens,
    upstream_of,
)

pytestmark = pytest.mark.skipif(native_projection.absent() is not None, reason=f"{native_projection.absent()}")

# ---- NaN and inf --------------------------------------------------------------------------------------------


def _with(x: Tensor, batch: int, places: slice, value: float) -> Tensor:
    made = x.detach().clone()
    made[batch, places] = value
    return made.requires_grad_()


BAD = pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)


@BAD
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hidden_token_that_is_not_finite(kind: type[Block], norm_first: bool, dtype: torch.dtype, bad: float) -> None:
    """As a key nobody reads it; its own row tells."""
    own, x, mask = block(kind, dtype, norm_first=norm_first), tokens(dtype, length=9), ch.Padding([9, 6])
    clean, spoiled = (_with(x, 1, slice(7, 8), value) for value in (0.0, bad))
    rest = torch.ones(2, 9, dtype=torch.bool)
    rest[1, 7] = False
    for _ in range(4):
        right, found = own(clean, mask=mask), own(spoiled, mask=mask)
        assert is_layer(found)
        assert torch.equal(right[rest], found[rest])
        assert not bool(found[1, 7].isfinite().any())
        # As a query it reads the others of its own sequence: what comes back through it is the others' too.
        upstream = upstream_of(found)
        grads = [torch.autograd.grad(output, leaf, upstream)[0] for output, leaf in ((right, clean), (found, spoiled))]
        assert torch.equal(grads[0][0], grads[1][0])
        assert bool(grads[1][0].isfinite().all())


@BAD
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_a_document_that_is_not_finite(norm_first: bool, dtype: torch.dtype, bad: float) -> None:
    """Neither as keys nor as queries do its tokens meet others: nothing of it is seen, there or back."""
    own, x = block(dtype=dtype, norm_first=norm_first), tokens(dtype, batch=1, length=15)
    mask = ch.Documents(lengths=[4, 5, 6])
    rest = torch.ones(15, dtype=torch.bool)
    rest[4:9] = False
    clean, spoiled = (_with(x, 0, slice(4, 9), value) for value in (0.0, bad))
    for _ in range(4):
        found = []
        for leaf in (clean, spoiled):
            output = own(leaf, mask=mask)
            assert is_layer(output)
            (grad,) = torch.autograd.grad(output, leaf, upstream_of(output))
            found.append((output[0, rest], grad[0, rest]))
        same(*found)
        assert all(bool(part.isfinite().all()) for part in found[1])


@BAD
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_gradients_that_are_finite_are_those_of_the_parts(norm_first: bool, bad: float) -> None:
    """Of every parameter and every token: finite exactly where they are one by one, and right there."""
    own, x = block(norm_first=norm_first), tokens(batch=2, length=9)
    for mask in (ch.Padding([9, 6]), ch.Causal(), ch.Padding([9, 6]) & ch.Causal()):
        spoiled, upstream = _with(x, 1, slice(7, 8), bad), draw(2, 9, 32, seed=3)
        upstream[1, 6:] = 0.0

        def in_parts(own: Any, x: Tensor, mask: ch.Mask = mask) -> Tensor:
            return by_modules(own, x, mask)

        wide = copy.deepcopy(own).double()
        exact = numbers(wide, spoiled.detach().double().requires_grad_(), call=in_parts, layer=False, upstream=upstream)
        parts = numbers(own, spoiled, call=in_parts, layer=None, upstream=upstream)
        for _ in range(3):
            together = numbers(own, spoiled, mask, upstream=upstream)
            for found, near, right in zip(together, parts, exact, strict=True):
                assert torch.equal(found.isfinite(), near.isfinite())
                whole = found.isfinite()
                if bool(whole.any()):
                    within_budget("finite", found[whole], near[whole], right[whole], terms=128)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_a_gradient_that_is_not_finite_stays_in_its_batch(norm_first: bool) -> None:
    own, x = block(norm_first=norm_first), tokens()
    upstream = draw(2, 7, 32, seed=3)
    right = numbers(own, x, upstream=upstream)
    upstream[1, 3, 5] = torch.inf
    for _ in range(4):
        found = numbers(own, x, upstream=upstream)
        assert torch.equal(found[1][0], right[1][0])
        assert not bool(found[1][1].isfinite().all())


# ---- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("call", [1, 2, 3], ids=["written down", "written down again", "played back"])
def test_what_is_saved_goes_with_backward(
    call: int, norm_first: bool, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that is kept, as in a running sum, must keep nothing else, and neither must calls that are."""
    own, x = block(norm_first=norm_first, dropout=dropout), tokens(batch=4, length=65)
    made: list[weakref.ref[Tensor]] = []

    def noted(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def making(*given: Any, **options: Any) -> Tensor:
            made.append(weakref.ref(found := make(*given, **options)))
            return found

        return making

    plain, maker = noted(native_memory.new_tensor), native_memory.maker_like
    for place in (attention_step, layer_step, native_dropout, native_norm, native_projection, native_work):
        monkeypatch.setattr(place, "new_tensor", plain)
    monkeypatch.setattr(native_prepared, "maker_like", lambda own: noted(maker(own)))
    monkeypatch.setattr(native_prepared, "_MOST_KEPT", 0)
    for _ in range(1, call):
        own(x).sum().backward()
    made.clear()
    output = own(x)
    assert is_layer(output)
    loss = output.sum()
    del output
    assert any(place() is not None for place in made)
    loss.backward()
    for part in (x, *own.parameters()):
        part.grad = None
    gc.collect()
    assert [place() for place in made if place() is not None] == []
    assert bool(loss.detach().isfinite())


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_without_gradients_nothing_is_kept(norm_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own, x = block(norm_first=norm_first), tokens()
    alive: list[weakref.ref[Tensor]] = []
    maker = native_memory.maker_like

    def noting(own: Tensor) -> Callable[..., Tensor]:
        make = maker(own)

        def making(*given: Any, **options: Any) -> Tensor:
            alive.append(weakref.ref(found := make(*given, **options)))
            return found

        return making

    monkeypatch.setattr(native_prepared, "maker_like", noting)
    for most in (0, 2**18):
        monkeypatch.setattr(native_prepared, "_MOST_KEPT", most)
        forget(monkeypatch)
        with torch.no_grad():
            for _ in range(3):
                alive.clear()
                output = own(x)
        gc.collect()
        held = [place() for place in alive if place() is not None]
        # What is small and only passes on the way is written again by the next call.
        assert (len(alive) == 1) == (most > 0)
        assert len(held) == 1
        assert held[0] is output
