"""pack and unpack, and attention on packed sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead.packing import pack, unpack


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=6), extra=st.integers(0, 3), width=st.integers(1, 3))
def test_round_trip_keeps_real_tokens_and_zeroes_padding(lengths: list[int], extra: int, width: int) -> None:
    longest = max(lengths) + extra
    x = torch.randn(len(lengths), longest, width)
    packed, documents = pack(x, lengths)
    assert packed.shape == (1, sum(lengths), width)
    assert torch.equal(packed[0], torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)]))
    assert documents.ids.tolist() == [[n for n, length in enumerate(lengths) for _ in range(length)]]
    back = unpack(packed, lengths, longest)
    real = torch.arange(longest) < torch.tensor(lengths)[:, None]
    assert torch.equal(back, x * real[..., None])
    assert unpack(packed, lengths).shape[1] == max(lengths)


@pytest.mark.parametrize("rest", [None, ch.Causal(), ch.Window(2, 1), ch.Strided(2)], ids=repr)
def test_packed_attention_equals_padded_attention(rest: ch.Mask | None) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([7, 0, 3, 5])
    query, key, value = (torch.randn(4, 7, 6, dtype=torch.float64).requires_grad_() for _ in range(3))
    padding: ch.Mask = ch.Padding(lengths)
    padded = ch.attention(*(x[:, None] for x in (query, key, value)), mask=padding if rest is None else padding & rest)[
        :, 0
    ]
    real = torch.arange(7) < lengths[:, None]
    padded = padded * real[..., None]
    parts = [pack(x, lengths) for x in (query, key, value)]
    documents: ch.Mask = parts[0][1]
    packed = ch.attention(*(x[:, None] for x, _ in parts), mask=documents if rest is None else documents & rest)[:, 0]
    back = unpack(packed, lengths, 7)
    torch.testing.assert_close(back, padded, atol=1e-12, rtol=1e-12)
    direction = torch.randn_like(padded)
    expected = torch.autograd.grad(padded, (query, key, value), direction)
    got = torch.autograd.grad(back, (query, key, value), direction)
    for actual, other in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, other, atol=1e-12, rtol=1e-12)


def test_token_ids_and_extra_axes_are_packed() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 0, 0]])
    assert pack(ids, [3, 1])[0].tolist() == [[1, 2, 3, 4]]
    assert pack(torch.zeros(2, 3, 4, 5), torch.tensor([1, 2]))[0].shape == (1, 3, 4, 5)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: pack(torch.zeros(3), [3]), r"^pack: x must have axes \[batch, len, \.\.\.\]; got shape \(3,\)\."),
        (lambda: pack([[1]], [1]), r"^pack: x must have axes .*; got list\."),
        (lambda: pack(torch.zeros(2, 3), [3]), r"lengths must be whole numbers, one per sequence \(2\); got \[3\]\."),
        (lambda: pack(torch.zeros(1, 3), [4]), r"^pack: lengths must lie from 0 to 3; got 4\."),
        (lambda: pack(torch.zeros(1, 3), [-1]), r"^pack: lengths must lie from 0 to 3; got -1\."),
        (lambda: pack(torch.zeros(1, 3), ["a"]), r"^pack: lengths must be whole numbers, one per sequence"),
        (lambda: pack(torch.zeros(1, 3), torch.tensor([1.0])), r"got float32 of shape \(1,\)"),
        (lambda: unpack(torch.zeros(1, 4, 2), [3, 2]), r"^unpack: packed must have axes \[1, 5, \.\.\.\], the sum"),
        (lambda: unpack(torch.zeros(1, 3), [3], 2), r"^unpack: lengths must lie from 0 to 2; got 3\."),
    ],
)
def test_bad_input(call: object, text: str) -> None:
    with pytest.raises(ch.ShapeError, match=text) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)
