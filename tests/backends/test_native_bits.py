"""The bits of a query's results: the same however its sequence is computed.

Every test computes a sequence alone in one call, and then in another way: in parts, as one decoded token, in a batch,
padded, packed, from pages or from a cache that slides, with other threads, heads and statistics.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import pytest
import torch
from torch import Tensor

import clearhead as ch
from tests.agreement import draw, needs_native

pytestmark = needs_native


@pytest.fixture(autouse=True)
def _invariant() -> Iterator[None]:
    with ch.invariant():
        yield


LSE: Final = 1
#: Maximum, entropy, distance, sink mass and the largest weights: what belongs to one query.
BY_ROW: Final = 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8
SINK_KEYS: Final = 3
TOP: Final = 4
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
MASKS: Final = ("none", "causal", "window", "prefix", "table", "blocks")
RULES: Final = ("none", "alibi", "cap", "distance", "bias", "sink")
SEEDS: Final = range(16)
MORE: Final = range(16, 400)
#: Keys of a tile, where weights are rescaled; sequences end around them.
TILE: Final = 512


@dataclass(frozen=True)
class Sequence:
    """A sequence, and the options of its attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: str
    rule: str
    window: int
    prefix: int
    table: Tensor

    @classmethod
    def of(cls, rng: random.Random, *, masks: tuple[str, ...] = MASKS, longest: int = 1200) -> Sequence:
        kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 1, 2, 3, 4, 7, 8])
        length = rng.choice([1, 5, 17, 63, 64, 100, 255, 256, 257, 500, 511, 512, 513, 700, 1025, 1100])
        length, dtype = min(length, longest), rng.choice(DTYPES)
        dim, value_dim = rng.choice([(64, 64), (128, 128), (64, 32), (40, 40), (17, 9), (80, 48), (256, 256)])
        seed = rng.randrange(10**6)
        heads = kv_heads * group
        return cls(
            draw(1, heads, length, dim, seed=seed, grad=False).to(dtype) * 2,
            draw(1, kv_heads, length, dim, seed=seed + 1, grad=False).to(dtype),
            draw(1, kv_heads, length, value_dim, seed=seed + 2, grad=False).to(dtype),
            rng.choice(masks), rng.choice(RULES), rng.choice([0, 3, 40, 300, 600]), rng.randrange(1, length + 1),
            draw(1, 1, length, length, seed=seed + 3, grad=False),
        )  # fmt: skip

    @property
    def length(self) -> int:
        return self.key.shape[2]

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    def part(self, first: int, last: int, first_key: int = 0, **given: Any) -> list[Tensor]:
        """Output and statistics of queries ``[first, last)`` that read keys from ``first_key`` on."""
        causal = self.mask in ("causal", "window")
        stop = last if causal else self.length
        keys = slice(first_key, stop)
        options = self.options(first, last, keys)
        return call(self.query[:, :, first:last], self.key[:, :, keys], self.value[:, :, keys], **{**options, **given})

    def options(self, first: int, last: int, keys: slice) -> dict[str, Any]:
        """The operator's arguments for queries ``[first, last)`` and these keys."""
        options: dict[str, Any] = {"query_offset": first - keys.start, "first_position": keys.start}
        if self.mask in ("causal", "window"):
            options["after"] = 0
        if self.mask == "window":
            options["before"] = self.window
        if self.mask == "prefix":
            stops = torch.arange(first, last, dtype=torch.int32).add(1).clamp(min=self.prefix)[None, None, :, None]
            options.update(start=torch.zeros_like(stops), stop=stops - keys.start)
        if self.mask == "table":
            options["allowed"] = self.table[:, :, first:last, keys] > 0.3
        if self.mask == "blocks":
            options.update(blocks=self.table[:, :, ::32, ::32] > 0.2, block_size=32)
        options.update(self.rules(first, last, keys))
        return options

    def rules(self, first: int, last: int, keys: slice) -> dict[str, Any]:
        kinds: dict[str, tuple[int, list[float], list[Tensor]]] = {
            "alibi": (1, [], [torch.linspace(0.01, 0.3, self.heads)]),
            "distance": (2, [], [self.table[0, 0, :1, :1].expand(self.heads, 31).contiguous() + torch.arange(31.0)]),
            "bias": (3, [], [self.table[:, :, first:last, keys]]),
            "cap": (4, [2.5], []),
        }
        options: dict[str, Any] = {"sink": torch.linspace(-1.0, 2.0, self.heads)} if self.rule == "sink" else {}
        if self.rule in kinds:
            kind, values, tables = kinds[self.rule]
            options.update(rule_kinds=[kind], rule_values=values, rule_tables=tables)
        return options


def call(query: Tensor, key: Tensor, value: Tensor, *, observed: bool = False, **options: Any) -> list[Tensor]:
    """Output and log-sum-exp, and the statistics of each query where it is observed."""
    returns, scale = LSE, query.shape[3] ** -0.5
    if observed:
        returns |= BY_ROW
        options["statistic_sizes"] = [min(SINK_KEYS, key.shape[2]), min(TOP, key.shape[2]), 0, 0]
    results: list[Tensor] = torch.ops.clearhead.attention_forward.default(query, key, value, scale, returns, **options)
    return results


def same(part: list[Tensor], whole: list[Tensor], rows: slice, heads: slice = slice(None)) -> None:
    assert len(part) == len(whole)
    for index, (one, all_of) in enumerate(zip(part, whole, strict=True)):
        expected = all_of[:, heads, rows]
        assert torch.equal(one, expected), f"result {index}: {(one.double() - expected.double()).abs().max()}"


def parts(rng: random.Random, length: int) -> Iterator[tuple[int, int]]:
    """A sequence cut anywhere, into a few parts."""
    cuts = sorted({0, length, *(rng.randrange(length + 1) for _ in range(rng.choice([1, 2, 4])))})
    return pairwise(cuts)


def check_parts(seed: int) -> None:
    rng = random.Random(seed)
    sequence, observed = Sequence.of(rng), rng.random() < 0.4
    whole = sequence.part(0, sequence.length, observed=observed)
    for first, last in parts(rng, sequence.length):
        # With one tile or more, top-k counts keys of the call.
        if not observed or last >= TOP or sequence.mask not in ("causal", "window"):
            same(sequence.part(first, last, observed=observed), whole, slice(first, last))
    for _ in range(3):
        row = rng.randrange(sequence.length)
        same(sequence.part(row, row + 1), whole[:2], slice(row, row + 1))
    plain = sequence.part(0, sequence.length)
    same(plain, whole[:2], slice(None))


def check_threads(seed: int) -> None:
    rng = random.Random(seed)
    sequence, before = Sequence.of(rng), torch.get_num_threads()
    first = max(0, sequence.length - rng.choice([1, 2, 5, 13, 200, sequence.length]))
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(sequence.part(first, sequence.length))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        same(other, results[0], slice(None))


def check_batch(seed: int) -> None:
    rng = random.Random(seed)
    sequence = Sequence.of(rng, masks=("none", "causal", "window"))
    if sequence.rule == "bias":
        sequence = replace(sequence, rule="none")
    whole = sequence.part(0, sequence.length)
    batch, place = rng.choice([2, 5, 40]) if sequence.length < TILE else 2, rng.randrange(2)
    first = rng.choice([0, sequence.length - 1, max(0, sequence.length - 9)])
    stacked = [
        torch.cat([tensor if index == place else torch.roll(tensor, index + 1, 2) for index in range(batch)])
        for tensor in (sequence.query, sequence.key, sequence.value)
    ]
    options = sequence.options(first, sequence.length, slice(0, sequence.length))
    result = call(stacked[0][:, :, first:], *stacked[1:], **options)
    same([part[place : place + 1] for part in result], whole, slice(first, None))


def check_heads(seed: int) -> None:
    rng = random.Random(seed)
    sequence = Sequence.of(rng)
    whole = sequence.part(0, sequence.length)
    group = sequence.heads // sequence.key.shape[1]
    kv_head, count = rng.randrange(sequence.key.shape[1]), rng.randrange(1, group + 1)
    first = rng.randrange(group - count + 1) + kv_head * group
    heads = slice(first, first + count)
    row = rng.choice([0, max(0, sequence.length - 3)])
    options = sequence.options(row, sequence.length, slice(0, sequence.length))
    if options.get("rule_tables") and sequence.rule in ("alibi", "distance"):
        options["rule_tables"] = [options["rule_tables"][0][heads]]
    if "sink" in options:
        options["sink"] = options["sink"][heads]
    keys = (tensor[:, kv_head : kv_head + 1] for tensor in (sequence.key, sequence.value))
    same(call(sequence.query[:, heads, row:], *keys, **options), whole, slice(row, None), heads=heads)


def padded(tensor: Tensor, left: int, right: int) -> Tensor:
    """A sequence with NaN around it, in a batch of two."""
    around = [tensor.new_full((*tensor.shape[:2], count, tensor.shape[3]), torch.nan) for count in (left, right)]
    one = torch.cat([around[0], tensor, around[1]], 2)
    other = draw(*one.shape, seed=7, grad=False).to(one.dtype)
    return torch.cat([one, other])


def check_padding(seed: int) -> None:
    rng = random.Random(seed)
    sequence, observed = Sequence.of(rng, masks=("none", "causal", "window", "table"), longest=600), rng.random() < 0.3
    length = sequence.length
    whole = sequence.part(0, length, observed=observed)
    left, right = rng.choice([(0, 9), (5, 0), (16, 0), (301, 0), (3, 4), (512, 0)])
    total = left + length + right
    tensors = [padded(tensor, left, right) for tensor in (sequence.query, sequence.key, sequence.value)]
    first = rng.choice([0, left, left + length - 1, left + length // 2])
    last = left + length if right == 0 or rng.random() < 0.5 else total
    for asked in (range(first, last), range(left + length - 1, left + length)):
        result = padded_part(sequence, tensors, left, asked, observed)
        low, high = max(asked.start, left), min(asked.stop, left + length)
        # The first keys of the call are padding, and keys are counted with it.
        counted = (5, 6, 7) if length < TOP else (5, 7) if left else ()
        compared = [
            [part for index, part in enumerate(each) if not observed or index not in counted]
            for each in (result, whole)
        ]
        real = [part[:1, :, low - asked.start : high - asked.start] for part in compared[0]]
        same(real, compared[1], slice(low - left, high - left))


def padded_part(sequence: Sequence, tensors: list[Tensor], left: int, asked: range, observed: bool) -> list[Tensor]:
    """Queries ``asked`` of a padded batch."""
    query, key, value = tensors
    length, total = sequence.length, query.shape[2]
    first, last = asked.start, asked.stop
    stop = last if sequence.mask in ("causal", "window") and left + length == total else total
    options = sequence.options(0, length, slice(0, length))
    rows = torch.tensor([left, 0], dtype=torch.int32), torch.tensor([left + length, total], dtype=torch.int32)
    shaped = [bound.clamp(max=stop)[:, None, None, None].expand(2, 1, last - first, 1).contiguous() for bound in rows]
    options.update(query_offset=first, start=shaped[0], stop=shaped[1])
    if "allowed" in options:
        whole_table = torch.ones(1, 1, total, total, dtype=torch.bool)
        whole_table[:, :, left : left + length, left : left + length] = options["allowed"]
        options["allowed"] = whole_table[:, :, first:last, :stop]
    if sequence.rule == "bias":
        bias = torch.zeros(1, 1, total, total)
        bias[:, :, left : left + length, left : left + length] = options["rule_tables"][0]
        options["rule_tables"] = [bias[:, :, first:last, :stop]]
    return call(query[:, :, first:last], key[:, :, :stop], value[:, :, :stop], observed=observed, **options)


def check_packed(seed: int) -> None:
    rng = random.Random(seed)
    sequence = Sequence.of(rng, masks=("none", "causal", "window"), longest=600)
    if sequence.rule == "bias":
        sequence = replace(sequence, rule="none")
    before, following = rng.choice([(1, 0), (7, 30), (64, 1), (300, 50)])
    whole = sequence.part(0, sequence.length)

    def packed(tensor: Tensor) -> Tensor:
        _, heads, _, dim = tensor.shape
        one, other = (draw(1, heads, count, dim, grad=False).to(tensor.dtype) for count in (before, following))
        return torch.cat([one, tensor, other], 2)

    lengths = [before, sequence.length, *([following] if following else [])]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    start, stop = (
        torch.repeat_interleave(each, torch.tensor(lengths))[None, None, :, None].contiguous()
        for each in (bounds[:-1], bounds[1:])
    )
    options = {**sequence.options(0, sequence.length, slice(0, sequence.length)), "query_offset": 0}
    tensors = [packed(tensor) for tensor in (sequence.query, sequence.key, sequence.value)]
    result = call(*tensors, **{**options, "start": start, "stop": stop})
    same([part[:, :, before : before + sequence.length] for part in result], whole, slice(None))


def check_sliding(seed: int) -> None:
    rng = random.Random(seed)
    sequence = Sequence.of(rng, masks=("window",))
    whole = sequence.part(0, sequence.length)
    last = rng.randrange(1, sequence.length + 1)
    first = max(0, last - rng.choice([1, 1, 2, 6, 30]))
    oldest = rng.randrange(max(0, first - sequence.window) + 1)
    same(sequence.part(first, last, oldest), whole, slice(first, last))


def check_pages(seed: int) -> None:
    rng = random.Random(seed)
    sequence = Sequence.of(rng, masks=("causal", "window"))
    if sequence.rule == "bias":
        sequence = replace(sequence, rule="none")
    size, queries = rng.choice([1, 5, 16, 48, 256]), min(sequence.length, rng.choice([1, 1, 3, 8, 40]))
    whole = sequence.part(0, sequence.length)
    columns = -(-sequence.length // size)
    pages = torch.randperm(columns + 2, generator=torch.Generator().manual_seed(seed))

    def paged(tensor: Tensor) -> Tensor:
        memory = tensor.new_full((columns + 2, size, tensor.shape[1], tensor.shape[3]), torch.nan)
        rows = torch.nn.functional.pad(tensor[0].transpose(0, 1), (0, 0, 0, 0, 0, columns * size - sequence.length))
        memory[pages[:columns]] = rows.unflatten(0, (columns, size))
        return memory

    options = sequence.options(sequence.length - queries, sequence.length, slice(0, sequence.length))
    del options["query_offset"], options["first_position"]
    output, lse = torch.ops.clearhead.attention_paged.default(
        sequence.query[:, :, -queries:].contiguous(), paged(sequence.key), paged(sequence.value),
        pages[None, :columns].to(torch.int32), torch.tensor([sequence.length], dtype=torch.int32),
        sequence.query.shape[3] ** -0.5, True, **options,
    )  # fmt: skip
    same([output, lse], whole, slice(sequence.length - queries, None))


CHECKS: Final = {
    "parts": check_parts, "threads": check_threads, "batch": check_batch, "heads": check_heads,
    "padding": check_padding, "packed": check_packed, "sliding": check_sliding, "pages": check_pages,
}  # fmt: skip


@pytest.mark.parametrize("way", CHECKS)
def test_a_query_has_the_bits_of_the_whole_prefill(way: str) -> None:
    for seed in SEEDS:
        CHECKS[way](seed)


@pytest.mark.slow
@pytest.mark.parametrize("way", CHECKS)
def test_many_queries_have_the_bits_of_the_whole_prefill(way: str) -> None:
    for seed in MORE:
        CHECKS[way](seed)
