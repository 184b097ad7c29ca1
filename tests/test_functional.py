"""The public functions: shapes of inputs and outputs, and wrong input as one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.problem import Problem
from tests.problems import tensors


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_leading_axes_are_those_of_query(axes: int) -> None:
    query, key, value = tensors(batch=1, heads=1 if axes == 2 else 4, kv_heads=1 if axes == 2 else 2)
    cut = [tensor[0] if axes < 4 else tensor for tensor in (query, key, value)]
    cut = [tensor[0] if axes == 2 else tensor for tensor in cut]
    output = ch.attention(*cut)
    assert output.shape == (*cut[0].shape[:-1], 6)
    whole = ch.attention(query, key, value)
    torch.testing.assert_close(output.reshape(whole.shape), whole)
    observation = ch.observe_attention(*cut, want=ch.Want(lse=True, received=True))
    assert observation.lse.shape == cut[0].shape[:-1]
    assert observation.received.shape == (*cut[0].shape[:-2], 13)


def test_grouped_heads_read_their_group() -> None:
    query, key, value = tensors(heads=6, kv_heads=2)
    output = ch.attention(query, key, value)
    for head in range(6):
        alone = ch.attention(query[:, head : head + 1], key[:, head // 3, None], value[:, head // 3, None])
        torch.testing.assert_close(output[:, head : head + 1], alone)


def test_split_and_merged_equals_whole() -> None:
    """Parts of the keys, joined by their log-sum-exp."""
    query, key, value = tensors(dtype=torch.float64)
    parts = [
        ch.observe_attention(query, key[:, :, cut], value[:, :, cut], want=ch.Want(lse=True))
        for cut in (slice(0, 5), slice(5, 13))
    ]
    shares = torch.stack([part.lse for part in parts]).softmax(dim=0)
    merged = sum(share[..., None] * part.output for share, part in zip(shares, parts, strict=True))
    torch.testing.assert_close(merged, ch.attention(query, key, value))


def test_order_of_keys_and_constant_scores_change_nothing() -> None:
    query, key, value = tensors(dtype=torch.float64)
    order = torch.randperm(13)
    plain = ch.attention(query, key, value)
    torch.testing.assert_close(ch.attention(query, key[:, :, order], value[:, :, order]), plain)
    shifted = ch.attention(query, key, value, scores=ch.ScoreFunction(lambda s, b, h, i, j: s + 5.0))
    torch.testing.assert_close(shifted, plain)


def test_rules_act_in_the_order_given() -> None:
    inputs = tensors()
    cap, bias = ch.SoftCap(1.0), ch.DenseBias(3 * torch.randn(13, 13))
    one, other = (ch.attention(*inputs, scores=rules) for rules in ((cap, bias), (bias, cap)))
    assert not torch.allclose(one, other, atol=1e-3)


def q(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


BAD = [
    ((q(4), q(4), q(4)), {}, ch.ShapeError, "attention: query must have axes [batch, heads, len, head_dim]"),
    ((q(2, 3, 4), q(3, 4), q(3, 4)), {}, ch.ShapeError, "key must have as many axes as query (3)"),
    ((q(3, 4), q(3, 5), q(3, 5)), {}, ch.ShapeError, "key must have query's head_dim 4; got shape (1, 1, 3, 5)"),
    ((q(3, 4), q(5, 4), q(3, 4)), {}, ch.ShapeError, "value must have key's heads and length (1, 5)"),
    ((q(2, 4, 3, 4), q(1, 4, 3, 4), q(1, 4, 3, 4)), {}, ch.ShapeError, "key must have query's batch size 2"),
    ((q(4, 3, 4), q(3, 3, 4), q(3, 3, 4)), {}, ch.ShapeError, "divides query's 4"),
    ((q(3, 0), q(3, 0), q(3, 0)), {}, ch.ShapeError, "at least one head and one channel"),
    (([[1.0]], q(3, 4), q(3, 4)), {}, ch.ShapeError, "query must be a tensor; got list"),
    ((q(3, 4), q(3, 4, dtype=torch.float64), q(3, 4)), {}, ch.UnsupportedError, "key must have query's dtype"),
    ((q(3, 4).long(),) * 3, {}, ch.UnsupportedError, "query must be floating point; got torch.int64"),
    ((q(3, 4), q(3, 4, device="meta"), q(3, 4)), {}, ch.UnsupportedError, "key must be on query's device cpu"),
    ((q(3, 4),) * 3, {"scale": float("nan")}, ch.ShapeError, "scale must be a finite number; got nan"),
    ((q(3, 4),) * 3, {"scale": 1e39}, ch.ShapeError, "scale must be a number within float32's range; got 1e+39"),
    ((q(3, 4),) * 3, {"scale": 10**400}, ch.ShapeError, "scale must be a number within float32's range; got 1000"),
    ((q(3, 4),) * 3, {"query_offset": 2**49}, ch.ShapeError, "query_offset must lie within 2**48 of 0; got 5629"),
    ((q(3, 4),) * 3, {"scores": np.zeros(3)}, ch.UnsupportedError, "scores must hold score rules; got float64"),
    ((q(3, 4),) * 3, {"scale": "1"}, ch.ShapeError, "scale must be a finite number"),
    ((q(3, 4),) * 3, {"dropout": 1.0}, ch.ShapeError, "dropout must be a probability of at least 0 and below 1"),
    ((q(3, 4),) * 3, {"dropout": -0.1}, ch.ShapeError, "got -0.1"),
    ((q(3, 4),) * 3, {"dropout": 0.1, "seed": -1}, ch.ShapeError, "seed must be a whole number"),
    ((q(3, 4),) * 3, {"query_offset": 1.0}, ch.ShapeError, "query_offset must be a whole number; got 1.0"),
    ((q(3, 4),) * 3, {"mask": torch.ones(3, 3).bool()}, ch.MaskError, "Wrap a boolean tensor (True = may attend)"),
    ((q(3, 4),) * 3, {"scores": [3]}, ch.UnsupportedError, "scores must hold score rules; got int"),
    ((q(3, 4),) * 3, {"scores": 3}, ch.UnsupportedError, "scores must hold score rules; got int"),
    ((q(3, 4),) * 3, {"backend": "fast"}, ch.UnsupportedError, "backend must be one of 'auto', 'native'"),
    ((q(3, 4),) * 3, {"mask": ch.Padding([4])}, ch.ShapeError, "lengths of at most k_len 3; got 4"),
    ((q(3, 4),) * 3, {"mask": ch.Padding([1, 1])}, ch.MaskError, "mask must have batch 1; got batch 2"),
    ((q(3, 4),) * 3, {"mask": ch.Documents(lengths=[4])}, ch.MaskError, "cover the call's tokens (3 keys"),
    ((q(3, 4),) * 3, {"mask": ch.Dense(torch.ones(2, 3).bool())}, ch.MaskError, "have shape [..., 3, 3]"),
    ((q(3, 4),) * 3, {"mask": ch.Blocks(torch.ones(1, 1).bool(), 2)}, ch.MaskError, "covers 2 and 2"),
    ((q(3, 4),) * 3, {"scores": ch.Alibi(4)}, ch.ShapeError, "one entry per query head (1); got 4"),
    ((q(3, 4),) * 3, {"scores": ch.DenseBias(torch.ones(2, 3))}, ch.ShapeError, "broadcasts to (1, 1, 3, 3)"),
    ((q(3, 4),) * 3, {"scores": [ch.Sink(0.0), ch.Sink(1.0)]}, ch.UnsupportedError, "one Sink at most"),
    ((q(2, 4), q(3, 4), q(3, 4)), {"mask": ch.Causal()}, ch.MaskError, "Usual choices: 0"),
    ((q(2, 4), q(3, 4), q(3, 4)), {"scores": ch.Alibi(1)}, ch.MaskError, "or 1 (k_len - q_len"),
    (
        (q(3, 4),) * 3,
        {"scores": ch.ScoreFunction(lambda s, b, h, i, j: s.sum())},
        ch.ShapeError,
        "return float32 of the tile's shape (1, 1, 3, 3)",
    ),
    (
        (q(3, 4),) * 3,
        {"scores": ch.ScoreFunction(lambda s, b, h, i, j: s + undefined)},  # type: ignore[name-defined] # noqa: F821
        ch.ShapeError,
        "NameError",
    ),
    ((q(3, 4),) * 3, {"scores": ch.SoftCap(2.0), "backend": "sdpa"}, ch.UnsupportedError, "sdpa: cannot apply SoftCap"),
    ((q(3, 4),) * 3, {"backend": "flex"}, ch.UnsupportedError, "flex:"),
]


@pytest.mark.parametrize(("inputs", "options", "error", "words"), BAD, ids=[case[3][:40] for case in BAD])
def test_bad_input(inputs: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        ch.attention(*inputs, **options)
    assert words in str(caught.value)
    assert str(caught.value).startswith(("attention: ", "ScoreFunction: "))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("want", "words"),
    [
        (ch.Want(top_k=4), "want.top_k must be a whole number from 0 to k_len 3; got 4"),
        (ch.Want(rows=[3]), "want.rows must be query indices from 0 to 2"),
        (ch.Want(heatmap=-1), "want.heatmap must be 0 or more"),
        (ch.Want(row_weights=torch.ones(3)), "want.row_weights must have shape"),
        (True, "want must be a ch.Want; got bool"),
    ],
)
def test_bad_wants(want: Any, words: str) -> None:
    with pytest.raises(ch.ClearheadError) as caught:
        ch.observe_attention(q(3, 4), q(3, 4), q(3, 4), want=want)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        lambda: ch.Alibi(0),
        lambda: ch.Alibi(),
        lambda: ch.SoftCap(-1.0),
        lambda: ch.SoftCap(float("inf")),
        lambda: ch.RelativeBias(torch.ones(2, 4)),
        lambda: ch.DenseBias(torch.ones(2, 2).bool()),
        lambda: ch.Sink(torch.ones(2, 2)),
        lambda: ch.ScoreFunction("x"),
    ],
)
def test_bad_rules(value: Any) -> None:
    with pytest.raises(ch.ClearheadError, match=r"^\w+: \w+ must .+; got .+\. .+\.$"):
        value()


@pytest.mark.parametrize("scale", [1e-39, 1e-300, -1e-45])
@pytest.mark.parametrize("backend", ["native", "sdpa", "tiled", "reference"])
def test_subnormal_scale_is_zero(scale: float, backend: str) -> None:
    query, key, value = torch.randn(3, 5, 4)
    if ch.explain_dispatch(query, key, value).reasons[backend]:
        pytest.skip(backend)
    output = ch.attention(query, key, value, scale=scale, backend=backend)
    assert torch.equal(output, ch.attention(query, key, value, scale=0.0, backend=backend))
    in_float64 = Problem.of("attention", query.double(), key.double(), value.double(), scale=scale)
    assert in_float64.scale == scale
