"""A wrong call of one rank or of all raises on every rank, and none hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import clearhead as ch
from clearhead.distributed.launch import run_ranks


def _call(rank: int, **options: Any) -> dict[str, Any]:
    """Arguments of a call, of which one rank's may be others."""
    part = torch.zeros(1, 2, 4, 8)
    return {"query": part, "key": part, "value": part, **options}


def _other_heads(rank: int) -> dict[str, Any]:
    part = torch.zeros(1, 2 + 2 * rank, 4, 8)
    return {"query": part, "key": part, "value": part}


WRONG = {
    "no tensor": (lambda rank: _call(rank, query=[torch.zeros(2, 8), "no"][rank]), "on rank 1"),
    "other heads": (_other_heads, "agree on shapes"),
    "other dtypes": (lambda rank: _call(rank, query=torch.zeros(1, 2, 4, 8).to([torch.float32, torch.half][rank])), ""),
    "other layouts": (lambda rank: _call(rank, layout=("contiguous", "zigzag")[rank]), "agree on shapes"),
    "no layout": (lambda rank: _call(rank, layout="spiral"), "must be 'contiguous'"),
    "other methods": (lambda rank: _call(rank, method=("ring", "gather")[rank]), "agree on shapes"),
    "no method": (lambda rank: _call(rank, method="star"), "must be one of"),
    "more ranks than heads": (lambda rank: {name: torch.zeros(1, 1, 4, 8) for name in ("query", "key", "value")} | {
        "method": "heads"}, "key heads"),
    "other masks": (lambda rank: _call(rank, mask=(None, ch.Causal())[rank]), "agree on masks"),
    "other seeds": (lambda rank: _call(rank, dropout=0.5, seed=rank), "agree on seeds"),
    "other lengths": (lambda rank: _call(rank, query=torch.zeros(1, 2, 4 + 3 * rank, 8)), "lengths [4, 7]"),
    "a mask of the part": (lambda rank: _call(rank, mask=ch.Dense(torch.ones(4, 4) > 0)), "shape"),
    "no mask on one rank": (lambda rank: _call(rank, mask="causal" if rank else None), ""),
    "no offset": (lambda rank: _call(rank, query=torch.zeros(1, 2, 2, 8), mask=ch.Causal()), "query_offset"),
}  # fmt: skip


def _said(name: str) -> str:
    make, _ = WRONG[name]
    with pytest.raises(ch.ClearheadError) as caught:
        ch.distributed.attention(**make(dist.get_rank()))
    return str(caught.value)


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_call_raises_on_every_rank(name: str) -> None:
    said = run_ranks(_said, 2, name, timeout=30)
    assert all(text.startswith("distributed.attention: ") for text in said)
    assert any(WRONG[name][1] in text for text in said)


def _outside() -> str:
    group = dist.new_group([0])
    try:
        ch.distributed.attention(*[torch.zeros(2, 4)] * 3, group=group)
    except ch.UnsupportedError as error:
        return str(error)
    return "ran"


def test_rank_outside_of_the_group_is_told() -> None:
    assert run_ranks(_outside, 2) == [
        "ran",
        "distributed.attention: group must be a process group that this rank is in; got a group of other ranks. Pass "
        "the mesh's group: mesh['context'].get_group().",
    ]


def test_call_without_process_group_is_told() -> None:
    with pytest.raises(ch.UnsupportedError, match="init_process_group first"):
        ch.distributed.attention(*[torch.zeros(2, 4)] * 3)


def _absent() -> None:
    if dist.get_rank() == 0:
        ch.distributed.attention(*[torch.zeros(2, 4)] * 3)


@pytest.mark.slow
def test_rank_that_never_calls_ends_in_a_time_out() -> None:
    with pytest.raises(RuntimeError, match=r"rank \d"):
        run_ranks(_absent, 2, timeout=3)
