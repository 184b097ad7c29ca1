"""What the fuzzer found, each under a name of its own."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from tests.fuzz.check import HERE


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@pytest.mark.parametrize("backend", HERE)
def test_a_scale_that_is_not_positive_under_a_causal_mask(backend: str, scale: float) -> None:
    """torch's CPU kernel scales after it has masked: -inf times such a scale is inf or NaN. ``sdpa`` passed it on."""
    query = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    if ch.explain_dispatch(query, query, query, mask=ch.Causal(), scale=scale).reasons[backend]:
        return
    found = ch.attention(query, query, query, mask=ch.Causal(), scale=scale, backend=backend)
    exact = ch.attention(*[query.double()] * 3, mask=ch.Causal(), scale=scale, backend="reference")
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
