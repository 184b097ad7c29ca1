"""A call played back is the call itself: same bits, same errors, and never where more than the layout matters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.backends import native_replay, sdpa
from tests.agreement import needs_native

pytestmark = needs_native


def _tensors(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(shape) for _ in range(3))
    return query, key, value


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_replay, "_plans", {})


@pytest.mark.parametrize("mask", [None, ch.Causal()], ids=repr)
def test_played_back_on_other_numbers(mask: ch.Mask | None) -> None:
    ch.attention(*_tensors(2, 3, 17, 8), mask=mask)
    assert native_replay._plans
    for _ in range(3):
        inputs = _tensors(2, 3, 17, 8)
        again = native_replay.replay(*inputs, causal=mask is not None)
        assert again is not None
        whole = ch.attention(*inputs, mask=mask, scale=8**-0.5, backend="native")
        assert torch.equal(again, whole)
        assert torch.equal(ch.attention(*inputs, mask=mask), whole)


def test_another_layout_is_another_call() -> None:
    query, key, value = _tensors(2, 3, 17, 8)
    ch.attention(query, key, value)
    assert native_replay.replay(query, key, value, causal=True) is None
    assert native_replay.replay(query[:1], key[:1], value[:1], causal=False) is None
    side_by_side = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert native_replay.replay(side_by_side, key, value, causal=False) is None
    first = ch.attention(side_by_side, key, value)
    assert first.stride() == side_by_side.stride()
    assert torch.equal(ch.attention(side_by_side, key, value), first)
    with pytest.raises(ch.ShapeError, match="head_dim"):
        ch.attention(query, key[..., :4], value)


def test_not_where_more_than_the_layout_matters() -> None:
    query, key, value = _tensors(2, 3, 17, 8)
    ch.attention(query, key, value)
    learned = query.clone().requires_grad_()
    assert native_replay.replay(learned, key, value, causal=False) is None
    assert ch.attention(learned, key, value).requires_grad
    with torch.no_grad():
        assert native_replay.replay(learned, key, value, causal=False) is not None

    class Own(Tensor):
        pass

    assert native_replay.replay(query.as_subclass(Own), key, value, causal=False) is None
    turned = query.transpose(2, 3).contiguous().transpose(2, 3)
    ch.attention(turned, key, value)
    assert native_replay.replay(turned, key, value, causal=False) is None


def test_threads_that_call_at_once_do_not_share_a_description() -> None:
    query, key, value = _tensors(1, 1, 4, 8)
    ch.attention(query, key, value)
    (waiting,) = native_replay._plans.values()
    taken = waiting.pop()
    assert native_replay.replay(query, key, value, causal=False) is None
    ch.attention(query, key, value)
    waiting.append(taken)
    assert len(waiting) == 2


def test_layouts_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_replay, "_MOST", 3)
    for length in range(1, 9):
        ch.attention(*_tensors(1, 1, length, 8))
        assert len(native_replay._plans) <= 3


def test_a_small_step_is_torchs_own() -> None:
    query, key, value = (tensor.requires_grad_() for tensor in _tensors(2, 3, 17, 8))
    output = sdpa.small_step(query, key, value, causal=False)
    assert output is not None
    assert torch.equal(output, torch.nn.functional.scaled_dot_product_attention(query, key, value))
    assert sdpa.small_step(query, key[:, :1], value[:, :1], causal=False) is None
    assert sdpa.small_step(*(tensor.detach() for tensor in (query, key, value)), causal=False) is None
    assert sdpa.small_step(*(tensor.double() for tensor in (query, key, value)), causal=False) is None
    large = torch.randn(1, 8, 256, 64, requires_grad=True)
    assert sdpa.small_step(large, large, large, causal=False) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sdpa.small_step(query, key, value, causal=False) is None
        assert ch.attention(query, key, value).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (2, 2, 8, 8), (1, 1, 32, 2), (2, 4, 32, 16), (1, 1, 45, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_a_small_step_in_16_bits_is_as_exact_as_any(
    shape: tuple[int, ...], dtype: torch.dtype, causal: bool
) -> None:  # fmt: skip
    """Gradients included: within twice the error of the formula computed in the same dtype."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]

    def step(call: Callable[..., Tensor | None], dtype: torch.dtype) -> list[Tensor]:
        inputs = [part.to(dtype).requires_grad_() for part in drawn[:3]]
        output = call(*inputs)
        assert output is not None
        return [output.detach(), *torch.autograd.grad(output, inputs, drawn[3].to(dtype))]

    mask = ch.Causal() if causal else None
    exact = step(lambda *given: ch.attention(*given, mask=mask, backend="reference"), torch.float64)
    ours = step(lambda *given: sdpa.small_step(*given, causal=causal), dtype)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_small_causal_step_spreads_no_nan(dtype: torch.dtype) -> None:
    # Where other draws round an output above 2 apart, one place of bfloat16 is more than is allowed.
    torch.manual_seed(0)
    inputs = [tensor.to(dtype).requires_grad_() for tensor in _tensors(2, 3, 17, 8)]
    output = sdpa.small_step(*inputs, causal=True)
    assert output is not None
    other = ch.attention(*inputs, mask=ch.Causal(), backend="native")
    torch.testing.assert_close(output, other, rtol=0, atol=2e-6 if dtype == torch.float32 else 2**-7)
    with torch.no_grad():
        inputs[2][0, 0, 16, 3] = torch.nan
    assert sdpa.small_step(*inputs, causal=True) is None
    assert torch.isfinite(ch.attention(*inputs, mask=ch.Causal())[:, :, :16]).all()
