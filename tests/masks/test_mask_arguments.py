"""Arguments of masks: out of range, empty, and tensors that change later."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.masks.base import does_as
from clearhead.masks.parts import parts_of

BAD: list[Callable[[], Any]] = [
    lambda: ch.Window(2**64),
    lambda: ch.Window(0, sys.maxsize),
    lambda: ch.Prefix(2**49),
    lambda: ch.Blocks(torch.ones(1, 1, dtype=torch.bool), 10**400),
    lambda: ch.Dense(None),  # type: ignore[arg-type]
    lambda: ch.Dense("x"),  # type: ignore[arg-type]
    lambda: ch.Blocks(None, 2),  # type: ignore[arg-type]
    lambda: ch.Documents(ids="x"),  # type: ignore[arg-type]
    lambda: ch.Documents(ids=[[1], [2, 3]]),  # type: ignore[arg-type]
    lambda: ch.Padding.from_tokens([[True]]),  # type: ignore[arg-type]
    lambda: ch.Padding.from_tokens(torch.tensor([[1.0, 0.5]])),
    lambda: ch.Causal().dense(2, 2, query_offset=1.5),  # type: ignore[arg-type]
    lambda: ch.Causal().dense(2, 2, query_offset=2**49),
    lambda: ch.Causal().dense(2, 2, batch=-1),
    lambda: ch.Causal().picture(-1),
]


@pytest.mark.parametrize("make", BAD)
def test_bad_arguments_raise_one_form(make: Callable[[], Any]) -> None:
    with pytest.raises(ch.ClearheadError) as caught:
        make()
    assert re.fullmatch(r"[\w.]+: \w+ must .+; got .+\. .+\.", str(caught.value))


@pytest.mark.parametrize("backend", ["native", "sdpa", "tiled", "reference"])
def test_largest_window_allows_everything(backend: str) -> None:
    query, key, value = torch.randn(3, 1, 2, 6, 4)
    if ch.explain_dispatch(query, key, value).reasons[backend]:
        pytest.skip(backend)
    far = ch.Window(2**48, 2**48)
    torch.testing.assert_close(
        ch.attention(query, key, value, mask=far, backend=backend), ch.attention(query, key, value)
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint64])
def test_lengths_of_any_whole_dtype(dtype: torch.dtype) -> None:
    assert ch.Padding(torch.tensor([1, 3], dtype=dtype)).lengths.tolist() == [1, 3]


def test_empty_masks_work() -> None:
    assert ch.Documents(ids=torch.empty(0, dtype=torch.int64)).ids.shape == (1, 0)
    for mask in (ch.Documents(lengths=[0, 0]), ch.Padding([]), ch.Documents(ids=torch.empty(2, 0, dtype=torch.int64))):
        assert str(mask).startswith(type(mask).__name__)


def test_ids_that_are_written_into_later_are_copied() -> None:
    ids = torch.tensor([0, 0, 1, 1])
    mask = ch.Documents(ids=ids)
    ids[1] = 1
    assert mask.ids.tolist() == [[0, 0, 1, 1]]
    query = torch.randn(1, 1, 4, 4)
    output = ch.attention(query, query, query, mask=mask)
    torch.testing.assert_close(output, ch.attention(query, query, query, mask=mask, backend="reference"))


def test_changed_field_changes_the_parts() -> None:
    padding = ch.Padding([5]) & ch.Prefix(2)
    first = parts_of(padding, (1, 1, 6, 6), 0)
    assert parts_of(padding, (1, 1, 6, 6), 0) is first
    padding.right.length = 4  # type: ignore[attr-defined]
    other = parts_of(padding, (1, 1, 6, 6), 0)
    assert other is not first
    assert other.interval_bounds[1].max() == 4


def test_a_large_mask_is_printed_from_its_corner() -> None:
    mask = ch.Documents(lengths=[3000, 3000])
    asked: list[int] = []
    counting = ch.MaskFunction(lambda b, h, i, j: _counted(asked, i, j))
    drawn = (mask & counting).picture()
    assert max(asked) <= 24 * 24
    assert drawn.endswith("(the first 24 of 6000 queries, 24 of 6000 keys)")
    assert len(drawn.splitlines()) == 25


def _counted(asked: list[int], q_pos: Tensor, k_pos: Tensor) -> Tensor:
    asked.append(q_pos.numel() * k_pos.numel())
    return k_pos <= q_pos


class _Even(ch.Causal):
    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos % 2 == 0


class _Named(ch.Causal):
    """The same predicate under another name."""


def test_overridden_predicate_drops_intervals() -> None:
    index = torch.arange(4).view(1, 1, -1, 1)
    assert _Even().intervals(index, index, index, 4) is None
    assert not _Even().relative
    assert _Named().intervals(index, index, index, 4) is not None
    assert _Named().relative
    assert not does_as(_Even(), ch.Causal)
    assert does_as(_Named(), ch.Causal)
    assert (_Named() & ch.Window(1)).relative


@pytest.mark.parametrize(
    "made",
    [
        ch.Dense,
        lambda table: ch.DenseBias(table.float()),
        lambda table: ch.Padding(table.sum(1)),
        lambda table: ch.Documents(lengths=table.sum(1)),
        lambda table: ch.Documents(table.long()[0]),
        lambda table: ch.Sink(table.float()[0]),
    ],
)
def test_tensors_keep_their_device(made: Callable[[Tensor], Any]) -> None:
    """Whatever device is the default one: a model may be built on another."""
    table = torch.ones(3, 3, dtype=torch.bool, device="cpu")
    with torch.device("meta"):
        assert {tensor.device.type for tensor in made(table).tensors()} == {"cpu"}
