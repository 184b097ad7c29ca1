"""The router: the blocks it chooses, its own block included, and that later tokens cannot influence the choice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.sparse import routed

SIZE, LENGTH = 4, 30


def tensors(*, kv_heads: int = 2, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    query = torch.randn(2, 4, length, 8, generator=generator)
    key, value = (torch.randn(2, kv_heads, length, 8, generator=generator) for _ in range(2))
    return query, key, value


def by_hand(query: Tensor, key: Tensor, keep: int, causal: bool) -> Tensor:
    """The choice of one head in loops: bool ``[q_blocks, k_blocks]``."""
    q_blocks, k_blocks = query.split(SIZE), key.split(SIZE)
    chosen = torch.zeros(len(q_blocks), len(k_blocks), dtype=torch.bool)
    for row, own_block in enumerate(q_blocks):
        asked = own_block[0] if causal else own_block.mean(dim=0)
        rivals = [place for place in range(len(k_blocks)) if place != row and not (causal and place > row)]
        rivals.sort(key=lambda place: -float(asked @ k_blocks[place].mean(dim=0)))
        for place in [row, *rivals][:keep]:
            chosen[row, place] = True
    return chosen


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("keep", [1, 3, 50])
def test_best_blocks_and_own_block_are_chosen(keep: int, causal: bool) -> None:
    query, key, _ = tensors()
    mask = routed(query, key, keep=keep, size=SIZE, causal=causal)
    blocks = mask.right if causal else mask  # type: ignore[attr-defined]
    assert isinstance(blocks, ch.Blocks)
    for batch in range(2):
        for head in range(4):
            expected = by_hand(query[batch, head], key[batch, head // 2], keep, causal)
            assert torch.equal(blocks.table[batch, head], expected)


def test_matching_key_is_found_far_back() -> None:
    query, key, _ = (tensor * 0.01 for tensor in tensors())
    query[:, :, 24], key[:, :, 9] = 3.0, 3.0
    allowed = routed(query, key, keep=2, size=SIZE).dense(LENGTH, LENGTH)
    assert bool(allowed[:, :, 24:28, 8:12].all())
    assert int(allowed[0, 0, 27].sum()) == 2 * SIZE


def test_the_first_blocks_can_be_kept_always() -> None:
    query, key, _ = tensors()
    allowed = routed(query, key, keep=2, size=SIZE, first=1).dense(LENGTH, LENGTH)
    assert bool(allowed[:, :, 4:, :4].all())
    assert int(allowed[:, :, -1].sum(dim=-1).max()) <= 2 * SIZE


@pytest.mark.parametrize("changed", range(LENGTH))
def test_no_leak_from_the_future_by_perturbation(changed: int) -> None:
    query, key, value = tensors()
    before = ch.attention(query, key, value, mask=routed(query, key, keep=2, size=SIZE))
    for tensor in (query, key, value):
        tensor[:, :, changed] = torch.randn_like(tensor[:, :, changed]) * 100.0
    output_after = ch.attention(query, key, value, mask=routed(query, key, keep=2, size=SIZE))
    torch.testing.assert_close(before[:, :, :changed], output_after[:, :, :changed], atol=0.0, rtol=0.0)
    assert not torch.equal(before[:, :, changed], output_after[:, :, changed])


def test_perturbation_detects_a_leak() -> None:
    """Means over blocks of queries, cut by a causal mask, are the mistake that the router avoids."""
    query, key, value = tensors()

    def leaky() -> Tensor:
        return ch.attention(query, key, value, mask=ch.Causal() & routed(query, key, keep=2, size=SIZE, causal=False))

    before = leaky()
    query[:, :, 27] *= -100.0
    assert not torch.equal(before[:, :, :27], leaky()[:, :, :27])


def test_decoding_chooses_where_a_block_begins() -> None:
    query, key, value = (tensor.double() for tensor in tensors())
    whole = ch.attention(query, key, value, mask=routed(query, key, keep=2, size=SIZE))
    mask: ch.Mask | None = None
    for place in range(LENGTH):
        now, so_far = slice(place, place + 1), slice(0, place + 1)
        if place % SIZE == 0:
            mask = routed(query[:, :, now], key[:, :, so_far], keep=2, size=SIZE, query_offset=place)
        output = ch.attention(query[:, :, now], key[:, :, so_far], value[:, :, so_far], mask=mask, query_offset=place)
        torch.testing.assert_close(output, whole[:, :, now], atol=1e-12, rtol=1e-12)


def test_part_with_offset_chooses_like_the_whole() -> None:
    query, key, _ = tensors()
    masks = [routed(query[:, :, start:], key, keep=2, size=SIZE, query_offset=start) for start in (0, 12)]
    whole, part = masks[0].dense(LENGTH, LENGTH), masks[1].dense(LENGTH - 12, LENGTH, query_offset=12)
    assert torch.equal(whole[:, :, 12:], part)


def test_nan_stays_in_its_block() -> None:
    query, key, _ = tensors()
    key[:, :, 9] = torch.nan
    blocks = routed(query, key, keep=3, size=SIZE).right  # type: ignore[attr-defined]
    assert not bool(blocks.table[:, :, 5:, 2].any())
    assert bool((blocks.table[:, :, 5:].sum(dim=-1) == 3).all())


def test_gradients_flow_through_the_chosen_blocks() -> None:
    query, key, value = (tensor.requires_grad_() for tensor in tensors())
    output = ch.attention(query, key, value, mask=routed(query, key, keep=2, size=SIZE))
    output.square().sum().backward()
    assert key.grad is not None
    assert bool(key.grad.isfinite().all())
    assert float(key.grad.abs().max()) > 0.0


def test_missing_axes_and_other_lengths() -> None:
    query, key, _ = tensors()
    mask = routed(query[0, 0, :8], key[0, 0, :28], keep=2, size=SIZE, causal=False)
    assert mask.dense(8, 28, query_offset=0).sum(dim=-1).tolist() == [8] * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0}, "keep must be a whole number of at least 1; got 0"),
        ({"keep": 2, "size": 0}, "size must be a whole number of at least 1; got 0"),
        ({"keep": 2, "first": 2}, "first must be less than keep 2; got 2"),
    ],
)
def test_bad_numbers_raise_one_line(arguments: dict[str, int], message: str) -> None:
    query, key, _ = tensors()
    with pytest.raises(ch.ShapeError, match=f"routed: {message}"):
        routed(query, key, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ch.ShapeError, match="routed: key must end with the last query, at length 8, when causal"):
        routed(query[:, :, :8], key, keep=1)
    with pytest.raises(ch.ShapeError, match="routed: query_offset must be a multiple of size 4; got 5"):
        routed(query[:, :, 5:], key, keep=1, size=4, query_offset=5)


def test_autocast_does_not_change_the_choice() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(4, 8, 512, 32, generator=generator) for _ in range(2))
    plain = routed(query, key, keep=3, size=16).dense(512, 512)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(routed(query, key, keep=3, size=16).dense(512, 512), plain)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "length"), [(0, 8), (2, 0)])
def test_empty_calls_are_routed(batch: int, length: int, causal: bool) -> None:
    query, key = torch.randn(batch, 4, length, 8, requires_grad=True), torch.randn(batch, 2, length, 8)
    mask = routed(query, key, keep=2, size=4, causal=causal)
    for backend in ("auto", "tiled", "reference"):
        output = ch.attention(query, key, key, mask=mask, backend=backend)
        assert output.shape == query.shape
        output.sum().backward()
