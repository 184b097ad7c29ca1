"""The float64 recomputation: every mask and rule against the library and against a third computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.masks import Mask
from clearhead.observe import exact, explain
from clearhead.observe.exact import ScoreRow
from clearhead.scores import ScoreRule
from tests.oracle import attend

LENGTH = 7

MASKS: list[Mask] = [
    ch.Causal(),
    ch.Window(2, 1),
    ch.Prefix(3),
    ch.Global(2),
    ch.Strided(3),
    ch.Padding([5, 7]),
    ch.Documents(lengths=[3, 4]),
    ch.Documents(ids=torch.tensor([0, 1, 0, -1, 1, 1, 0])),
    ch.Blocks(torch.tensor([[True, False], [False, True]]), 4),
    ch.Dense(torch.rand(2, 3, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.5),
    ch.Dense(torch.rand(1, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.5),
    (ch.Causal() & ~ch.Window(1)) | ch.Prefix(1),
    ch.MaskFunction(lambda batch, head, q_pos, k_pos: (q_pos + k_pos + head) % 2 == 0),
]

RULES: list[ScoreRule] = [
    ch.Alibi(3),
    ch.RelativeBias(torch.randn(3, 5, generator=torch.Generator().manual_seed(2)).double()),
    ch.SoftCap(1.5),
    ch.DenseBias(torch.randn(3, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)).double()),
    ch.ScoreFunction(lambda score, batch, head, q_pos, k_pos: score * (1.0 + 0.1 * (q_pos - k_pos))),
]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_every_mask_allows_what_the_library_allows(mask: Mask) -> None:
    dense = mask.dense(LENGTH, LENGTH, batch=2, num_heads=3)
    dense = dense.expand(2, 3, LENGTH, LENGTH)
    for batch, head, query in np.ndindex(2, 3, LENGTH):
        allowed = exact.allowed(mask, ScoreRow(batch, head, query, LENGTH))
        assert allowed.tolist() == dense[batch, head, query].tolist()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_every_rule_gives_the_scores_of_the_library(rule: ScoreRule) -> None:
    scores = torch.randn(2, 3, LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    place = torch.arange(LENGTH)
    whole = rule.apply(
        scores, torch.arange(2).view(-1, 1, 1, 1), torch.arange(3).view(1, -1, 1, 1), place.view(-1, 1), place
    )
    for batch, head, query in np.ndindex(2, 3, LENGTH):
        row = exact.ruled(scores[batch, head, query].numpy(), rule, ScoreRow(batch, head, query, LENGTH))
        np.testing.assert_allclose(row, whole[batch, head, query].numpy(), rtol=1e-13, atol=1e-13)


def test_formula_agrees_with_a_third_computation() -> None:
    generator = torch.Generator().manual_seed(5)
    query, key, value = (
        torch.randn(2, heads, LENGTH, 4, dtype=torch.float64, generator=generator) for heads in (6, 3, 3)
    )
    sink = torch.randn(6, dtype=torch.float64, generator=generator)
    output, weights, _ = attend(
        query.numpy(),
        key.numpy(),
        value.numpy(),
        allowed=lambda b, h, i, j: j <= i,
        sink=sink.numpy(),
        rules=(lambda s, b, h, i, j: 2.0 * np.tanh(s / 2.0),),
    )
    explanation = explain(
        query, key, value, token=4, head=5, batch=1, mask=ch.Causal(), scores=[ch.SoftCap(2.0), ch.Sink(sink)]
    )
    np.testing.assert_allclose(explanation.step("softmax").exact.numpy(), weights[1, 5, 4], rtol=0, atol=1e-14)
    np.testing.assert_allclose(explanation.step("weighted sum").exact.numpy(), output[1, 5, 4], rtol=0, atol=1e-14)
    assert explanation.difference < 1e-14


def test_rotation_matches_its_definition_pair_by_pair() -> None:
    x = np.random.default_rng(0).standard_normal((3, 6))
    rotated = exact.rotated(x, np.array([0, 1, 50]), base=100.0)
    for row, position in enumerate((0, 1, 50)):
        for pair in range(3):
            angle = position * 100.0 ** (-2 * pair / 6)
            left, right = x[row, pair], x[row, pair + 3]
            assert rotated[row, pair] == pytest.approx(left * np.cos(angle) - right * np.sin(angle), abs=1e-13)
            assert rotated[row, pair + 3] == pytest.approx(right * np.cos(angle) + left * np.sin(angle), abs=1e-13)


def test_masked_nan_value_has_no_effect() -> None:
    values = np.array([[1.0], [np.nan]])
    assert exact.weighted_sum(np.array([1.0, 0.0]), values, np.array([True, False])).tolist() == [1.0]
