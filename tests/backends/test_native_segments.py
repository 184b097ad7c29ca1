"""The CPU kernels on documents and padding: each segment is a separate attention."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import clearhead as ch
from tests.agreement import draw, needs_native

pytestmark = needs_native

LENGTHS = [37, 1, 130, 8, 64, 300, 90]
#: One of them longer than what a thread does in one piece.
LONG = [700, 20]
DTYPES = [torch.float32, torch.bfloat16]


def tensors(*sizes: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value, and what arrives at the output."""
    return [draw(*sizes, seed=seed, grad=False).to(dtype) for seed in (1, 2, 3, 4)]


def run(query: Tensor, key: Tensor, value: Tensor, arrived: Tensor, mask: ch.Mask | None) -> list[Tensor]:
    """Output and gradients."""
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    output = ch.attention(*inputs, mask=mask, backend="native")
    return [output.detach(), *torch.autograd.grad(output, inputs, arrived)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [LENGTHS, LONG], ids=["many", "long"])
@pytest.mark.parametrize("dim", [16, 32])
def test_packed_document_is_bitwise_equal_to_it_alone(
    lengths: list[int], causal: bool, dtype: torch.dtype, dim: int
) -> None:
    given = tensors(1, 4, sum(lengths), dim, dtype=dtype)
    documents, order = ch.Documents(lengths), ch.Causal()
    packed = run(*given, mask=documents & order if causal else documents)
    for part, start in zip(lengths, torch.tensor([0, *lengths]).cumsum(0).tolist(), strict=False):
        alone = run(*(tensor[:, :, start : start + part] for tensor in given), mask=order if causal else None)
        for one, whole in zip(alone, packed, strict=True):
            assert torch.equal(one, whole[:, :, start : start + part])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padded_sequence_is_bitwise_equal_to_it_alone(dtype: torch.dtype) -> None:
    lengths = [60, 33, 0, 1]
    given = tensors(4, 3, 60, 16, dtype=dtype)
    padded = run(*given, mask=ch.Padding(torch.tensor(lengths)))
    for b, length in enumerate(lengths):
        query, key, value, arrived = (tensor[b : b + 1] for tensor in given)
        if length == 0:
            assert all(not result[b].any() for result in padded)
            continue
        alone = run(query, key[:, :, :length], value[:, :, :length], arrived, mask=None)
        for one, whole in zip(alone, padded, strict=True):
            assert torch.equal(one, whole[b : b + 1, :, : one.shape[2]])
        assert not padded[2][b, :, length:].any()
        assert not padded[3][b, :, length:].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_nan_stays_in_its_document(bad: float, causal: bool) -> None:
    given = tensors(1, 2, 100, 16, dtype=torch.float32)
    mask: ch.Mask = ch.Documents([40, 60])
    mask = mask & ch.Causal() if causal else mask
    right = run(*given, mask=mask)
    for tensor in given[:3]:
        tensor[0, :, 50] = bad
    for one, whole in zip(run(*given, mask=mask), right, strict=True):
        assert torch.equal(one[:, :, :40], whole[:, :, :40])
        assert not one[:, :, 50].isfinite().any()


@pytest.mark.parametrize("k_len", [256, 257])
def test_float32_output_is_saved_for_many_keys_only(k_len: int) -> None:
    query, key, value = (draw(1, 2, length, 16, seed=length).bfloat16() for length in (30, k_len, k_len))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: [saved.append(each), each][1], lambda each: each):
        ch.attention(query, key, value, backend="native")
    exact = [each for each in saved if each.dtype is torch.float32 and each.shape == query.shape]
    assert len(exact) == (k_len > 256)


def test_backward_reports_nan_under_a_mask() -> None:
    """The operator's last result; its gradients are then of no use."""
    query, key, value, arrived = tensors(1, 2, 40, 16, dtype=torch.float32)
    _, softmax = torch.ops.clearhead.attention_forward(query, key, value, 0.25, 2, after=0)
    for bad, finite in ((0.0, True), (float("nan"), False), (float("inf"), False)):
        key[0, 1, 39, 3] = bad
        grads = torch.ops.clearhead.attention_gradients(arrived, query, key, value, softmax, None, 0.25, after=0)
        assert grads[1] is finite


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [0, 600])
def test_first_call_of_a_thread_without_keys_gives_zeros(keys: int, dtype: torch.dtype) -> None:
    """A new thread has no workspace yet, and queries without keys need none."""
    query, key, value, arrived = tensors(1, 2, 600, 16, dtype=dtype)
    mask = ch.Padding([0]) if keys else None
    with ThreadPoolExecutor(1) as fresh:
        results = fresh.submit(run, query, key[:, :, :keys], value[:, :, :keys], arrived, mask).result()
    assert all(not tensor.any() for tensor in results)
