"""Plain calls skip validation and have the bits, strides and errors of validated calls."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead as ch
from clearhead.problem import draw_seed
from tests.agreement import needs_native
from tests.threads import on_threads

pytestmark = needs_native

MASKS = [None, ch.Causal()]


def _tensors(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(shape).to(dtype) for _ in range(3))
    return query, key, value


# ---- training ------------------------------------------------------------------------------------------------------


def _interleaved_heads(*shape: int) -> Tensor:
    batch, heads, length, dim = shape
    return torch.randn(batch, length, heads, dim).transpose(1, 2)


#: Functions that draw queries, keys and values.
LAYOUTS: dict[str, Callable[[], Sequence[Tensor]]] = {
    "equal": lambda: _tensors(2, 3, 17, 8),
    "one": lambda: _tensors(1, 1, 1, 1),
    "interleaved heads": lambda: [_interleaved_heads(2, 3, 17, 8) for _ in range(3)],
    "slices of one projection": lambda: torch.randn(2, 17, 9, 8).transpose(1, 2).split(3, dim=1),
    "grouped": lambda: (torch.randn(2, 6, 9, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 24)),
    "one tile": lambda: _tensors(1, 2, 256, 8),
    "beyond one tile": lambda: _tensors(1, 2, 257, 8),
    "no queries": lambda: (torch.randn(2, 3, 0, 8), *_tensors(2, 3, 4, 8)[:2]),
    "no keys": lambda: (torch.randn(2, 3, 4, 8), *_tensors(2, 3, 0, 8)[:2]),
    "many rows": lambda: _tensors(1, 40, 103, 4),
    "many rows, grouped": lambda: (_interleaved_heads(2, 32, 96, 8), *_tensors(2, 2, 96, 8)[:2]),
    "no batch": lambda: _tensors(3, 17, 8),
    "no heads": lambda: _tensors(17, 8),
    "bfloat16": lambda: _tensors(2, 3, 33, 16, dtype=torch.bfloat16),
    "float16": lambda: _tensors(2, 3, 33, 16, dtype=torch.float16),
}


#: Layouts for which a causal mask needs query positions.
UNEQUAL = ("no queries", "no keys")


def _step(
    inputs: Sequence[Tensor],
    needs: Sequence[bool] = (True, True, True),
    arrives: str = "strides of the output",
    **options: Any,
) -> list[Tensor]:
    """The output, and gradients of the inputs that need gradients."""
    leaves = [tensor.detach().requires_grad_(need) for tensor, need in zip(inputs, needs, strict=True)]
    output = ch.attention(*leaves, **options)
    # Computed from the output, so that two steps get the same upstream gradient.
    values = output.detach().cos()
    upstream = {
        "strides of the output": values,
        "a sum's": torch.ones((), dtype=values.dtype).expand(values.shape),
        "transposed": values.mT.contiguous().mT,
        "negative": torch._neg_view(values),
    }[arrives]
    return [output, *torch.autograd.grad(output, [leaf for leaf in leaves if leaf.requires_grad], upstream)]


def _same(inputs: Sequence[Tensor], dropout: float = 0.0, **options: Any) -> None:
    """Assert that a plain call has the bits of a validated call with the same seed."""
    torch.manual_seed(5)
    # A call with a seed is validated.
    validated = _step(inputs, **options, dropout=dropout, seed=draw_seed(dropout), backend="native")
    torch.manual_seed(5)
    plain = _step(inputs, **options, dropout=dropout)
    for actual, other, given in zip(plain, validated, [inputs[0], *inputs], strict=False):
        assert torch.equal(actual, other)
        assert actual.stride() == other.stride()
        assert actual.dtype == given.dtype


@pytest.mark.parametrize("mask", MASKS, ids=["full", "causal"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_step_has_the_bits_of_the_validated_call(name: str, dropout: float, mask: ch.Mask | None) -> None:
    _same(LAYOUTS[name](), dropout, mask=mask if name not in UNEQUAL else None)


def test_each_call_draws_a_new_dropout_mask() -> None:
    """Invalid probabilities and seeds raise after valid calls."""
    inputs = LAYOUTS["equal"]()
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            leaves = [tensor.clone().requires_grad_() for tensor in inputs]
            outputs = [ch.attention(*leaves, dropout=0.5).detach() for _ in range(5)]
        assert all(not torch.equal(one, other) for one, other in itertools.pairwise(outputs))
    for bad in (1.0, -0.5, torch.nan):
        with pytest.raises(ch.ShapeError, match="dropout"):
            ch.attention(*inputs, dropout=bad)
    with pytest.raises(ch.ShapeError, match="seed"):
        ch.attention(*inputs, seed="1")  # type: ignore[arg-type]


@pytest.mark.parametrize("arrives", ["a sum's", "transposed"])
def test_backward_drops_the_same_weights_for_any_gradient_strides(arrives: str) -> None:
    for _ in range(3):
        inputs = LAYOUTS["equal"]()
        _same(inputs, 0.5)
        _same(inputs, 0.5, arrives=arrives)


def test_steps_of_different_layouts_alternate() -> None:
    for _ in range(3):
        for scale, mask in ((None, None), (None, ch.Causal()), (0.5, ch.Causal())):
            for needs in ((True, True, True), (True, False, False), (False, False, True)):
                inputs = LAYOUTS["equal"]()
                leaves = [tensor.detach().requires_grad_(need) for tensor, need in zip(inputs, needs, strict=True)]
                output = ch.attention(*leaves, mask=mask, scale=scale)
                output.sum().backward()
                exact = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
                ch.attention(*exact, mask=mask, scale=scale, backend="reference").sum().backward()
                for leaf, true in zip(leaves, exact, strict=True):
                    assert (leaf.grad is None) == (true.grad is None)
                    if leaf.grad is not None and true.grad is not None:
                        torch.testing.assert_close(leaf.grad.double(), true.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arrives", ["a sum's", "transposed", "negative"])
def test_strides_of_upstream_gradients_match(arrives: str) -> None:
    for _ in range(3):
        inputs = LAYOUTS["equal"]()
        _same(inputs)
        plain = _step(inputs, arrives=arrives, backend="native", scores=ch.SoftCap(1e30))
        for actual, other in zip(_step(inputs, arrives=arrives), plain, strict=True):
            torch.testing.assert_close(actual, other, rtol=1e-5, atol=1e-6)


def test_upstream_gradients_may_be_tensor_subclasses() -> None:
    class Subclass(Tensor):
        pass

    for _ in range(4):
        query, key, value = (tensor.requires_grad_() for tensor in _tensors(2, 3, 17, 8))
        output = ch.attention(query, key, value)
        upstream = torch.randn_like(output)
        (plain,) = torch.autograd.grad(output, query, upstream, retain_graph=True)
        (grad,) = torch.autograd.grad(output, query, upstream.as_subclass(Subclass))
        assert torch.equal(grad.as_subclass(Tensor), plain)


@pytest.mark.parametrize("name", ["interleaved heads", "many rows, grouped"])
def test_saved_tensor_hooks_may_change_strides(name: str) -> None:
    """Unpacked tensors may be contiguous where the saved ones were interleaved."""
    for _ in range(3):
        _same(LAYOUTS[name]())
    inputs = LAYOUTS[name]()
    plain = _step(inputs)
    for form in (torch.Tensor.contiguous, lambda tensor: tensor.mT.contiguous().mT):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, form):
            results = _step(inputs)
        for actual, other in zip(results, plain, strict=True):
            torch.testing.assert_close(actual, other, rtol=1e-6, atol=1e-6)


def test_retain_graph_allows_a_second_backward() -> None:
    for _ in range(4):
        query, key, value = (tensor.requires_grad_() for tensor in _tensors(2, 3, 17, 8))
        output = ch.attention(query, key, value)
        upstream = torch.randn_like(output)
        first = torch.autograd.grad(output, (query, key, value), upstream, retain_graph=True)
        second = torch.autograd.grad(output, (query, key, value), upstream)
        assert all(torch.equal(actual, other) for actual, other in zip(first, second, strict=True))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(output, query, upstream)


@pytest.mark.parametrize("name", ["equal", "many rows"])
def test_saved_tensors_are_freed_by_backward(name: str) -> None:
    """A loss that is kept alive, as in a running sum, does not keep queries and keys alive."""
    for _ in range(4):
        given = [2.0 * tensor.requires_grad_() for tensor in LAYOUTS[name]()]
        places = [weakref.ref(tensor) for tensor in given]
        loss = ch.attention(*given).sum()
        del given
        assert None not in [place() for place in places]
        loss.backward()
        gc.collect()
        assert [place() for place in places] == [None] * 3
        assert bool(loss.detach().isfinite())


def test_modifying_an_input_before_backward_raises() -> None:
    for _ in range(4):
        query, key, value = (tensor.requires_grad_() for tensor in _tensors(2, 3, 17, 8))
        output = ch.attention(query, key, value)
        with torch.no_grad():
            value += 1.0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.parametrize("mask", MASKS, ids=["full", "causal"])
def test_second_derivatives_match_float64(mask: ch.Mask | None) -> None:
    inputs = [tensor.requires_grad_() for tensor in _tensors(2, 3, 7, 8)]

    def penalty(leaves: Sequence[Tensor], **options: Any) -> list[Tensor]:
        output = ch.attention(*leaves, mask=mask, **options)
        grads = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        return [*torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)]

    exact = penalty([tensor.detach().double().requires_grad_() for tensor in inputs], backend="reference")
    for actual, true in zip(penalty(inputs), exact, strict=True):
        torch.testing.assert_close(actual.double(), true, rtol=1e-4, atol=1e-4)


def test_vectorized_jacobian_equals_the_looped_one() -> None:
    query, key, value = _tensors(1, 2, 3, 4)
    of_query = partial(torch.autograd.functional.jacobian, lambda tensor: ch.attention(tensor, key, value), query)
    torch.testing.assert_close(of_query(vectorize=True), of_query(vectorize=False), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_infinity_reach_only_rows_that_attend_to_them(bad: float) -> None:
    for _ in range(4):
        inputs = _tensors(2, 3, 17, 8)
        for tensor in inputs[1:]:
            tensor[0, 1, 16, 3] = bad
        validated = _step(inputs, mask=ch.Causal(), query_offset=0, backend="native")
        for actual, other in zip(_step(inputs, mask=ch.Causal()), validated, strict=True):
            assert torch.equal(actual.nan_to_num(7.0), other.nan_to_num(7.0))
        assert torch.isfinite(validated[0][:, :, :16]).all()


def test_transforms_and_autocast_give_the_same_gradients() -> None:
    inputs = _tensors(2, 3, 17, 8)
    _same(inputs)
    query, key, value = inputs
    exact = _step(inputs, arrives="a sum's")[1]
    grad = torch.func.grad(lambda tensor: ch.attention(tensor, key, value).sum())(query)
    torch.testing.assert_close(grad, exact, rtol=1e-5, atol=1e-6)
    many = torch.func.vmap(ch.attention)(query[None], key[None], value[None])
    torch.testing.assert_close(many[0], ch.attention(query, key, value), rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _same(inputs)
        assert ch.attention(*inputs).dtype == torch.float32


class _OperationCounter(TorchDispatchMode):
    """Counts the operators that torch dispatches."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_backward_operator() -> None:
    inputs = _tensors(2, 3, 17, 8)
    arrived = torch.randn(2, 3, 17, 8)
    _same(inputs)
    query, key, value = (tensor.requires_grad_() for tensor in inputs)
    plain = torch.autograd.grad(ch.attention(query, key, value), (query, key, value), arrived)
    output = ch.attention(query, key, value)
    with _OperationCounter() as counter:
        gradients = torch.autograd.grad(output, (query, key, value), arrived)
    assert counter.count >= 1
    assert all(torch.equal(actual, other) for actual, other in zip(gradients, plain, strict=True))


def test_concurrent_threads_give_the_same_bits() -> None:
    inputs = [LAYOUTS["equal"]() for _ in range(8)]
    wanted = [_step(given, mask=ch.Causal(), query_offset=0, backend="native") for given in inputs]
    wrong: list[int] = []

    def work(which: int) -> None:
        for _ in range(200):
            results = _step(inputs[which], mask=ch.Causal())
            if not all(torch.equal(actual, other) for actual, other in zip(results, wanted[which], strict=True)):
                wrong.append(which)

    on_threads(8, work)
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (2, 2, 8, 8), (1, 1, 32, 2), (2, 4, 32, 16), (1, 1, 45, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_a_small_16_bit_step_is_within_the_error_budget(
    shape: tuple[int, ...], dtype: torch.dtype, causal: bool
) -> None:
    """Gradients included: within twice the error of the formula computed in the same dtype."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]

    def step(call: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [part.to(dtype).requires_grad_() for part in drawn[:3]]
        output = call(*inputs)
        return [output.detach(), *torch.autograd.grad(output, inputs, drawn[3].to(dtype))]

    mask = ch.Causal() if causal else None
    exact = step(lambda *given: ch.attention(*given, mask=mask, backend="reference"), torch.float64)
    for _ in range(3):
        ours = step(lambda *given: ch.attention(*given, mask=mask), dtype)
    plain = step(lambda query, key, value: _textbook(query, key, value, causal), dtype)
    for actual, textbook, true in zip(ours, plain, exact, strict=True):
        assert actual.dtype == dtype
        size = float(true.abs().max())
        allowed = 2 * float((textbook.double() - true).abs().max()) + torch.finfo(dtype).eps * size
        assert float((actual.double() - true).abs().max()) <= allowed


def _textbook(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    return scores.softmax(dim=-1) @ value
