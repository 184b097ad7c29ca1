"""Mask conventions of torch, converted by named functions and checked against torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.bridges import from_additive, from_forbidden, from_key_padding, from_zero_forbids, to_forbidden
from clearhead.nn import MultiHeadAttention

EXACT = {"atol": 1e-11, "rtol": 1e-11}


def _pair() -> tuple[nn.MultiheadAttention, MultiHeadAttention, torch.Tensor]:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    return theirs, MultiHeadAttention.from_torch(theirs), torch.randn(3, 5, 8, dtype=torch.float64)


def _some_forbidden(*shape: int) -> torch.Tensor:
    forbidden = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.5
    forbidden[..., 0] = False
    return forbidden


@pytest.mark.parametrize("shape", [(5, 5), (6, 5, 5)])
def test_attn_mask_means_the_same_on_both_sides(shape: tuple[int, ...]) -> None:
    theirs, ours, x = _pair()
    forbidden = _some_forbidden(*shape)
    expected, _ = theirs(x, x, x, attn_mask=forbidden)
    torch.testing.assert_close(ours(x, mask=from_forbidden(forbidden, num_heads=2)), expected, **EXACT)
    torch.testing.assert_close(
        ours(x, mask=from_zero_forbids(~forbidden.view(-1, 2, 5, 5) if len(shape) == 3 else ~forbidden)),
        expected,
        **EXACT,
    )


@pytest.mark.parametrize("shape", [(5, 5), (6, 5, 5)])
@pytest.mark.parametrize("fill", [-torch.inf, -1e9, torch.finfo(torch.float32).min])
def test_float_masks_convert_to_a_mask_and_a_bias(shape: tuple[int, ...], fill: float) -> None:
    theirs, ours, x = _pair()
    bias = torch.randn(shape, dtype=torch.float64).masked_fill(_some_forbidden(*shape), fill)
    expected, _ = theirs(x, x, x, attn_mask=bias)
    mask, rules = from_additive(bias, num_heads=2)
    output = ch.attention(*ours.project(x), mask=mask, scores=rules)
    torch.testing.assert_close(ours.output_projection(output.transpose(1, 2).flatten(2)), expected, **EXACT)


def test_a_row_forbidden_by_any_float_fill_gives_zero_output() -> None:
    x = torch.randn(2, 4)
    for fill in (-torch.inf, -1e9, torch.finfo(torch.float32).min):
        mask, rules = from_additive(torch.tensor([[0.0, 0.0], [fill, fill]]))
        assert (ch.attention(x, x, x, mask=mask, scores=rules)[1] == 0).all()


def test_a_float_mask_converts_to_no_redundant_parts() -> None:
    assert from_additive(torch.zeros(2, 2)) == (None, ())
    mask, rules = from_additive(torch.ones(2, 2))
    assert mask is None
    assert len(rules) == 1
    learned = nn.Parameter(torch.zeros(2, 2))
    assert from_additive(learned)[1][0].bias.requires_grad


def test_key_padding_converts_to_padding() -> None:
    theirs, ours, x = _pair()
    right = torch.arange(5) >= torch.tensor([[5], [2], [3]])
    left = right.flip(1)
    assert isinstance(from_key_padding(right), ch.Padding)
    assert isinstance(from_key_padding(left), ch.Dense)
    for padding in (right, left):
        expected, _ = theirs(x, x, x, key_padding_mask=padding)
        torch.testing.assert_close(ours(x, mask=from_key_padding(padding)), expected, **EXACT)


def test_to_forbidden_round_trips() -> None:
    theirs, ours, x = _pair()
    mask = ch.Causal() & ch.Window(1)
    expected, _ = theirs(x, x, x, attn_mask=to_forbidden(mask, 5, 5))
    torch.testing.assert_close(ours(x, mask=mask), expected, **EXACT)
    assert torch.equal(from_forbidden(to_forbidden(mask, 5, 5)).dense(5, 5), mask.dense(5, 5))
    assert to_forbidden(ch.Causal(), 1, 3, query_offset=2).tolist() == [[False, False, False]]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: from_forbidden(torch.zeros(2, 2)), r"^from_forbidden: forbidden must be a bool tensor; got float32"),
        (lambda: from_forbidden(torch.zeros(4, 2, 2).bool()), r"num_heads None"),
        (lambda: from_forbidden(torch.zeros(3, 2, 2).bool(), num_heads=2), r"num_heads 2"),
        (lambda: from_additive(torch.zeros(2, 2).bool()), r"^from_additive: bias must be a floating point tensor"),
        (lambda: from_key_padding(torch.zeros(2).bool()), r"^from_key_padding: padding must be bool \[batch, k_len\]"),
        (lambda: from_zero_forbids([[1]]), r"^from_zero_forbids: mask must be a tensor; got list\."),
    ],
)
def test_invalid_input_raises(call: object, text: str) -> None:
    with pytest.raises(ch.MaskError, match=text):
        call()  # type: ignore[operator]
