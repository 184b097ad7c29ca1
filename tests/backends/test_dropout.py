"""Dropout: the published generator, the share of dropped weights, and equal weights on all backends and in backward."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.backends.dropout import bits, keep_mask, philox
from clearhead.masks.base import index_tensors
from tests.problems import tensors


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # Known answers of Random123's philox4x32 with 7 rounds (kat_vectors, D. E. Shaw Research).
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), key[0] | key[1] << 32)) == words


def test_column_bits_are_a_quarter_of_a_64_bit_word() -> None:
    seed, row = 2**40 + 17, (2**32 - 3, 5, 6)
    drawn = bits(seed, torch.tensor([3, 0]), tuple(torch.tensor([word]) for word in row))
    assert drawn.shape == (128,)
    for place, column in enumerate([*range(192, 256), *range(64)]):
        words = philox(tuple(torch.tensor(word) for word in (column // 64 * 8 + column % 32 // 4, *row)), seed)
        pair = column % 64 // 32
        number = int(words[2 * pair + 1]) + 2**32 * int(words[2 * pair])
        assert int(drawn[place]) == number >> 16 * (column % 4) & 0xFFFF


@pytest.mark.parametrize("probability", [1e-7, 1 - 1e-7])
def test_probabilities_near_0_and_1(probability: float) -> None:
    """The nearest of 65,536 levels is 0, or would drop all."""
    inputs = tensors(q_len=200, k_len=200)
    native, tiled = (
        ch.attention(*inputs, dropout=probability, seed=3, backend=backend) for backend in ("auto", "tiled")
    )
    torch.testing.assert_close(native, tiled, rtol=1e-4, atol=1e-4)
    if probability < 0.5:
        torch.testing.assert_close(native, ch.attention(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_share_of_dropped_weights_is_the_probability(probability: float) -> None:
    mask = keep_mask(3, probability, *index_tensors(2, 3, 200, 201, 0, torch.device("cpu"))).double()
    deviation = (probability * (1 - probability) / mask.numel()) ** 0.5
    assert abs(mask.mean().item() - (1 - probability)) < 5 * deviation
    # Heads, batches and neighbours are independent.
    pairs = [
        (mask[:, 0], mask[:, 1]),
        (mask[0], mask[1]),
        (mask[..., 1:], mask[..., :-1]),
        (mask[:, :, 1:], mask[:, :, :-1]),
    ]
    for one, other in pairs:
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].item()
        assert abs(correlation) < 5 / one.numel() ** 0.5


def test_tile_drops_the_same_weights_as_the_whole() -> None:
    whole = index_tensors(2, 2, 10, 30, 0, torch.device("cpu"))
    tile = (whole[0], whole[1], whole[2][:, :, 3:7], whole[3][..., 5:26])
    assert torch.equal(keep_mask(9, 0.5, *tile), keep_mask(9, 0.5, *whole)[:, :, 3:7, 5:26])


@pytest.mark.parametrize(
    "mask", [None, ch.Causal(), ch.Documents(lengths=[100, 3, 41, 150, 6])], ids=["none", "causal", "documents"]
)
def test_backends_drop_the_same_weights_forward_and_backward(mask: ch.Mask | None) -> None:
    inputs = tensors(dtype=torch.float64, batch=1, q_len=300, k_len=300)

    def run(backend: str) -> list[torch.Tensor]:
        output = ch.attention(*inputs, mask=mask, dropout=0.3, seed=5, backend=backend)
        return [output, *torch.autograd.grad(output.square().sum(), inputs)]

    for actual, right in zip(run("tiled"), run("reference"), strict=True):
        torch.testing.assert_close(actual, right)


def test_equal_seeds_drop_equal_weights() -> None:
    inputs = tensors()
    same = [ch.attention(*inputs, dropout=0.5, seed=4) for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], ch.attention(*inputs, dropout=0.5, seed=5))
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append(ch.attention(*inputs, dropout=0.5))
    assert torch.equal(*drawn)


def test_mean_over_seeds_is_the_plain_output() -> None:
    query, key, value = (tensor.detach() for tensor in tensors(batch=1, q_len=4, k_len=20))
    runs = torch.stack([ch.attention(query, key, value, dropout=0.2, seed=seed) for seed in range(600)])
    error = (runs.mean(0) - ch.attention(query, key, value)).abs()
    assert bool((error <= 5 * runs.std(0) / 600**0.5 + 1e-6).all())


def test_statistics_are_from_before_dropout() -> None:
    inputs = tensors()
    want = ch.Want(lse=True)
    dropped, plain = (ch.observe_attention(*inputs, want=want, dropout=p, seed=1).lse for p in (0.5, 0.0))
    assert torch.equal(dropped, plain)


def test_dropout_in_documents_of_different_lengths() -> None:
    """Padding at the end of a group fills whole tiles."""
    lengths = [90, 70, 88, 66] * 20
    query, key, value = tensors(batch=1, heads=8, kv_heads=8, q_len=sum(lengths), k_len=sum(lengths))
    mask = ch.Documents(lengths=lengths)
    output = ch.attention(query, key, value, mask=mask, dropout=0.3, seed=5, backend="tiled")
    start = sum(lengths[:5])
    stop = start + lengths[5]
    alone = ch.Dense(torch.arange(sum(lengths))[None, :] >= start) & ch.Padding([stop])
    right = ch.attention(
        query[:, :, start:stop], key, value, mask=alone, dropout=0.3, seed=5, query_offset=start, backend="reference"
    )
    torch.testing.assert_close(output[:, :, start:stop], right, rtol=1e-4, atol=1e-5)
