"""The specification against NumPy, for every mask and rule, and against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import clearhead as ch
from tests.oracle import attend
from tests.problems import MASKS, RULES, NamedMask, NamedRule, tensors

EVERYTHING = ch.Want(
    lse=True, max_score=True, entropy=True, top_k=3, received=True, heatmap=4, sink=2, distance=True, rows=[0, 5]
)


def _arrays(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def _both(mask: NamedMask, rule: NamedRule) -> tuple[ch.Observation, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    query, key, value = tensors(dtype=torch.float64)
    observation = ch.observe_attention(
        query, key, value, mask=mask.mask, scores=rule.rules, want=EVERYTHING, backend="reference"
    )
    exact = attend(
        _arrays(query),
        _arrays(key),
        _arrays(value),
        allowed=mask.plain,
        rules=rule.plain,
        sink=None if rule.sink is None else _arrays(rule.sink),
    )
    return observation, exact


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_reference_is_the_formula(mask: NamedMask, rule: NamedRule) -> None:
    observation, (output, weights, lse) = _both(mask, rule)
    np.testing.assert_allclose(_arrays(observation.output), output, atol=1e-12)
    np.testing.assert_allclose(_arrays(observation.lse), lse, atol=1e-12)
    np.testing.assert_allclose(_arrays(observation.rows), weights[:, :, [0, 5]], atol=1e-12)


@pytest.mark.parametrize("name", ["none", "causal", "padding to nothing", "dense"])
def test_statistics_are_sums_over_the_weights(name: str) -> None:
    observation, (_, weights, _) = _both(MASKS[name], RULES["alibi"])
    positions = np.arange(weights.shape[-1])
    distance = np.abs(positions[:, None] - positions[None, :])
    logs = np.where(weights > 0, np.log(np.where(weights > 0, weights, 1.0)), 0.0)
    np.testing.assert_allclose(_arrays(observation.entropy), -(weights * logs).sum(-1), atol=1e-12)
    np.testing.assert_allclose(_arrays(observation.received), weights.sum(-2), atol=1e-12)
    np.testing.assert_allclose(_arrays(observation.sink), weights[..., :2].sum(-1), atol=1e-12)
    np.testing.assert_allclose(_arrays(observation.distance), (weights * distance).sum(-1), atol=1e-12)
    ordered = -np.sort(-weights, axis=-1)
    np.testing.assert_allclose(_arrays(observation.top_weights), ordered[..., :3], atol=1e-12)
    chosen = np.take_along_axis(weights, observation.top_indices.numpy(), axis=-1)
    np.testing.assert_allclose(chosen, ordered[..., :3], atol=1e-12)
    corner = weights[:, :, 4:8, 8:12]
    np.testing.assert_allclose(_arrays(observation.heatmap_max)[:, :, 1, 2], corner.max((-2, -1)), atol=1e-12)
    np.testing.assert_allclose(_arrays(observation.heatmap_mean)[:, :, 1, 2], corner.mean((-2, -1)), atol=1e-12)
    corner = weights[:, :, 12:, 12:]
    np.testing.assert_allclose(_arrays(observation.heatmap_mean)[:, :, 3, 3], corner.mean((-2, -1)), atol=1e-12)


def test_row_weights_are_weighted_column_sums() -> None:
    query, key, value = tensors(dtype=torch.float64)
    rows = torch.rand(2, 4, 3, 13, dtype=torch.float64)
    observation = ch.observe_attention(
        query, key, value, want=ch.Want(row_weights=rows, rows=range(13)), backend="reference"
    )
    torch.testing.assert_close(observation.row_weights, rows @ observation.rows)


def test_ties_go_to_the_lower_index() -> None:
    zero = torch.zeros(1, 4)
    observation = ch.observe_attention(
        zero, torch.zeros(5, 4), torch.ones(5, 4), want=ch.Want(top_k=3), backend="reference"
    )
    assert observation.top_indices.tolist() == [[0, 1, 2]]


def test_two_tokens_by_hand() -> None:
    query = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    key = torch.tensor([[0.0], [math.log(3.0)]], dtype=torch.float64)
    value = torch.tensor([[4.0], [8.0]], dtype=torch.float64)
    observation = ch.observe_attention(query, key, value, want=ch.Want(lse=True, rows=[0, 1]), backend="reference")
    # exp(0) : exp(ln 3) = 1 : 3, and 1 : 9 for the query twice as long.
    torch.testing.assert_close(observation.rows, torch.tensor([[0.25, 0.75], [0.1, 0.9]], dtype=torch.float64))
    torch.testing.assert_close(observation.output, torch.tensor([[7.0], [7.6]], dtype=torch.float64))
    torch.testing.assert_close(observation.lse, torch.tensor([4.0, 10.0], dtype=torch.float64).log())


def test_gradients_are_right_in_float64() -> None:
    query, key, value = tensors(dtype=torch.float64, batch=1, heads=2, kv_heads=1, q_len=4, k_len=4, head_dim=3)
    table = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(query: Tensor, key: Tensor, value: Tensor, table: Tensor, logits: Tensor) -> Tensor:
        rules = (ch.RelativeBias(table), ch.SoftCap(2.0), ch.Sink(logits))
        return ch.attention(query, key, value, mask=ch.Causal(), scores=rules, backend="reference")

    assert torch.autograd.gradcheck(run, (query, key, value, table, logits))


def test_statistics_have_their_gradients_in_float64() -> None:
    """Under a mask with an empty row, a sink, a soft-cap and a learned bias."""
    query, key, value = tensors(dtype=torch.float64, batch=1, heads=2, kv_heads=1, q_len=4, k_len=4, head_dim=3)
    table = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(2, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(1, 1, 2, 4, dtype=torch.float64, requires_grad=True)
    names = ("max_score", "entropy", "received", "row_weights", "sink", "distance", "rows")

    def run(query: Tensor, key: Tensor, table: Tensor, logits: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        want = ch.Want(
            lse=True, max_score=True, entropy=True, received=True, row_weights=rows, sink=2, distance=True, rows=[1, 3]
        )
        observation = ch.observe_attention(
            query,
            key,
            value,
            want=want,
            mask=~ch.Causal() | ch.Window(0) & ch.Prefix(2),
            backend="reference",
            scores=(ch.RelativeBias(table), ch.SoftCap(2.0), ch.Sink(logits)),
        )
        # The empty row's largest score is -inf, which finite differences cannot subtract.
        return observation.lse, *(
            getattr(observation, name).masked_fill(getattr(observation, name) == -torch.inf, 0.0) for name in names
        )

    assert torch.autograd.gradcheck(run, (query, key, table, logits, rows))


def test_gradients_stay_finite_where_weights_are_zero() -> None:
    """Empty rows by mask and by a bias of -inf, and weights that underflow."""
    query, key, value = tensors(size=40.0)
    bias = torch.zeros(13, 13)
    bias[4] = -torch.inf
    want = ch.Want(lse=True, max_score=True, entropy=True, received=True, sink=3, distance=True)
    mask = ch.Causal() & ch.Dense(torch.arange(13)[:, None] != 7)
    observation = ch.observe_attention(
        query, key, value, want=want, mask=mask, scores=ch.DenseBias(bias), backend="reference"
    )
    assert bool((observation.entropy[:, :, [4, 7]] == 0).all())
    assert bool((observation.max_score[:, :, [4, 7]] == -torch.inf).all())
    for name in want.names:
        statistic = getattr(observation, name)
        grads = torch.autograd.grad(statistic.sum(), (query, key), retain_graph=True)
        assert all(torch.isfinite(grad).all() for grad in grads), name
        assert bool((grads[0][:, :, [4, 7]] == 0).all()), name


def test_a_nan_row_leaves_forbidden_keys_at_zero() -> None:
    query, key, value = (tensor.detach() for tensor in tensors())
    query[0, 0, 3] = torch.nan
    observation = ch.observe_attention(
        query, key, value, want=ch.Want(received=True, rows=[3], top_k=6), mask=ch.Causal(), backend="reference"
    )
    assert observation.rows[0, 0, 0, :4].isnan().all()
    assert bool((observation.rows[0, 0, 0, 4:] == 0).all())
    assert observation.received[0, 0].isnan().tolist() == [True] * 4 + [False] * 9
    assert observation.top_indices[0, 0, 3].tolist() == [0, 1, 2, 3, 4, 5]


def test_statistics_by_hand() -> None:
    """Weights 1/4 and 3/4, with a sink that takes half of both."""
    query, key = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[0.0], [math.log(3.0)]], dtype=torch.float64)
    want = ch.Want(
        lse=True,
        max_score=True,
        entropy=True,
        top_k=2,
        received=True,
        heatmap=2,
        sink=1,
        distance=True,
        row_weights=torch.full((1, 1, 1, 1), 2.0),
    )
    observation = ch.observe_attention(
        query, key, key, want=want, scores=ch.Sink(torch.tensor([math.log(4.0)])), query_offset=3, backend="reference"
    )
    weights = [0.125, 0.375]
    expected = {
        "lse": [math.log(8.0)],
        "max_score": [math.log(3.0)],
        "entropy": [-sum(weight * math.log(weight) for weight in weights)],
        "top_weights": [weights[::-1]],
        "received": weights,
        "row_weights": [[0.25, 0.75]],
        "heatmap_max": [[0.375]],
        "heatmap_mean": [[0.25]],
        "sink": [0.125],
        "distance": [0.125 * 3 + 0.375 * 2],
    }
    for name, numbers in expected.items():
        values = getattr(observation, name)
        torch.testing.assert_close(values, torch.tensor(numbers, dtype=values.dtype), rtol=1e-6, atol=1e-6, msg=name)
    assert observation.top_indices.tolist() == [[1, 0]]
