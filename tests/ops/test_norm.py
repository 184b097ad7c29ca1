"""The operators ``norm`` and ``norm_gradients`` against their definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead.nn import norm as norms
from clearhead.ops.kinds import NormKind
from tests.agreement import needs_native
from tests.budget import within_budget

pytestmark = needs_native

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = [NormKind.LAYER, NormKind.RMS, NormKind.RMS_FROM_ONE]
#: Rows and columns: single, odd, around the kernels' vector and block sizes, more rows than one task's.
SIZES = [(1, 1), (3, 2), (5, 7), (17, 33), (2, 127), (3, 128), (4, 129), (1, 1023), (2, 1025), (2, 2500), (700, 24)]
both_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Norm(NamedTuple):
    kind: NormKind
    epsilon: float
    weight: Tensor | None
    bias: Tensor | None


def normed(x: Tensor, norm: Norm) -> Tensor:
    return norms.normed(x, (norm[:2], norm[2:]))


def normed_by_torch(x: Tensor, norm: Norm) -> Tensor:
    return norms.normed_by_torch(x, (norm[:2], norm[2:]))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm_like(kind: NormKind, width: int, dtype: torch.dtype, given: str = "both", epsilon: float = 1e-5) -> Norm:
    weight = 1.0 + 0.5 * draw(width, seed=1) if given in ("both", "weight") else None
    bias = 0.5 * draw(width, seed=2) if given in ("both", "bias") and kind is NormKind.LAYER else None
    return Norm(kind, epsilon, *(None if part is None else part.to(dtype) for part in (weight, bias)))


def in_dtype(norm: Norm, dtype: torch.dtype) -> Norm:
    weight, bias = (
        None if part is None else part.detach().to(dtype).requires_grad_() for part in (norm.weight, norm.bias)
    )
    return norm._replace(weight=weight, bias=bias)


def formula(x: Tensor, norm: Norm) -> Tensor:
    """The textbook formula."""
    centred = x - x.mean(-1, keepdim=True) if norm.kind is NormKind.LAYER else x
    output = centred / (centred.square().mean(-1, keepdim=True) + norm.epsilon).sqrt()
    if norm.weight is not None:
        output = output * (1 + norm.weight if norm.kind is NormKind.RMS_FROM_ONE else norm.weight)
    return output if norm.bias is None else output + norm.bias


def output_and_gradients(
    function: Callable[[Tensor, Norm], Tensor], x: Tensor, norm: Norm, dtype: torch.dtype
) -> list[Tensor]:
    """Output, and gradients of ``x`` and of weight and bias if given."""
    leaf, leaf_norm = x.detach().to(dtype).requires_grad_(), in_dtype(norm, dtype)
    output = function(leaf, leaf_norm)
    inputs = [leaf, *(part for part in (leaf_norm.weight, leaf_norm.bias) if part is not None)]
    upstream = draw(*output.shape, seed=3, dtype=x.dtype).to(dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]


def check(x: Tensor, norm: Norm, results: list[Tensor] | None = None) -> None:
    results = output_and_gradients(normed, x, norm, x.dtype) if results is None else results
    textbook, exact = (
        output_and_gradients(normed_by_torch, x, norm, x.dtype),
        output_and_gradients(formula, x, norm, torch.float64),
    )
    terms = max(x.shape[-1], x.numel() // x.shape[-1])
    for name, *three in zip(("output", "dx", "dweight", "dbias"), results, textbook, exact, strict=False):
        within_budget(name, *three, terms=terms, dtype=x.dtype)
    assert len(results) == len(exact)


@pytest.mark.parametrize("given", ["both", "bias"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@all_dtypes
@both_kinds
def test_outputs_and_gradients_are_within_the_error_budget(
    kind: NormKind, dtype: torch.dtype, size: tuple[int, int], given: str
) -> None:
    rows, width = size
    x = draw(rows, width, dtype=dtype)
    # With one column or equal columns the variance is epsilon alone: use a larger one.
    check(x, norm_like(kind, width, dtype, given, epsilon=0.1 if width < 8 else 1e-5))


@pytest.mark.parametrize("epsilon", [1e-12, 1e-5, 1.0])
@both_kinds
def test_any_epsilon_and_constant_rows(kind: NormKind, epsilon: float) -> None:
    check(draw(5, 40), norm_like(kind, 40, torch.float32, epsilon=epsilon))
    x = torch.full((3, 40), 2.0)
    norm = norm_like(kind, 40, torch.float32, epsilon=epsilon)
    assert norm.weight is not None
    expected = formula(x.double(), in_dtype(norm, torch.float64))
    torch.testing.assert_close(normed(x, norm).double(), expected, rtol=1e-6, atol=1e-6)


@both_kinds
@pytest.mark.parametrize("offset", [10.0, 1000.0])
def test_rows_with_a_large_mean(kind: NormKind, offset: float) -> None:
    """The mean is many times the deviation, so subtracting it cancels."""
    check(draw(9, 100) + offset, norm_like(kind, 100, torch.float32))


@both_kinds
def test_rows_of_different_magnitudes_do_not_affect_each_other(kind: NormKind) -> None:
    x = draw(6, 64) * torch.tensor([1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6])[:, None]
    norm = norm_like(kind, 64, torch.float32, epsilon=1e-12)
    for row in range(6):
        within_budget(
            f"row {row}",
            normed(x, norm)[row],
            normed_by_torch(x, norm)[row],
            formula(x.double(), in_dtype(norm, torch.float64))[row],
            terms=64,
        )


@pytest.mark.parametrize("shape", [(24,), (2, 24), (2, 3, 24), (2, 1, 3, 24), (0, 24), (2, 0, 24)], ids=str)
@both_kinds
def test_any_leading_axes_are_accepted(kind: NormKind, shape: tuple[int, ...]) -> None:
    x = draw(*shape).requires_grad_()
    norm = in_dtype(norm_like(kind, 24, torch.float32), torch.float32)
    output = normed(x, norm)
    assert output.shape == shape
    assert norm.weight is not None
    of_x, of_weight = torch.autograd.grad(output, [x, norm.weight], torch.ones_like(output))
    assert of_x.shape == shape
    if x.numel() == 0:
        assert torch.equal(of_weight, torch.zeros(24))
    else:
        check(x, norm)


LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "rows transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.cat([torch.full_like(x, torch.nan), x], -1).chunk(2, -1)[1],
    "negative": lambda x: torch._neg_view(-x),
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


@pytest.mark.parametrize("lay", LAID)
@all_dtypes
@both_kinds
def test_strides_do_not_change_bits(kind: NormKind, dtype: torch.dtype, lay: str) -> None:
    x, norm, upstream = draw(3, 5, 33, dtype=dtype), norm_like(kind, 33, dtype), draw(3, 5, 33, seed=3, dtype=dtype)

    def called(x: Tensor, upstream: Tensor) -> list[Tensor]:
        leaf_norm, leaf = in_dtype(norm, dtype), x.requires_grad_()
        output = normed(leaf, leaf_norm)
        inputs = [leaf, *(part for part in (leaf_norm.weight, leaf_norm.bias) if part is not None)]
        return [output, *torch.autograd.grad(output, inputs, upstream)]

    right = called(x.clone(), upstream)
    other = LAID[lay]
    for given in ((other(x), upstream), (x.clone(), other(upstream)), (other(x), other(upstream))):
        assert not all(part.is_contiguous() and not part.is_neg() for part in given)
        assert all(map(torch.equal, called(*given), right))


@both_kinds
def test_an_expanded_upstream_gradient_gives_the_same_bits(kind: NormKind) -> None:
    """The strides of an expanded gradient are 0."""
    x, norm = draw(3, 5, 33).requires_grad_(), norm_like(kind, 33, torch.float32)
    (grad,) = torch.autograd.grad(normed(x, norm).sum() * 0.5, x)
    (right,) = torch.autograd.grad(normed(x, norm), x, torch.full((3, 5, 33), 0.5))
    assert torch.equal(grad, right)


@pytest.mark.parametrize("needed", ["x", "weight", "bias", "weight and bias"])
def test_only_needed_gradients_are_computed(needed: str) -> None:
    x, norm = draw(20, 33).requires_grad_(), in_dtype(norm_like(NormKind.LAYER, 33, torch.float32), torch.float32)
    assert norm.weight is not None
    assert norm.bias is not None
    inputs = {"x": x, "weight": norm.weight, "bias": norm.bias}
    whole = dict(
        zip(inputs, torch.autograd.grad(normed(x, norm), [*inputs.values()], draw(20, 33, seed=3)), strict=True)
    )
    for name, part in inputs.items():
        part.requires_grad_(name in needed.split())
    normed(x, norm).backward(draw(20, 33, seed=3))
    for name, part in inputs.items():
        if name in needed.split():
            assert part.grad is not None
            assert torch.equal(part.grad, whole[name])
        else:
            assert part.grad is None


@pytest.mark.parametrize("given", ["both", "weight", "none"])
@both_kinds
def test_second_derivatives_are_within_the_error_budget(kind: NormKind, given: str) -> None:
    norm = norm_like(kind, 24, torch.float32, given)

    def seconds(function: Callable[[Tensor, Norm], Tensor], dtype: torch.dtype) -> list[Tensor]:
        x, leaf_norm = draw(6, 24).to(dtype).requires_grad_(), in_dtype(norm, dtype)
        inputs = [x, *(part for part in (leaf_norm.weight, leaf_norm.bias) if part is not None)]
        upstream = draw(6, 24, seed=3).to(dtype).requires_grad_()
        first = torch.autograd.grad(function(x, leaf_norm), inputs, upstream, create_graph=True)
        total = sum(
            ((part * draw(*part.shape, seed=4).to(dtype)).sum() for part in first), torch.zeros((), dtype=dtype)
        )
        second_inputs = [x, upstream, *([leaf_norm.weight] if leaf_norm.weight is not None else [])]
        return [*(part.detach() for part in first), *torch.autograd.grad(total, second_inputs)]

    actual, textbook = seconds(normed, torch.float32), seconds(normed_by_torch, torch.float32)
    for place, three in enumerate(zip(actual, textbook, seconds(formula, torch.float64), strict=True)):
        within_budget(str(place), *three, terms=24)


@both_kinds
def test_batched_gradients_equal_single_gradients(kind: NormKind) -> None:
    x, norm = draw(6, 24).requires_grad_(), in_dtype(norm_like(kind, 24, torch.float32), torch.float32)
    assert norm.weight is not None
    output, upstream = normed(x, norm), draw(3, 6, 24, seed=3)
    many = torch.autograd.grad(output, [x, norm.weight], upstream, is_grads_batched=True, retain_graph=True)
    for place, one in enumerate(upstream):
        alone = torch.autograd.grad(output, [x, norm.weight], one, retain_graph=True)
        torch.testing.assert_close([part[place] for part in many], list(alone))


def test_a_dispatch_mode_sees_one_backward_operator() -> None:
    names: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    x, norm = draw(6, 24).requires_grad_(), norm_like(NormKind.LAYER, 24, torch.float32)
    output = normed(x, norm)
    with Names():  # type: ignore[no-untyped-call]
        (grad,) = torch.autograd.grad(output, x, draw(6, 24, seed=3))
    assert names.count("clearhead.norm_gradients.default") == 1
    torch.testing.assert_close(grad, output_and_gradients(normed, x, norm, torch.float32)[1])


def test_an_output_may_be_modified_in_place() -> None:
    x, norm = draw(6, 24).requires_grad_(), norm_like(NormKind.RMS, 24, torch.float32)
    upstream = draw(6, 24, seed=3)
    (plain,) = torch.autograd.grad(normed(x, norm) * 2.0, x, upstream)
    (grad,) = torch.autograd.grad(normed(x, norm).mul_(2.0), x, upstream)
    assert torch.equal(grad, plain)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@both_kinds
def test_nan_and_infinity_stay_in_their_row(kind: NormKind, bad: float) -> None:
    x, norm, upstream = draw(6, 40), norm_like(kind, 40, torch.float32), draw(6, 40, seed=3)
    results = []
    for value in (0.0, bad):
        leaf = x.clone()
        leaf[2, 7] = value
        output = normed(leaf.requires_grad_(), norm)
        results.append((output, *torch.autograd.grad(output, leaf, upstream)))
    rest = torch.arange(6) != 2
    for right, other in zip(*results, strict=True):
        assert torch.equal(right[rest], other[rest])
        # The mean spreads NaN over the row; with an infinite mean square, finite elements become 0.
        assert not bool(other[2].isfinite().all())


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize("size", [(33, 40), (700, 24)], ids=str)
@all_dtypes
@both_kinds
def test_any_number_of_threads_gives_the_same_bits(kind: NormKind, dtype: torch.dtype, size: tuple[int, int]) -> None:
    x, norm, results = draw(*size, dtype=dtype), norm_like(kind, size[1], dtype), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(output_and_gradients(normed, x, norm, dtype))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


# ---- the operators --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(17, 33), (2, 1025), (200, 24)], ids=str)
@all_dtypes
@both_kinds
def test_moments_are_mean_and_inverse_deviation(kind: NormKind, dtype: torch.dtype, size: tuple[int, int]) -> None:
    x, norm = draw(*size, dtype=dtype) + 1.0, norm_like(kind, size[1], dtype, epsilon=0.1)
    output, moments = torch.ops.clearhead.norm(x, norm.weight, norm.bias, kind, 0.1, True)
    rounded = x.double()
    mean = rounded.mean(-1) if kind is NormKind.LAYER else torch.zeros(size[0], dtype=torch.float64)
    scale = ((rounded - mean[:, None]).square().mean(-1) + 0.1).rsqrt()
    assert moments.dtype is torch.float32
    torch.testing.assert_close(moments.double(), torch.stack([mean, scale], -1), rtol=1e-6, atol=1e-6)
    alone, nothing = torch.ops.clearhead.norm(x, norm.weight, norm.bias, kind, 0.1)
    assert torch.equal(alone, output)
    assert nothing.numel() == 0


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)], ids=str)
def test_unneeded_gradients_of_weight_and_bias_are_empty(needs: tuple[bool, bool]) -> None:
    x, upstream, norm = draw(50, 24), draw(50, 24, seed=3), norm_like(NormKind.LAYER, 24, torch.float32)
    arguments = (norm.weight, norm.bias, NormKind.LAYER, norm.epsilon)
    _, moments = torch.ops.clearhead.norm(x, *arguments, True)
    whole = torch.ops.clearhead.norm_gradients(upstream, x, moments, *arguments, True, True)
    some = torch.ops.clearhead.norm_gradients(upstream, x, moments, *arguments, *needs)
    assert torch.equal(whole[0], some[0])
    for needed, one, other in zip(needs, some[1:], whole[1:], strict=True):
        assert torch.equal(one, other) if needed else one.numel() == 0
