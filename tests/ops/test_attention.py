"""Plain calls go straight to the operator: same bits, strides and errors as the validated call."""

from __future__ import annotations

import gc
import itertools
import threading
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

pytestmark = needs_native

MASKS = [None, ch.Causal()]


def _tensors(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(shape).to(dtype) for _ in range(3))
    return query, key, value


# ---- training ------------------------------------------------------------------------------------------------------


def _heads_in_turn(*shape: int) -> Tensor:
    batch, heads, length, dim = shape
    return torch.randn(batch, length, heads, dim).transpose(1, 2)


#: Queries, keys and values anew.
LAYOUTS: dict[str, Callable[[], Sequence[Tensor]]] = {
    "equal": lambda: _tensors(2, 3, 17, 8),
    "one": lambda: _tensors(1, 1, 1, 1),
    "heads in turn": lambda: [_heads_in_turn(2, 3, 17, 8) for _ in range(3)],
    "of one projection": lambda: torch.randn(2, 17, 9, 8).transpose(1, 2).split(3, dim=1),
    "grouped": lambda: (torch.randn(2, 6, 9, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 24)),
    "one tile": lambda: _tensors(1, 2, 256, 8),
    "beyond one tile": lambda: _tensors(1, 2, 257, 8),
    "no queries": lambda: (torch.randn(2, 3, 0, 8), *_tensors(2, 3, 4, 8)[:2]),
    "no keys": lambda: (torch.randn(2, 3, 4, 8), *_tensors(2, 3, 0, 8)[:2]),
    "many rows": lambda: _tensors(1, 40, 103, 4),
    "many rows, grouped": lambda: (_heads_in_turn(2, 32, 96, 8), *_tensors(2, 2, 96, 8)[:2]),
    "no batch": lambda: _tensors(3, 17, 8),
    "no heads": lambda: _tensors(17, 8),
    "bfloat16": lambda: _tensors(2, 3, 33, 16, dtype=torch.bfloat16),
    "float16": lambda: _tensors(2, 3, 33, 16, dtype=torch.float16),
}


#: Where positions of queries would have to be told.
UNEQUAL = ("no queries", "no keys")


def _step(
    inputs: Sequence[Tensor],
    needs: Sequence[bool] = (True, True, True),
    arrives: str = "as the output lies",
    **options: Any,
) -> list[Tensor]:
    """The output, and gradients of the inputs that need some."""
    leaves = [tensor.detach().requires_grad_(need) for tensor, need in zip(inputs, needs, strict=True)]
    output = ch.attention(*leaves, **options)
    # From the numbers, so that two steps are given the same.
    numbers = output.detach().cos()
    upstream = {
        "as the output lies": numbers,
        "a sum's": torch.ones((), dtype=numbers.dtype).expand(numbers.shape),
        "turned": numbers.mT.contiguous().mT,
        "negative": torch._neg_view(numbers),
    }[arrives]
    return [output, *torch.autograd.grad(output, [leaf for leaf in leaves if leaf.requires_grad], upstream)]


def _same(inputs: Sequence[Tensor], dropout: float = 0.0, **options: Any) -> None:
    """A plain call has the bits of a validated one, whose seed is the next that is drawn."""
    torch.manual_seed(5)
    # A seed makes the call take the validated road.
    written = _step(inputs, **options, dropout=dropout, seed=draw_seed(dropout), backend="native")
    torch.manual_seed(5)
    plain = _step(inputs, **options, dropout=dropout)
    for own, other, given in zip(plain, written, [inputs[0], *inputs], strict=False):
        assert torch.equal(own, other)
        assert own.stride() == other.stride()
        assert own.dtype == given.dtype


@pytest.mark.parametrize("mask", MASKS, ids=["full", "causal"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_step_has_the_bits_of_the_validated_call(name: str, dropout: float, mask: ch.Mask | None) -> None:
    _same(LAYOUTS[name](), dropout, mask=mask if name not in UNEQUAL else None)


def test_each_call_drops_other_weights() -> None:
    """And a bad probability, or seed, is told after good ones."""
    inputs = LAYOUTS["equal"]()
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            leaves = [tensor.clone().requires_grad_() for tensor in inputs]
            found = [ch.attention(*leaves, dropout=0.5).detach() for _ in range(5)]
        assert all(not torch.equal(one, other) for one, other in itertools.pairwise(found))
    for bad in (1.0, -0.5, torch.nan):
        with pytest.raises(ch.ShapeError, match="dropout"):
            ch.attention(*inputs, dropout=bad)
    with pytest.raises(ch.ShapeError, match="seed"):
        ch.attention(*inputs, seed="1")  # type: ignore[arg-type]


@pytest.mark.parametrize("arrives", ["a sum's", "turned"])
def test_dropout_is_that_of_forward_on_the_long_way_too(arrives: str) -> None:
    for _ in range(3):
        inputs = LAYOUTS["equal"]()
        _same(inputs, 0.5)
        _same(inputs, 0.5, arrives=arrives)


def test_steps_of_several_layouts_take_turns() -> None:
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


@pytest.mark.parametrize("arrives", ["a sum's", "turned", "negative"])
def test_gradients_that_lie_otherwise(arrives: str) -> None:
    for _ in range(3):
        inputs = LAYOUTS["equal"]()
        _same(inputs)
        plain = _step(inputs, arrives=arrives, backend="native", scores=ch.SoftCap(1e30))
        for own, other in zip(_step(inputs, arrives=arrives), plain, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_a_gradient_of_another_class() -> None:
    class Own(Tensor):
        pass

    for _ in range(4):
        query, key, value = (tensor.requires_grad_() for tensor in _tensors(2, 3, 17, 8))
        output = ch.attention(query, key, value)
        upstream = torch.randn_like(output)
        (plain,) = torch.autograd.grad(output, query, upstream, retain_graph=True)
        (found,) = torch.autograd.grad(output, query, upstream.as_subclass(Own))
        assert torch.equal(found.as_subclass(Tensor), plain)


@pytest.mark.parametrize("name", ["heads in turn", "many rows, grouped"])
def test_hooks_may_keep_what_is_saved_in_another_form(name: str) -> None:
    """Rows that lay in turn come back side by side."""
    for _ in range(3):
        _same(LAYOUTS[name]())
    inputs = LAYOUTS[name]()
    plain = _step(inputs)
    for form in (torch.Tensor.contiguous, lambda own: own.mT.contiguous().mT):
        with torch.autograd.graph.saved_tensors_hooks(lambda own: own, form):
            found = _step(inputs)
        for own, other in zip(found, plain, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)


def test_a_graph_may_be_kept_and_walked_again() -> None:
    for _ in range(4):
        query, key, value = (tensor.requires_grad_() for tensor in _tensors(2, 3, 17, 8))
        output = ch.attention(query, key, value)
        upstream = torch.randn_like(output)
        first = torch.autograd.grad(output, (query, key, value), upstream, retain_graph=True)
        again = torch.autograd.grad(output, (query, key, value), upstream)
        assert all(torch.equal(own, other) for own, other in zip(first, again, strict=True))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(output, query, upstream)


@pytest.mark.parametrize("name", ["equal", "many rows"])
def test_what_is_saved_goes_with_backward(name: str) -> None:
    """A loss that is kept, as in a running sum, keeps no queries and keys."""
    for _ in range(4):
        given = [2.0 * own.requires_grad_() for own in LAYOUTS[name]()]
        places = [weakref.ref(own) for own in given]
        loss = ch.attention(*given).sum()
        del given
        assert None not in [place() for place in places]
        loss.backward()
        gc.collect()
        assert [place() for place in places] == [None] * 3
        assert bool(loss.detach().isfinite())


def test_what_is_written_into_is_noticed() -> None:
    for _ in range(4):
        query, key, value = (tensor.requires_grad_() for tensor in _tensors(2, 3, 17, 8))
        output = ch.attention(query, key, value)
        with torch.no_grad():
            value += 1.0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.parametrize("mask", MASKS, ids=["full", "causal"])
def test_gradients_can_be_differentiated_again(mask: ch.Mask | None) -> None:
    inputs = [tensor.requires_grad_() for tensor in _tensors(2, 3, 7, 8)]

    def penalty(leaves: Sequence[Tensor], **options: Any) -> list[Tensor]:
        output = ch.attention(*leaves, mask=mask, **options)
        grads = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        return [*torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)]

    exact = penalty([tensor.detach().double().requires_grad_() for tensor in inputs], backend="reference")
    for own, true in zip(penalty(inputs), exact, strict=True):
        torch.testing.assert_close(own.double(), true, rtol=1e-4, atol=1e-4)


def test_vectorized_jacobian_equals_the_looped_one() -> None:
    query, key, value = _tensors(1, 2, 3, 4)
    of_query = partial(torch.autograd.functional.jacobian, lambda own: ch.attention(own, key, value), query)
    torch.testing.assert_close(of_query(vectorize=True), of_query(vectorize=False), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_stay_where_they_may_be_seen(bad: float) -> None:
    for _ in range(4):
        inputs = _tensors(2, 3, 17, 8)
        for tensor in inputs[1:]:
            tensor[0, 1, 16, 3] = bad
        written = _step(inputs, mask=ch.Causal(), query_offset=0, backend="native")
        for own, other in zip(_step(inputs, mask=ch.Causal()), written, strict=True):
            assert torch.equal(own.nan_to_num(7.0), other.nan_to_num(7.0))
        assert torch.isfinite(written[0][:, :, :16]).all()


def test_transforms_and_autocast_give_the_same_gradients() -> None:
    inputs = _tensors(2, 3, 17, 8)
    _same(inputs)
    query, key, value = inputs
    exact = _step(inputs, arrives="a sum's")[1]
    found = torch.func.grad(lambda own: ch.attention(own, key, value).sum())(query)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
    many = torch.func.vmap(ch.attention)(query[None], key[None], value[None])
    torch.testing.assert_close(many[0], ch.attention(query, key, value), rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _same(inputs)
        assert ch.attention(*inputs).dtype == torch.float32


class _Seen(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operator_of_backward() -> None:
    inputs = _tensors(2, 3, 17, 8)
    arrived = torch.randn(2, 3, 17, 8)
    _same(inputs)
    query, key, value = (tensor.requires_grad_() for tensor in inputs)
    plain = torch.autograd.grad(ch.attention(query, key, value), (query, key, value), arrived)
    output = ch.attention(query, key, value)
    with _Seen() as seen:
        found = torch.autograd.grad(output, (query, key, value), arrived)
    assert seen.count >= 1
    assert all(torch.equal(own, other) for own, other in zip(found, plain, strict=True))


def test_many_threads_train_at_once() -> None:
    inputs = [LAYOUTS["equal"]() for _ in range(8)]
    wanted = [_step(own, mask=ch.Causal(), query_offset=0, backend="native") for own in inputs]
    wrong: list[int] = []

    def work(which: int) -> None:
        for _ in range(200):
            found = _step(inputs[which], mask=ch.Causal())
            if not all(torch.equal(own, other) for own, other in zip(found, wanted[which], strict=True)):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (2, 2, 8, 8), (1, 1, 32, 2), (2, 4, 32, 16), (1, 1, 45, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_a_small_step_in_16_bits_is_as_exact_as_any(shape: tuple[int, ...], dtype: torch.dtype, causal: bool) -> None:
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
    for own, textbook, true in zip(ours, plain, exact, strict=True):
        assert own.dtype == dtype
        size = float(true.abs().max())
        allowed = 2 * float((textbook.double() - true).abs().max()) + torch.finfo(dtype).eps * size
        assert float((own.double() - true).abs().max()) <= allowed


def _textbook(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    return scores.softmax(dim=-1) @ value
