"""Which tokens count as real: keys that may be attended to, with padding on either side."""

from __future__ import annotations

import contextlib

import pytest
import torch

import clearhead as ch
from clearhead.nn import MultiHeadAttention
from clearhead.observe import head_scores, received_contributions, rollout, value_norms


def module() -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(16, 4).eval()


@pytest.mark.parametrize("k_len", [4, 6])
def test_padding_of_keys_does_not_mark_other_queries(k_len: int) -> None:
    attention = module()
    query, memory = torch.randn(2, 6, 16), torch.randn(2, k_len, 16)
    with torch.no_grad(), ch.trace(attention) as traced:
        attention(query, memory, mask=ch.Padding([2, k_len]))
    points = traced[0]
    assert points.real.all()
    expected = points.weights.sum(dim=2) * value_norms(points, attention)
    torch.testing.assert_close(received_contributions(points, attention), expected)


@pytest.mark.parametrize(
    "padding", [~ch.Padding([3, 0]), ch.Dense(torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7]).bool()[:, None, None])]
)
def test_left_padded_sequence_has_the_measures_of_the_sequence_alone(padding: ch.Mask) -> None:
    attention, x = module(), torch.randn(2, 7, 16)
    with torch.no_grad(), ch.trace(attention) as traced:
        attention(x, mask=ch.Causal() & padding)
    with torch.no_grad(), ch.trace(attention) as alone:
        attention(x[:1, 3:], mask=ch.Causal())
    assert traced[0].real.tolist() == [[False] * 3 + [True] * 4, [True] * 7]
    padded, expected = head_scores(traced[0], period=2), head_scores(alone[0], period=2)
    for name in ("previous", "following", "first", "same", "induction"):
        torch.testing.assert_close(getattr(padded, name)[:1], getattr(expected, name), msg=name)
    torch.testing.assert_close(rollout(traced)[:1, :, 3:], rollout(alone))
    found_keys, wanted_keys = (received_contributions(each[0], attention) for each in (traced, alone))
    torch.testing.assert_close(found_keys[:1, :, 3:], wanted_keys)


@pytest.mark.parametrize("training", [False, True])
def test_packed_stack_is_traced_packed_with_identical_output(training: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True)
    stack = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    ch.swap(stack)
    x, forbidden = torch.randn(3, 9, 16), torch.arange(9) >= torch.tensor([[9], [2], [6]])
    outputs = []
    for looking in (False, True):
        torch.manual_seed(1)
        with torch.no_grad(), ch.trace(stack) if looking else contextlib.nullcontext() as traced:
            outputs.append(stack(x, src_key_padding_mask=forbidden))
    assert torch.equal(*outputs)
    assert traced is not None
    assert traced[0].query.shape[:3] == (1, 4, 17)
    assert torch.equal(traced[1].real, ~forbidden)


def test_user_hook_receives_the_padded_batch() -> None:
    stack = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    ch.swap(stack)
    x, forbidden, shapes = torch.randn(3, 9, 16), torch.arange(9) >= torch.tensor([[9], [2], [6]]), []
    hook = stack.layers[0].self_attn.register_forward_hook(lambda module, given, out: shapes.append(out[0].shape))
    with ch.trace(stack) as traced:
        stack(x, src_key_padding_mask=forbidden)
    hook.remove()
    assert shapes == [(3, 9, 16)]
    assert traced[0].query.shape == (3, 4, 9, 4)
