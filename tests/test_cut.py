"""Parts of a call of attention as calls of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.cut import Region, cut_mask, part_of
from clearhead.dispatch import loaded
from clearhead.problem import Problem
from clearhead.statistics import Want
from tests.distributed.cases import CASES

HEADS, LENGTH = 4, 40
REGIONS = [
    Region(range(HEADS), range(12, 30), range(LENGTH)),
    Region(range(2, 4), range(3, 40), range(17, 33)),
    Region(range(1), range(5), range(30, 40)),
]


def _problem(**options: Any) -> Problem:
    torch.manual_seed(1)
    tensors = [torch.randn(2, HEADS, LENGTH, 8) for _ in range(3)]
    return Problem.of("test", *tensors, **options)


def _part(whole: Problem, region: Region) -> Problem:
    heads, queries, keys = (slice(one.start, one.stop) for one in (region.heads, region.queries, region.keys))
    query = whole.query[:, heads, queries]
    return part_of(whole, region, query, whole.key[:, heads, keys], whole.value[:, heads, keys])


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("case", CASES)
def test_part_has_the_scores_of_the_whole(case: str, region: Region) -> None:
    torch.manual_seed(0)
    options, _ = CASES[case](HEADS, LENGTH)
    whole = _problem(**options)
    part = _part(whole, region)
    heads, queries, keys = (slice(one.start, one.stop) for one in (region.heads, region.queries, region.keys))
    scores, mine = torch.zeros(2, HEADS, LENGTH, LENGTH), torch.zeros(*part.query.shape[:3], part.k_len)
    for rule, cut in zip(whole.elementwise, part.elementwise, strict=True):
        scores, mine = rule.apply(scores, *whole.indices()), cut.apply(mine, *part.indices())
    assert torch.equal(mine, scores[:, heads, queries, keys])
    if whole.mask is not None and part.mask is not None:
        allowed = whole.mask.allows(*whole.indices()).expand_as(scores)
        assert torch.equal(part.mask.allows(*part.indices()).expand_as(mine), allowed[:, heads, queries, keys])


@pytest.mark.parametrize("backend", ["native", "tiled", "reference"])
@pytest.mark.parametrize("case", ["full", "dropout", "documents", "functions"])
def test_rows_of_a_part_with_all_keys_are_those_of_the_whole(case: str, backend: str) -> None:
    options, _ = CASES[case](HEADS, LENGTH)
    whole = _problem(**options)
    run = loaded(backend).run
    with torch.no_grad():
        mine = run(_part(whole, Region(range(2, 4), range(7, 29), range(LENGTH))), Want()).output
        right = run(whole, Want()).output[:, 2:4, 7:29]
    assert torch.allclose(mine, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["native", "tiled", "reference"])
def test_dropout_of_a_part_is_that_of_its_place(backend: str) -> None:
    """With values of one key at a time, an output is one weight, which dropout has dropped or not."""
    whole = _problem(dropout=0.5, seed=3)
    dropped = []
    with torch.no_grad():
        for region in (
            Region(range(HEADS), range(LENGTH), range(LENGTH)),
            Region(range(1, 3), range(8, 31), range(20, 40)),
        ):
            part = _part(whole, region)
            ones = torch.eye(part.k_len).expand(2, len(region.heads), -1, -1)
            output = loaded(backend).run(part.with_tensors(part.query, part.key, ones), Want()).output
            dropped.append(output == 0.0)
    assert torch.equal(dropped[1], dropped[0][:, 1:3, 8:31, 20:40])


class _Even(ch.Mask):
    """A user's mask that reads no head."""

    fields = ()
    head_dependent = False

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos % 2 == 0


class _EvenHeads(_Even):
    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (k_pos + head) % 2 == 0


def test_a_part_of_the_heads_has_the_mask_itself_unless_it_reads_them() -> None:
    region = Region(range(2, 4), range(LENGTH), range(LENGTH))
    masks: list[ch.Mask] = [
        *(ch.Causal(), ch.Window(3), ch.Prefix(2), ch.Global(1), ch.Strided(2), _Even()),
        *(ch.Padding([3, 5]), ch.Documents(lengths=[10, 30])),
    ]
    assert all(cut_mask(mask, region) is mask for mask in masks)
    for mask in (_EvenHeads(), ch.MaskFunction(lambda b, h, i, j: (i >= j) & (h != 2))):
        assert cut_mask(mask, region) is not mask
    assert not (ch.Causal() & _Even()).head_dependent
    assert (ch.Causal() | _EvenHeads()).head_dependent
