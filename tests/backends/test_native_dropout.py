"""Dropout in the CPU kernels: share, independence, and the weights of the specification, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.backends.dropout import keep_mask
from clearhead.masks.base import index_tensors
from tests.agreement import compare, draw, needs_native, results
from tests.problems import MASKS, RULES, tensors

pytestmark = needs_native


def kept_by_the_kernels(
    p: float,
    seed: int,
    *,
    batch: int = 2,
    heads: int = 3,
    q_len: int = 200,
    k_len: int = 250,
    query_offset: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Dropped weights, observed in the output: all scores are equal, and each key has one value channel."""
    query, key = torch.zeros(batch, heads, q_len, 4, dtype=dtype), torch.zeros(batch, heads, k_len, 4, dtype=dtype)
    value = torch.eye(k_len, dtype=dtype).expand(batch, heads, k_len, k_len)
    output = ch.attention(query, key, value, dropout=p, seed=seed, query_offset=query_offset, backend="native")
    right = torch.where(output != 0, 1.0 / (k_len * (1.0 - p)), 0.0)
    torch.testing.assert_close(output.float(), right, rtol=2.0 * torch.finfo(dtype).eps * 4, atol=0.0)
    return output != 0


class TestDropout:
    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_dropped_share_and_independence(self, p: float) -> None:
        mask = kept_by_the_kernels(p, seed=3).double()
        share, deviation = 1.0 - p, (p * (1.0 - p)) ** 0.5
        assert abs(mask.mean().item() - share) < 5.0 * deviation / mask.numel() ** 0.5
        # The number of a row's or a column's remaining weights is binomial: its variance, too, is known, and how far
        # off a sample of n variances may be, sqrt(2 / n).
        for sums, trials in ((mask.sum(-1), 250), (mask.sum(-2), 200)):
            expected = trials * deviation**2
            assert abs(sums.var().item() / expected - 1.0) < 5.0 * (2.0 / sums.numel()) ** 0.5
        pairs = [
            (mask[:, 0], mask[:, 1]),
            (mask[:, 1], mask[:, 2]),
            (mask[0], mask[1]),
            (mask[..., 1:], mask[..., :-1]),
            (mask[..., 4:], mask[..., :-4]),
            (mask[:, :, 1:], mask[:, :, :-1]),
            (mask[..., :200], mask[..., :200].mT),
        ]
        for one, other in pairs:
            correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].item()
            assert abs(correlation) < 5.0 / one.numel() ** 0.5

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("seed", [0, 5, 2**32, 2**40 + 3, 2**64 - 1])
    @pytest.mark.parametrize(
        "place", [{}, {"q_len": 1}, {"k_len": 33, "query_offset": 1000}, {"q_len": 97, "k_len": 5}], ids=str
    )
    def test_kernels_drop_the_weights_of_the_specification(
        self, seed: int, place: dict[str, int], dtype: torch.dtype
    ) -> None:
        sizes = {"batch": 2, "heads": 3, "q_len": 200, "k_len": 250, "query_offset": 0, **place}
        assert torch.equal(
            kept_by_the_kernels(0.3, seed, dtype=dtype, **sizes),
            keep_mask(seed, 0.3, *index_tensors(*sizes.values(), torch.device("cpu"))),
        )

    @pytest.mark.parametrize("p", [1e-12, 2.0**-32, 0.999, 1.0 - 2.0**-32, 1.0 - 2.0**-53])
    def test_probabilities_near_0_and_1(self, p: float) -> None:
        """At either end the threshold is the first or the last word, and no factor overflows."""
        inputs = tensors(q_len=70, k_len=90)
        actual, right = (results(inputs, name, dropout=p, seed=2) for name in ("native", "tiled"))
        for one, other in zip(actual, right, strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-4, atol=1e-5 * max(1.0, other[torch.isfinite(other)].abs().max().item())
            )

    @pytest.mark.parametrize("mask", ["none", "causal", "dense", "causal documents"])
    @pytest.mark.parametrize("rule", ["none", "relative, then cap", "sink"])
    def test_kernels_equal_the_formula(self, mask: str, rule: str) -> None:
        inputs = tensors(batch=1 if "documents" in mask else 2)
        compare("native", inputs, mask=MASKS[mask].mask, scores=RULES[rule].rules, dropout=0.4, seed=2**33 + 1)

    def test_backward_drops_what_forward_dropped(self) -> None:
        """The gradient of the output's sum, by a value, is the sum of the weights that reach it."""
        query, key = draw(2, 4, 150, 16), draw(2, 4, 230, 16, seed=1)
        eye = torch.eye(230).expand(2, 4, 230, 230).clone().requires_grad_()
        options: dict[str, Any] = {"dropout": 0.35, "seed": 2**35, "mask": ch.Causal(), "query_offset": 60}
        weights = ch.attention(query, key, eye, backend="native", **options)
        (grad,) = torch.autograd.grad(weights.sum(), eye)
        exact = ch.attention(query.double(), key.double(), eye.double(), backend="reference", **options)
        assert torch.equal(weights != 0, exact != 0)
        right = exact.sum(dim=2)[..., None].expand_as(grad)
        torch.testing.assert_close(grad.double(), right, rtol=1e-5, atol=1e-6)

    def test_the_mean_over_seeds_is_the_plain_output(self) -> None:
        query, key, value = (tensor.detach() for tensor in tensors(batch=1, q_len=4, k_len=40))
        runs = torch.stack([ch.attention(query, key, value, dropout=0.2, seed=s, backend="native") for s in range(600)])
        error = (runs.mean(0) - ch.attention(query, key, value, backend="native")).abs()
        assert bool((error <= 5.0 * runs.std(0) / 600**0.5 + 1e-6).all())
