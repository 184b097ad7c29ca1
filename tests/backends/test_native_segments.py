"""The CPU kernels on documents and padding: each segment an attention of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.backends.native_work import BackwardWork, ForwardWork
from clearhead.problem import Problem
from clearhead.statistics import Want
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
def test_a_packed_document_has_the_bits_it_has_alone(
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
def test_a_padded_sequence_has_the_bits_it_has_alone(dtype: torch.dtype) -> None:
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
def test_what_is_not_finite_stays_in_its_document(bad: float, causal: bool) -> None:
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
def test_the_exact_output_is_kept_only_where_keys_are_many(k_len: int) -> None:
    query, key, value = (draw(1, 2, length, 16, seed=length, grad=False).bfloat16() for length in (30, k_len, k_len))
    work = ForwardWork(Problem.of("attention", query, key, value), Want(), for_backward=True)
    assert work.rows is not None
    assert (work.rows.output is None) == (k_len <= 256)


def test_nothing_is_written_where_a_band_meets_what_is_not_finite() -> None:
    query, key, value, arrived = tensors(1, 2, 100, 16, dtype=torch.float32)
    key[0, 0, 90] = torch.nan
    problem = Problem.of("attention", query, key, value, mask=ch.Documents([10, 40, 50]) & ch.Causal())
    forward = ForwardWork(problem, Want(), for_backward=True)
    forward.run()
    assert forward.rows is not None
    into = [torch.full_like(tensor, 7.0) for tensor in (query, key, value)]
    assert not BackwardWork(problem, forward.rows, arrived, into=into).run()
    assert all(bool((tensor == 7.0).all()) for tensor in into)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [0, 600])
def test_a_thread_that_was_never_asked_before_sees_nothing_at_first(keys: int, dtype: torch.dtype) -> None:
    """What a thread keeps between calls is not there yet, and such queries need none of it."""
    query, key, value, arrived = tensors(1, 2, 600, 16, dtype=dtype)
    mask = ch.Padding([0]) if keys else None
    with ThreadPoolExecutor(1) as fresh:
        found = fresh.submit(run, query, key[:, :, :keys], value[:, :, :keys], arrived, mask).result()
    assert all(not tensor.any() for tensor in found)
