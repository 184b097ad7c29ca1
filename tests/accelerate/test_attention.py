"""``ch.accelerate`` and ``scaled_dot_product_attention``: torch's meaning to the letter, on clearhead's kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import clearhead as ch
from clearhead.integrations.aten import attention as ours
from clearhead.ops import library
from tests.budget import within_budget

pytestmark = pytest.mark.skipif(library.reason() is not None, reason="the CPU kernels are not available")

Calls = list[str]
FUSED = ["attend_with_lse", "attend_with_lse_backward"]


def take_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels take calls of every size on every processor."""
    monkeypatch.setattr(ours, "LEAST_WORK", 0)
    monkeypatch.setattr(ours, "LEAST_WORK_OF_TRAINING", 0)
    monkeypatch.setattr(ours, "attention_gains_alone", lambda *sizes, **options: True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """What the kernels computed; every size is large enough for them."""
    made: Calls = []
    take_all(monkeypatch)

    def counted(name: str) -> None:
        real = getattr(ours, name)
        monkeypatch.setattr(ours, name, lambda *given, **options: (made.append(name), real(*given, **options))[1])

    counted("attend_with_lse")
    counted("attend_with_lse_backward")
    return made


def results(inputs: tuple[Tensor, ...], grad: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    """Output and gradients of query, key and value."""
    leaves = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in inputs]
    output = scaled_dot_product_attention(*leaves, **options)
    output.backward(torch.ones_like(output) if grad is None else grad)
    return output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)


MASKS = ("none", "causal", "bool", "empty rows", "bias", "half infinite", "keys", "heads")


def mask_of(name: str, batch: int, heads: int, q_len: int, k_len: int, dtype: torch.dtype) -> dict[str, Any]:
    if name == "none":
        return {}
    if name == "causal":
        return {"is_causal": True}
    bias = torch.randn(batch, 1, q_len, k_len, dtype=dtype)
    if name == "bool":
        return {"attn_mask": (bias > -1.0).logical_or(torch.eye(q_len, k_len, dtype=torch.bool))}
    if name == "empty rows":
        allowed = bias > -1.0
        allowed[:, :, 1] = False
        return {"attn_mask": allowed}
    if name == "half infinite":
        return {"attn_mask": bias.masked_fill(bias < -1.0, -math.inf).index_fill(3, torch.tensor([0]), 0.5)}
    if name == "keys":
        return {"attn_mask": torch.ones(batch, 1, 1, k_len, dtype=torch.bool).index_fill_(3, torch.tensor([1]), False)}
    return {"attn_mask": bias[0, 0] if name == "bias" else torch.randn(batch, heads, q_len, k_len, dtype=dtype)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_output_and_gradients_are_torchs(calls: Calls, mask: str, dtype: torch.dtype) -> None:
    batch, heads, q_len, k_len, head_dim = 2, 4, 37, 37 if mask == "causal" else 300, 24
    torch.manual_seed(MASKS.index(mask))
    query = torch.randn(batch, heads, q_len, head_dim)
    key, value = torch.randn(2, batch, heads, k_len, head_dim)
    grad = torch.randn(batch, heads, q_len, head_dim)
    inputs = tuple(tensor.to(dtype) for tensor in (query, key, value))
    options = mask_of(mask, batch, heads, q_len, k_len, dtype)
    exact_options = {
        name: one.double() if isinstance(one, Tensor) and one.is_floating_point() else one
        for name, one in options.items()
    }
    exact = results(tuple(tensor.double() for tensor in inputs), grad.to(dtype).double(), **exact_options)
    plain = results(inputs, grad.to(dtype), **options)
    with ch.accelerate():
        fast = results(inputs, grad.to(dtype), **options)
    assert calls == FUSED
    for name, one, textbook, right in zip(("output", "query", "key", "value"), fast, plain, exact, strict=True):
        within_budget(name, one, textbook, right, terms=k_len, size=4.0, dtype=dtype)


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (5, 9), (9, 5)])
def test_causal_counts_from_the_first_query_and_key(calls: Calls, q_len: int, k_len: int) -> None:
    query, key, value = torch.randn(1, 2, q_len, 8), torch.randn(1, 2, k_len, 8), torch.randn(1, 2, k_len, 8)
    plain = results((query, key, value), None, is_causal=True)
    with ch.accelerate():
        fast = results((query, key, value), None, is_causal=True)
    assert calls
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads(calls: Calls, kv_heads: int) -> None:
    query = torch.randn(2, 4, 33, 16)
    key, value = torch.randn(2, 2, kv_heads, 65, 16)
    plain = results((query, key, value), None, enable_gqa=True)
    with ch.accelerate():
        fast = results((query, key, value), None, enable_gqa=True)
    assert calls == FUSED
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 2, 0, 3), (2, 0, 1, 3)], ids=str)
def test_strides_are_torchs(calls: Calls, order: tuple[int, ...]) -> None:
    """Compiled programs assert the strides of an operator's results."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    sizes = [(2, 3, 40, 16)[axis] for axis in order]
    inverse = [order.index(axis) for axis in range(4)]
    query, key, value = (torch.randn(sizes).permute(inverse) for _ in range(3))
    plain = operator(query, key, value)
    with ch.accelerate():
        fast = operator(query, key, value)
        grads = back(torch.ones_like(fast[0]), query, key, value, *fast, 0.0, False)
    old = back(torch.ones_like(plain[0]), query, key, value, *plain, 0.0, False)
    assert calls == FUSED
    for one, other in zip((*fast, *grads), (*plain, *old), strict=True):
        assert one.shape == other.shape
        assert one.stride() == other.stride()
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


def test_log_sum_exp_is_torchs_in_empty_rows_too(calls: Calls) -> None:
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query = torch.randn(1, 2, 8, 16)
    bias = torch.zeros(8, 8).index_fill_(0, torch.tensor([3]), -math.inf)
    plain = operator(query, query, query, attn_mask=bias)
    with ch.accelerate():
        fast = operator(query, query, query, attn_mask=bias)
    torch.testing.assert_close(fast, plain)
    assert bool((fast[0][:, :, 3] == 0).all())


def test_leaving_restores_torchs_bits(calls: Calls) -> None:
    query = torch.randn(1, 2, 50, 16)
    before = results((query, query, query), None)
    with ch.accelerate():
        during = results((query, query, query), None)
    made = list(calls)
    after = results((query, query, query), None)
    assert calls == made == FUSED
    assert all(map(torch.equal, before, after))
    assert not all(map(torch.equal, before, during))


def test_forward_in_and_backward_out_of_the_context(calls: Calls) -> None:
    """Either kernel reads what the other saved."""
    query = torch.randn(1, 2, 50, 16, requires_grad=True)
    allowed = torch.rand(50, 50) > 0.5
    allowed[7] = False
    (right,) = torch.autograd.grad(scaled_dot_product_attention(query, query, query, attn_mask=allowed).sum(), query)
    with ch.accelerate():
        output = scaled_dot_product_attention(query, query, query, attn_mask=allowed)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), query)[0], right, atol=2e-5, rtol=2e-5)
    output = scaled_dot_product_attention(query, query, query, attn_mask=allowed)
    with ch.accelerate():
        torch.testing.assert_close(torch.autograd.grad(output.sum(), query)[0], right, atol=2e-5, rtol=2e-5)
    assert calls == FUSED


def test_nan_of_a_masked_key_reaches_no_output(calls: Calls) -> None:
    query, key, value = torch.randn(3, 1, 2, 20, 16)
    clean = scaled_dot_product_attention(query, key, value, is_causal=True)
    value[:, :, -1] = torch.nan
    with ch.accelerate():
        output = scaled_dot_product_attention(query, key, value, is_causal=True)
    assert calls
    torch.testing.assert_close(output[:, :, :-1], clean[:, :, :-1])
    assert bool(output[:, :, -1].isnan().all())


def weights_of(heads: int, length: int, p: float, **options: Any) -> tuple[Tensor, Tensor]:
    """The dropped weights by an identity as values, and the gradient of the values under ones."""
    query = torch.zeros(1, heads, length, length)
    value = torch.eye(length).expand(1, heads, length, length).clone().requires_grad_()
    output = scaled_dot_product_attention(query, query, value, dropout_p=p, **options)
    (grad,) = torch.autograd.grad(output.sum(), value)
    return output.detach(), grad


def test_dropout_has_torchs_distribution_and_seed(calls: Calls) -> None:
    heads, length, p = 8, 64, 0.25
    with ch.accelerate():
        torch.manual_seed(3)
        output, grad = weights_of(heads, length, p)
        other, _ = weights_of(heads, length, p)
        torch.manual_seed(3)
        same, _ = weights_of(heads, length, p)
    scaled = output * length * (1 - p)
    assert bool(((scaled.abs() < 1e-5) | ((scaled - 1.0).abs() < 1e-5)).all())
    deviation = math.sqrt(p * (1 - p) / scaled.numel())
    assert abs(float(scaled.mean()) - (1 - p)) < 5 * deviation
    torch.testing.assert_close(grad, output.sum(dim=2, keepdim=True).transpose(2, 3).expand_as(grad))
    assert torch.equal(output, same)
    assert not torch.equal(output, other)


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_gradient_of_a_learned_mask(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    take_all(monkeypatch)
    query, key, value = torch.randn(3, 2, 4, 20, 16)
    bias = torch.randn(1, 4, 20, 20, requires_grad=True)
    with ch.accelerate():
        torch.manual_seed(0)
        output = scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=p)
        (grad,) = torch.autograd.grad(output.square().sum(), bias)
    if p == 0.0:
        plain = scaled_dot_product_attention(query, key, value, attn_mask=bias)
        (right,) = torch.autograd.grad(plain.square().sum(), bias)
        torch.testing.assert_close(grad, right, atol=2e-5, rtol=2e-5)
    assert grad.shape == bias.shape
    assert bool(grad.isfinite().all())
    assert bool((grad != 0).any())


@pytest.mark.parametrize("shape", [(4, 33, 16), (2, 4, 33, 16)])
@pytest.mark.parametrize("value_dim", [16, 24])
def test_calls_of_the_unfused_operator(shape: tuple[int, ...], value_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three axes, or heads of two widths, which torch's fused kernel refuses."""
    take_all(monkeypatch)
    query, key = torch.randn(2, *shape)
    value = torch.randn(*shape[:-1], value_dim)
    for options in ({}, {"is_causal": True}, {"attn_mask": torch.rand(33, 33) > 0.3}):
        plain = results((query, key, value), None, **options)
        with ch.accelerate():
            fast = results((query, key, value), None, **options)
        for one, other in zip(fast, plain, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


def test_unfused_kernel_that_the_user_asks_for_stays_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    take_all(monkeypatch)
    query = torch.randn(1, 2, 40, 16)
    with sdpa_kernel(SDPBackend.MATH):
        plain = results((query, query, query), None)
        with ch.accelerate():
            fast = results((query, query, query), None)
    assert all(map(torch.equal, plain, fast))


def test_float64_small_calls_and_double_backward_are_torchs() -> None:
    small, wide = torch.randn(1, 2, 4, 8), torch.randn(1, 4, 256, 64, dtype=torch.float64)
    for tensor in (small, wide):
        plain = results((tensor, tensor, tensor), None)
        with ch.accelerate():
            fast = results((tensor, tensor, tensor), None)
        assert all(map(torch.equal, plain, fast))
    query = torch.randn(1, 1, 5, 4, dtype=torch.float64, requires_grad=True)
    with ch.accelerate(), sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(lambda x: scaled_dot_product_attention(x, x, x), (query,))


WRONG: tuple[tuple[tuple[tuple[int, ...], ...], dict[str, Any]], ...] = (
    (((2, 4, 200, 64), (2, 4, 200, 32), (2, 4, 200, 64)), {}),
    (((2, 4, 200, 64), (2, 3, 200, 64), (2, 3, 200, 64)), {}),
    (((2, 4, 200, 64), (3, 4, 200, 64), (3, 4, 200, 64)), {}),
    (((2, 4, 200, 64), (2, 4, 100, 64), (2, 4, 200, 64)), {}),
    (((2, 4, 200, 64),) * 3, {"is_causal": True, "attn_mask": torch.ones(200, 200, dtype=torch.bool)}),
    (((2, 4, 200, 64),) * 3, {"attn_mask": torch.ones(200, 100, dtype=torch.bool)}),
    (((2, 4, 200, 64),) * 3, {"attn_mask": torch.zeros(200, 200, dtype=torch.int64)}),
    (((2, 4, 200, 64),) * 3, {"attn_mask": torch.zeros(200, 200, dtype=torch.float64)}),
    (((2, 4, 200, 64),) * 3, {"dropout_p": 1.5}),
    (((2, 4, 200, 64),) * 3, {"dropout_p": -0.5}),
    (((200, 64), (100, 64), (200, 64)), {}),
    (((64,), (64,), (64,)), {}),
)


@pytest.mark.parametrize(("shapes", "options"), WRONG, ids=range(len(WRONG)))
def test_errors_are_torchs(shapes: tuple[tuple[int, ...], ...], options: dict[str, Any]) -> None:
    inputs = [torch.randn(shape) for shape in shapes]

    def outcome() -> object:
        torch.manual_seed(0)
        try:
            return tuple(scaled_dot_product_attention(*inputs, **options).shape)
        except Exception as error:
            return type(error), str(error)

    plain = outcome()
    with ch.accelerate():
        assert outcome() == plain


@pytest.mark.covering(0)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_in_compiled_graphs(calls: Calls, options: dict[str, Any]) -> None:
    query = torch.randn(1, 2, 40, 16, requires_grad=True)

    def loss(query: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, query, query, **options).square().sum()

    (right,) = torch.autograd.grad(loss(query), query)
    with ch.accelerate():
        (grad,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(query), query)
    assert calls == FUSED
    torch.testing.assert_close(grad, right, atol=2e-5, rtol=2e-5)


def test_under_vmap_and_grad_of_torch_func(calls: Calls) -> None:
    inputs = torch.randn(3, 2, 2, 20, 16)

    def loss(query: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, query, query).square().sum()

    right = torch.func.vmap(torch.func.grad(loss))(inputs)
    with ch.accelerate():
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(inputs), right, atol=2e-5, rtol=2e-5)


def test_autocast_computes_in_bfloat16(calls: Calls) -> None:
    query = torch.randn(1, 2, 40, 16)
    with ch.accelerate(), torch.autocast("cpu", torch.bfloat16):
        output = scaled_dot_product_attention(query, query, query)
    assert calls == FUSED[:1]
    assert output.dtype is torch.bfloat16
