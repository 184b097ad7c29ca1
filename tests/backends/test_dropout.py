"""Dropout: the published generator, the right share, the same weights everywhere and in backward."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.backends.dropout import kept, philox
from clearhead.masks.base import index_tensors
from tests.problems import tensors


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # Known answers of Random123's philox4x32_10 (kat_vectors, D. E. Shaw Research).
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)  # fmt: skip
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), key[0] | key[1] << 32)) == words


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_share_of_kept_weights(probability: float) -> None:
    mask = kept(3, probability, *index_tensors(2, 3, 200, 201, 0, torch.device("cpu"))).double()
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


def test_a_tile_is_a_piece_of_the_whole() -> None:
    whole = index_tensors(2, 2, 10, 30, 0, torch.device("cpu"))
    tile = (whole[0], whole[1], whole[2][:, :, 3:7], whole[3][..., 5:26])
    assert torch.equal(kept(9, 0.5, *tile), kept(9, 0.5, *whole)[:, :, 3:7, 5:26])


@pytest.mark.parametrize(
    "mask", [None, ch.Causal(), ch.Documents(lengths=[100, 3, 41, 150, 6])], ids=["none", "causal", "documents"]
)
def test_backends_drop_the_same_weights_forward_and_backward(mask: ch.Mask | None) -> None:
    inputs = tensors(dtype=torch.float64, batch=1, q_len=300, k_len=300)

    def run(backend: str) -> list[torch.Tensor]:
        output = ch.attention(*inputs, mask=mask, dropout=0.3, seed=5, backend=backend)
        return [output, *torch.autograd.grad(output.square().sum(), inputs)]

    for found, right in zip(run("tiled"), run("reference"), strict=True):
        torch.testing.assert_close(found, right)


def test_seed_decides() -> None:
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


def test_documents_longer_than_a_tile_beside_shorter_ones() -> None:
    """Padding at the end of a group reaches into tiles of its own."""
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
