"""Regression tests for bugs that the fuzzer found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import clearhead as ch
from tests.agreement import needs_native
from tests.fuzz.check import HERE


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("backend", HERE)
def test_nonpositive_scale_under_a_causal_mask(backend: str, scale: float) -> None:
    """torch's CPU kernel scales after masking, so -inf times such a scale is inf or NaN; ``sdpa`` returned it."""
    query = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    if ch.explain_dispatch(query, query, query, mask=ch.Causal(), scale=scale).reasons[backend]:
        return
    output = ch.attention(query, query, query, mask=ch.Causal(), scale=scale, backend=backend)
    exact = ch.attention(*[query.double()] * 3, mask=ch.Causal(), scale=scale, backend="reference")
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", HERE)
def test_packed_batch_of_padding_only(backend: str) -> None:
    """``sdpa`` returned zeros without a gradient function, so a loss could not be differentiated."""
    query, key, value = (torch.full((1, 2, 3, 8), torch.nan).requires_grad_() for _ in range(3))
    mask = ch.Documents(ids=torch.full((1, 3), -1))
    if ch.explain_dispatch(query, key, value, mask=mask).reasons[backend]:
        query, key, value = (torch.ones(1, 2, 3, 8).requires_grad_() for _ in range(3))
        if ch.explain_dispatch(query, key, value, mask=mask).reasons[backend]:
            return
    output = ch.attention(query, key, value, mask=mask, backend=backend)
    assert not output.any()
    for grad in torch.autograd.grad(output, (query, key, value), torch.ones_like(output)):
        assert not grad.any()


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_query_with_one_key_has_no_gradient(dtype: torch.dtype) -> None:
    """Its weight is always 1. ``native`` gave gradients of 5e-6, because backward rounded differently from forward."""
    generator = torch.Generator().manual_seed(0)
    bias = ch.DenseBias(torch.tensor([[[[-0.6391]]]]))
    options: dict[str, Any] = {
        "scale": 1.0,
        "mask": ch.Dense(torch.ones(1, 3, 1, 1, dtype=torch.bool)),
        "scores": [bias, bias],
    }
    for _ in range(50):
        query, key, value = (torch.randn(1, heads, 1, 16, generator=generator).to(dtype) for heads in (3, 1, 1))
        query.requires_grad_()
        key.requires_grad_()
        output = ch.attention(query, key, value, **options, backend="native")
        for grad in torch.autograd.grad(output, (query, key), torch.randn(output.shape, generator=generator).to(dtype)):
            assert float(grad.abs().max()) <= 4e-7
