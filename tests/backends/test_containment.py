"""NaN and infinity affect only queries that may attend to them; empty rows are 0 with gradients of 0."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from tests.problems import tensors

BACKENDS = ["reference", "tiled", "native", "auto"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "mask",
    [
        ch.Padding([9, 9]),
        ch.Dense(torch.arange(13)[None, :] < 9),
        ch.MaskFunction(lambda b, h, i, j: j < 9),
        ch.Padding([9, 9]) & ch.Causal(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("rules", [(), (ch.SoftCap(2.0), ch.Alibi(4))], ids=["plain", "rules"])
def test_masked_nan_keys_affect_nothing(
    backend: str, poison: float, mask: ch.Mask, rules: tuple[ch.ScoreRule, ...]
) -> None:
    query, key, value = tensors()
    with torch.no_grad():
        poisoned = [tensor.clone() for tensor in (key, value)]
        for tensor in poisoned:
            tensor[:, :, 9:] = poison
    clean_inputs = (query, key, value)
    dirty_inputs = (query, *(tensor.requires_grad_() for tensor in poisoned))
    results = []
    for inputs in (clean_inputs, dirty_inputs):
        output = ch.attention(*inputs, mask=mask, scores=rules, backend=backend)
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    for clean, dirty in zip(*results, strict=True):
        assert torch.isfinite(dirty).all()
        torch.testing.assert_close(dirty, clean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attended_nan_is_not_hidden(backend: str) -> None:
    query, key, value = (tensor.detach().clone() for tensor in tensors())
    key[:, :, 6] = torch.nan
    output = ch.attention(query, key, value, mask=ch.Causal(), backend=backend)
    assert torch.isfinite(output[:, :, :6]).all()
    assert torch.isnan(output[:, :, 6:]).all()
    query, key, value = (tensor.detach().clone() for tensor in tensors())
    value[:, :, 6, 2] = torch.inf
    output = ch.attention(query, key, value, mask=ch.Causal(), backend=backend)
    assert torch.isfinite(output[:, :, :6]).all()
    assert not torch.isfinite(output[:, :, 6:, 2]).any()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "mask", [None, ch.Causal(), ch.MaskFunction(lambda b, h, i, j: (i + j + h) % 3 != 0)], ids=repr
)
@pytest.mark.parametrize("backend", ["reference", "tiled", "native"])
def test_nan_value_affects_its_channel_only(backend: str, mask: ch.Mask | None, poison: float) -> None:
    query, key, value = (tensor.detach().clone() for tensor in tensors())
    clean = ch.attention(query, key, value, mask=mask, backend="reference")
    value[:, 1, 6, 2] = poison
    output = ch.attention(query, key, value, mask=mask, backend=backend)
    reached = torch.ones(1, 4, 13, 13, dtype=torch.bool)
    if mask is not None:
        reached &= mask.dense(13, 13, num_heads=4)
    spoiled = torch.zeros(2, 4, 13, 6, dtype=torch.bool)
    spoiled[:, 2:, :, 2] = reached[:, 2:, :, 6]
    assert not torch.isfinite(output[spoiled]).any()
    torch.testing.assert_close(output[~spoiled], clean[~spoiled], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "tiled", "native", "sdpa"])
def test_empty_rows_are_zero(backend: str) -> None:
    query, key, value = tensors()
    mask = ch.Dense(torch.arange(13)[:, None] > 3) & ch.Padding([0, 13])
    output = ch.attention(query, key, value, mask=mask, backend=backend)
    empty = torch.zeros(2, 13, dtype=torch.bool)
    empty[0], empty[1, :4] = True, True
    rows = output.transpose(1, 2)
    assert bool((rows[empty] == 0).all())
    assert bool((rows[~empty] != 0).all())
    grads = torch.autograd.grad(output.sum(), (query, key, value))
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert bool((grads[0].transpose(1, 2)[empty] == 0).all())
    if backend != "sdpa":
        want = ch.Want(lse=True)
        lse = ch.observe_attention(query, key, value, mask=mask, want=want, backend=backend).lse
        assert bool((lse.transpose(1, 2)[empty] == -torch.inf).all())


@pytest.mark.parametrize("backend", ["reference", "tiled", "native", "sdpa"])
def test_a_bias_of_minus_infinity_is_a_mask(backend: str) -> None:
    inputs = tensors()
    bias = torch.zeros(13, 13).masked_fill(torch.ones(13, 13).triu(1).bool(), -torch.inf)
    bias[4] = -torch.inf
    output = ch.attention(*inputs, scores=ch.DenseBias(bias), backend=backend)
    assert bool((output[:, :, 4] == 0).all())
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(output.sum(), inputs))
    causal = ch.attention(*inputs, mask=ch.Causal(), backend="reference")
    torch.testing.assert_close(output[:, :, 5:], causal[:, :, 5:])


def test_sdpa_by_name_refuses_nan_under_a_mask() -> None:
    query, key, value = (tensor.detach().clone() for tensor in tensors())
    value[:, :, 3] = torch.nan
    with pytest.raises(ch.UnsupportedError, match="spreads NaN"):
        ch.attention(query, key, value, mask=ch.Causal(), backend="sdpa")


@pytest.mark.parametrize("backend", ["reference", "tiled", "native", "sdpa"])
@pytest.mark.parametrize(("q_len", "k_len"), [(0, 5), (5, 0), (0, 0)])
def test_empty_lengths_give_zeros(backend: str, q_len: int, k_len: int) -> None:
    inputs = tensors(q_len=q_len, k_len=k_len)
    output = ch.attention(*inputs, backend=backend)
    assert output.shape == (2, 4, q_len, 6)
    assert bool((output == 0).all())
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(output.sum(), inputs))
