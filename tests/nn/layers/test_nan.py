"""NaN and infinity in a fused layer, and the memory that it saves for backward."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from tests.agreement import needs_native
from tests.budget import within_budget
from tests.nn.layers.definition import (
    DTYPES,
    KINDS,
    Block,
    block,
    by_modules,
    draw,
    formula,
    fused,
    numbers,
    tokens,
    upstream_of,
)

pytestmark = needs_native

# ---- NaN and inf --------------------------------------------------------------------------------------------


def _with(x: Tensor, batch: int, places: slice, value: float) -> Tensor:
    made = x.detach().clone()
    made[batch, places] = value
    return made.requires_grad_()


def _agrees(found: Tensor, own: Any, clean: Tensor, mask: ch.Mask, upstream: Tensor, rows: Any) -> None:
    """Rows of the tokens' gradient against the definition's, of finite tokens."""
    wide, exact_x = copy.deepcopy(own).double(), clean.detach().double().requires_grad_()
    (textbook,) = torch.autograd.grad(formula(own, clean, mask), clean, upstream)
    (exact,) = torch.autograd.grad(formula(wide, exact_x, mask), exact_x, upstream.double())
    within_budget("dx", found[rows], textbook[rows], exact[rows], terms=128, dtype=clean.dtype)


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
    for _ in range(2):
        right, found = fused(own, clean, mask=mask), fused(own, spoiled, mask=mask)
        assert torch.equal(right[rest], found[rest])
        assert not bool(found[1, 7].isfinite().any())
        # As a query it reads the others of its own sequence: what comes back through it is the others' too.
        upstream = upstream_of(found)
        (grad,) = torch.autograd.grad(found, spoiled, upstream)
        assert bool(grad[0].isfinite().all())
        _agrees(grad, own, clean, mask, upstream, 0)


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
    for _ in range(2):
        right, found = fused(own, clean, mask=mask), fused(own, spoiled, mask=mask)
        assert torch.equal(right[0, rest], found[0, rest])
        upstream = upstream_of(found)
        (grad,) = torch.autograd.grad(found, spoiled, upstream)
        assert bool(grad[0, rest].isfinite().all())
        _agrees(grad, own, clean, mask, upstream, (0, rest))


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
    for _ in range(2):
        found = numbers(own, x, upstream=upstream)
        assert torch.equal(found[1][0], right[1][0])
        assert not bool(found[1][1].isfinite().all())


# ---- memory -------------------------------------------------------------------------------------------------


def _storages() -> set[int]:
    """Where the memory of tensors lies that Python knows of and that are still alive."""
    gc.collect()
    tensors = (each for each in gc.get_objects() if type(each) is Tensor and each.layout is torch.strided)
    return {each.untyped_storage().data_ptr() for each in tensors if each.device.type == "cpu"}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_what_is_saved_goes_with_backward(norm_first: bool, dropout: float) -> None:
    """A loss that is kept alive, as in a running sum, keeps nothing else alive."""
    own, x = block(norm_first=norm_first, dropout=dropout), tokens(batch=4, length=65)
    saved: list[weakref.ref[Tensor]] = []

    def pack(each: Tensor) -> Tensor:
        saved.append(weakref.ref(each))
        return each

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        loss = fused(own, x).sum()
    inputs = {id(part) for part in (x, *own.parameters())}
    of_the_call = [each for each in saved if id(each()) not in inputs]
    # The sums, what is normed, projections, the heads' output, activations and slopes are alive now.
    assert len([each for each in of_the_call if each() is not None]) >= 8
    loss.backward()
    for part in (x, *own.parameters()):
        part.grad = None
    gc.collect()
    assert [each for each in of_the_call if each() is not None] == []
    assert bool(loss.detach().isfinite())


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_saved_for_backward_are_what_the_documentation_lists(norm_first: bool) -> None:
    """Bytes of what a layer saves: the sums, moments, norms, projections, heads, activations and slopes."""
    width, rows, hidden, heads = 32, 4 * 65, 128, 4
    own, x = block(norm_first=norm_first), tokens(batch=4, length=65)
    saved: list[int] = []

    def pack(each: Tensor) -> Tensor:
        if each is not x and not any(each is part for part in own.parameters()):
            saved.append(each.nbytes)
        return each

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        fused(own, x)
    normed, sums = (2, 1) if norm_first else (1, 2)
    projections, joined = 3, 1
    widths = (normed + sums + projections + joined) * width + 2 * hidden
    assert sum(saved) == 4 * rows * (widths + 2 * 2 + 2 * heads)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_without_gradients_nothing_is_kept_alive(norm_first: bool) -> None:
    own, x = block(norm_first=norm_first), tokens(batch=4, length=65)
    with torch.no_grad():
        fused(own, x)
        before = _storages()
        output = fused(own, x)
        assert _storages() - before == {output.untyped_storage().data_ptr()}
        del output
        assert _storages() == before
