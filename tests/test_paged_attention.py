"""Attention that reads pages: against the formula, bitwise against each sequence alone, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.functional import paged_attention
from clearhead.functional.paged import PageTable, attend_to_pages, pages_of
from tests.budget import within_budget

LENGTHS = (1, 16, 37, 600)


@dataclass
class Paged:
    """Sequences in pages in any order, whose other rows are NaN."""

    query: Tensor
    key: Tensor
    value: Tensor
    table: Tensor
    lengths: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.value, self.table, self.lengths

    def alone(self, place: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, keys and values of one sequence."""
        length = int(self.lengths[place])
        return self.query[place, None], *(pages_of(part, self.table[place], length) for part in (self.key, self.value))


def paged(
    *, lengths: tuple[int, ...] = LENGTHS, q_len: int = 1, heads: int = 4, kv_heads: int = 2, head_dim: int = 64,
    block_size: int = 16, dtype: torch.dtype = torch.float32, heads_last: bool = False,
) -> Paged:  # fmt: skip
    random = torch.Generator().manual_seed(1)
    columns = -(-max(lengths) // block_size)
    blocks = [-(-length // block_size) for length in lengths]
    order = iter(torch.randperm(sum(blocks) + 2, generator=random).tolist())
    table = torch.full((len(lengths), columns), 10**6, dtype=torch.int32)
    shape = (sum(blocks) + 2, block_size, kv_heads, head_dim)
    pages = []
    for place, count in enumerate(blocks):
        table[place, :count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
    for _ in range(2):
        part = torch.full(shape, torch.nan, dtype=dtype)
        part = part if heads_last else part.transpose(1, 2).contiguous().transpose(1, 2)
        for place, length in enumerate(lengths):
            for position in range(length):
                row = torch.randn(kv_heads, head_dim, generator=random).to(dtype)
                part[table[place, position // block_size], position % block_size] = row
        pages.append(part)
    query = torch.randn(len(lengths), heads, q_len, head_dim, generator=random).to(dtype)
    return Paged(query, *pages, table, torch.tensor(lengths, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [5, 16, 48, 256])
@pytest.mark.parametrize("q_len", [1, 3, 20])
def test_paged_attention_equals_the_float64_formula(dtype: torch.dtype, block_size: int, q_len: int) -> None:
    call = paged(q_len=q_len, block_size=block_size, dtype=dtype, lengths=(20, 37, 300))
    for mask in (None, ch.Causal(), ch.Causal() & ch.Window(30)):
        output = paged_attention(*call.tensors, mask=mask)
        for place, length in enumerate(call.lengths.tolist()):
            exact, textbook = (
                ch.attention(*tensors, mask=mask, query_offset=length - q_len, backend="reference")
                for tensors in ([part.double() for part in call.alone(place)], call.alone(place))
            )
            within_budget("output", output[place, None], textbook, exact, terms=length, size=4.0, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (8, 1, 32), (2, 2, 20)])
def test_a_sequence_has_the_bits_that_it_has_alone(
    dtype: torch.dtype, heads_last: bool, heads: int, kv_heads: int, head_dim: int
) -> None:
    for q_len in (1, 9):
        sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "q_len": q_len}
        call = paged(dtype=dtype, heads_last=heads_last, lengths=(9, 48, 37, 600), block_size=32, **sizes)
        output = paged_attention(*call.tensors, mask=ch.Causal())
        for place, length in enumerate(call.lengths.tolist()):
            alone = ch.attention(*call.alone(place), mask=ch.Causal(), query_offset=length - q_len, backend="native")
            assert torch.equal(output[place, None], alone)


def test_packed_queries_equal_those_of_a_batch() -> None:
    call = paged(q_len=3, lengths=(3, 40, 90))
    packed = call.query.transpose(0, 1).flatten(1, 2)[None]
    start = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    batch = paged_attention(*call.tensors, mask=ch.Causal())
    output = paged_attention(packed, *call.tensors[1:], query_start=start, mask=ch.Causal())
    assert torch.equal(output[0].unflatten(1, (3, 3)).transpose(0, 1), batch)


def test_sequences_may_have_different_numbers_of_queries() -> None:
    call = paged(lengths=(5, 40, 90), q_len=1)
    packed, start = torch.randn(1, 4, 27, 64), torch.tensor([0, 2, 2, 27], dtype=torch.int32)
    output, lse = attend_to_pages(
        "test", (packed, call.key, call.value), PageTable(call.table, call.lengths, start), mask=ch.Causal(), lse=True
    )
    for place, rows in ((0, slice(0, 2)), (2, slice(2, 27))):
        _, keys, values = call.alone(place)
        count = rows.stop - rows.start
        offset = int(call.lengths[place]) - count
        observed = ch.observe_attention(
            packed[:, :, rows], keys, values, mask=ch.Causal(), query_offset=offset, want=ch.Want(lse=True)
        )
        torch.testing.assert_close(output[:, :, rows], observed.output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[:, :, rows], observed.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["tiled", "reference", "sdpa"])
def test_other_backends_gather_the_pages(backend: str) -> None:
    call = paged(q_len=2, lengths=(2, 40))
    rules = () if backend == "sdpa" else (ch.Alibi(4), ch.SoftCap(5.0))
    expected = paged_attention(*call.tensors, mask=ch.Causal(), scores=rules, backend="native")
    output = paged_attention(*call.tensors, mask=ch.Causal(), scores=rules, backend=backend)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_rules_and_a_sink_are_those_of_attention() -> None:
    call = paged(q_len=2, lengths=(30, 90))
    scores = (ch.RelativeBias(torch.randn(4, 21)), ch.Sink(torch.randn(4)))
    output = paged_attention(*call.tensors, mask=ch.Causal(), scores=scores)
    for place, length in enumerate((30, 90)):
        alone = ch.attention(*call.alone(place), mask=ch.Causal(), scores=scores, query_offset=length - 2)
        torch.testing.assert_close(output[place, None], alone, rtol=1e-5, atol=1e-5)


def test_a_sequence_without_keys_gives_zero() -> None:
    call = paged(lengths=(0, 20))
    output = paged_attention(*call.tensors)
    assert not output[0].any()
    assert output[1].isfinite().all()


def test_nan_of_a_later_token_does_not_reach_an_earlier_one() -> None:
    call = paged(q_len=3, lengths=(20, 100))
    before = paged_attention(*call.tensors, mask=ch.Causal())
    for pages in (call.key, call.value):
        pages[call.table[1, 99 // 16], 99 % 16] = torch.nan
    after = paged_attention(*call.tensors, mask=ch.Causal())
    assert torch.equal(after[0], before[0])
    torch.testing.assert_close(after[1, :, :2], before[1, :, :2], rtol=1e-5, atol=1e-6)
    assert after[1, :, 2].isnan().all()


def test_gradients_flow_to_the_pages() -> None:
    call = paged(lengths=(20, 37), q_len=2)
    pages = [part.nan_to_num().requires_grad_() for part in (call.key, call.value)]
    query = call.query.clone().requires_grad_()
    paged_attention(query, *pages, call.table, call.lengths, mask=ch.Causal()).sum().backward()
    assert all(part.grad is not None and part.grad.isfinite().all() for part in (query, *pages))
    # Rows that no sequence holds have none.
    assert not pages[0].grad[call.table[0, 1], 4:].any()


def _with(call: Paged, **changed: Any) -> dict[str, Any]:
    names = ("query", "key", "value", "block_table", "lengths")
    return {**dict(zip(names, call.tensors, strict=True)), **changed}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: {"block_table": c.table.index_fill(1, torch.tensor([1]), 77)}, "name blocks from 0 to"),
        (lambda c: {"block_table": c.table.index_fill(1, torch.tensor([0]), -1)}, "name blocks from 0 to"),
        (lambda c: {"lengths": c.lengths + 30}, "lengths must lie from 0 to 48"),
        (lambda c: {"lengths": -c.lengths}, "lengths must lie from 0 to 48"),
        (lambda c: {"lengths": c.lengths.long()}, "lengths must be int32"),
        (lambda c: {"block_table": c.table.long()}, "block_table must be int32"),
        (lambda c: {"block_table": c.table[:1]}, "block_table must have a row for each of the 2 sequences"),
        (lambda c: {"query_start": torch.tensor([0, 2, 1], dtype=torch.int32)}, "query_start must rise from 0"),
        (lambda c: {"key": c.key[0]}, "key must have axes"),
        (lambda c: {"key": c.key.double()}, "key and value must have query's dtype"),
        (lambda c: {"value": c.value[:, :, :1]}, "alike in all but"),
        (lambda c: {"query": c.query[..., :32]}, "be pages of query's head_dim 32"),
        (lambda c: {"mask": ch.Prefix(3)}, "mask must be None, Causal, Window"),
        (lambda c: {"scores": ch.DenseBias(torch.zeros(1, 1, 1, 48))}, "scores must be Alibi"),
        (lambda c: {"backend": "triton"}, "backend must be one of"),
    ],
)  # fmt: skip
def test_a_table_that_points_outside_is_one_line(change: Any, text: str) -> None:
    call = paged(lengths=(20, 37))
    with pytest.raises(ch.ClearheadError, match=re.escape(text)) as raised:
        paged_attention(**_with(call, **change(call)))
    assert "\n" not in str(raised.value).split("got")[0]


def test_varlen_attn_reads_pages_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    call = paged(lengths=(5, 40, 90))
    packed, start = torch.randn(27, 4, 64), torch.tensor([0, 2, 2, 27], dtype=torch.int32)
    arguments = (packed, call.key, call.value, start, None, 25, 90)
    options: dict[str, Any] = {"seqused_k": call.lengths, "block_table": call.table, "enable_gqa": True}
    gathered = ch.functional.varlen_attn(
        packed.clone().requires_grad_(), *arguments[1:], window_size=(-1, 0), **options
    )
    monkeypatch.setattr("clearhead.functional.varlen.gather_pages", lambda *_: pytest.fail("pages were copied"))
    output = ch.functional.varlen_attn(*arguments, window_size=(-1, 0), **options)
    torch.testing.assert_close(output, gathered.detach(), rtol=1e-5, atol=1e-5)
