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
    output_and_gradients,
    tokens,
    upstream_of,
)

pytestmark = [needs_native, pytest.mark.covering(1)]

# ---- NaN and inf --------------------------------------------------------------------------------------------


def _with(x: Tensor, batch: int, places: slice, value: float) -> Tensor:
    made = x.detach().clone()
    made[batch, places] = value
    return made.requires_grad_()


def _assert_matches_formula(
    actual: Tensor, module: Any, clean: Tensor, mask: ch.Mask, upstream: Tensor, rows: Any
) -> None:
    """Assert that rows of the tokens' gradient match the formula's gradient for finite tokens."""
    wide, exact_x = copy.deepcopy(module).double(), clean.detach().double().requires_grad_()
    (textbook,) = torch.autograd.grad(formula(module, clean, mask), clean, upstream)
    (exact,) = torch.autograd.grad(formula(wide, exact_x, mask), exact_x, upstream.double())
    within_budget("dx", actual[rows], textbook[rows], exact[rows], terms=128, dtype=clean.dtype)


BAD = pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)


@BAD
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("kind", KINDS)
def test_masked_nan_or_infinity_reaches_only_its_own_row(
    kind: type[Block], norm_first: bool, dtype: torch.dtype, bad: float
) -> None:
    """No query reads it as a key; its own row is NaN or infinite."""
    module, x, mask = block(kind, dtype, norm_first=norm_first), tokens(dtype, length=9), ch.Padding([9, 6])
    clean, spoiled = (_with(x, 1, slice(7, 8), value) for value in (0.0, bad))
    rest = torch.ones(2, 9, dtype=torch.bool)
    rest[1, 7] = False
    for _ in range(2):
        right, output = fused(module, clean, mask=mask), fused(module, spoiled, mask=mask)
        assert torch.equal(right[rest], output[rest])
        assert not bool(output[1, 7].isfinite().any())
        # As a query it reads its sequence, so gradients of the whole sequence may be NaN.
        upstream = upstream_of(output)
        (grad,) = torch.autograd.grad(output, spoiled, upstream)
        assert bool(grad[0].isfinite().all())
        _assert_matches_formula(grad, module, clean, mask, upstream, 0)


@BAD
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_nan_or_infinity_stays_in_its_document(norm_first: bool, dtype: torch.dtype, bad: float) -> None:
    """Tokens of other documents never interact with it, neither forward nor backward."""
    module, x = block(dtype=dtype, norm_first=norm_first), tokens(dtype, batch=1, length=15)
    mask = ch.Documents(lengths=[4, 5, 6])
    rest = torch.ones(15, dtype=torch.bool)
    rest[4:9] = False
    clean, spoiled = (_with(x, 0, slice(4, 9), value) for value in (0.0, bad))
    for _ in range(2):
        right, output = fused(module, clean, mask=mask), fused(module, spoiled, mask=mask)
        assert torch.equal(right[0, rest], output[0, rest])
        upstream = upstream_of(output)
        (grad,) = torch.autograd.grad(output, spoiled, upstream)
        assert bool(grad[0, rest].isfinite().all())
        _assert_matches_formula(grad, module, clean, mask, upstream, (0, rest))


@BAD
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_gradients_are_finite_where_op_by_op_gradients_are(norm_first: bool, bad: float) -> None:
    """Fused gradients are finite exactly where op-by-op gradients are, with the same values there."""
    module, x = block(norm_first=norm_first), tokens(batch=2, length=9)
    for mask in (ch.Padding([9, 6]), ch.Causal(), ch.Padding([9, 6]) & ch.Causal()):
        spoiled, upstream = _with(x, 1, slice(7, 8), bad), draw(2, 9, 32, seed=3)
        upstream[1, 6:] = 0.0

        def in_parts(module: Any, x: Tensor, mask: ch.Mask = mask) -> Tensor:
            return by_modules(module, x, mask)

        wide = copy.deepcopy(module).double()
        exact = output_and_gradients(
            wide, spoiled.detach().double().requires_grad_(), call=in_parts, layer=False, upstream=upstream
        )
        parts = output_and_gradients(module, spoiled, call=in_parts, layer=None, upstream=upstream)
        for _ in range(3):
            together = output_and_gradients(module, spoiled, mask, upstream=upstream)
            for actual, near, right in zip(together, parts, exact, strict=True):
                assert torch.equal(actual.isfinite(), near.isfinite())
                whole = actual.isfinite()
                if bool(whole.any()):
                    within_budget("finite", actual[whole], near[whole], right[whole], terms=128)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_nan_or_infinity_in_a_gradient_stays_in_its_sequence(norm_first: bool) -> None:
    module, x = block(norm_first=norm_first), tokens()
    upstream = draw(2, 7, 32, seed=3)
    right = output_and_gradients(module, x, upstream=upstream)
    upstream[1, 3, 5] = torch.inf
    for _ in range(2):
        results = output_and_gradients(module, x, upstream=upstream)
        assert torch.equal(results[1][0], right[1][0])
        assert not bool(results[1][1].isfinite().all())


# ---- memory -------------------------------------------------------------------------------------------------


def _storages() -> set[int]:
    """Data pointers of all live CPU tensors."""
    gc.collect()
    tensors = (each for each in gc.get_objects() if type(each) is Tensor and each.layout is torch.strided)
    return {each.untyped_storage().data_ptr() for each in tensors if each.device.type == "cpu"}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_saved_tensors_are_freed_by_backward(norm_first: bool, dropout: float) -> None:
    """A loss that is kept alive, as in a running sum, does not keep saved tensors alive."""
    module, x = block(norm_first=norm_first, dropout=dropout), tokens(batch=4, length=65)
    saved: list[weakref.ref[Tensor]] = []

    def pack(each: Tensor) -> Tensor:
        saved.append(weakref.ref(each))
        return each

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        loss = fused(module, x).sum()
    inputs = {id(part) for part in (x, *module.parameters())}
    of_the_call = [each for each in saved if id(each()) not in inputs]
    # Sums, normalised inputs, projections, head outputs, activations and slopes are alive now.
    assert len([each for each in of_the_call if each() is not None]) >= 8
    loss.backward()
    for part in (x, *module.parameters()):
        part.grad = None
    gc.collect()
    assert [each for each in of_the_call if each() is not None] == []
    assert bool(loss.detach().isfinite())


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_bytes_saved_for_backward_match_the_documentation(norm_first: bool) -> None:
    """A layer saves sums, moments, normalised inputs, projections, heads, activations and slopes."""
    width, rows, hidden, heads = 32, 4 * 65, 128, 4
    module, x = block(norm_first=norm_first), tokens(batch=4, length=65)
    saved: list[int] = []

    def pack(each: Tensor) -> Tensor:
        if each is not x and not any(each is part for part in module.parameters()):
            saved.append(each.nbytes)
        return each

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        fused(module, x)
    normed, sums = (2, 1) if norm_first else (1, 2)
    projections, joined = 3, 1
    widths = (normed + sums + projections + joined) * width + 2 * hidden
    assert sum(saved) == 4 * rows * (widths + 2 * 2 + 2 * heads)


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_no_grad_keeps_no_tensor_alive(norm_first: bool) -> None:
    module, x = block(norm_first=norm_first), tokens(batch=4, length=65)
    with torch.no_grad():
        fused(module, x)
        before = _storages()
        output = fused(module, x)
        assert _storages() - before == {output.untyped_storage().data_ptr()}
        del output
        assert _storages() == before
