"""Totals of a corpus do not depend on how its blocks are grouped, and agree with the formula over texts."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from clearhead.corpus.figures import BlockFigures, Text
from clearhead.corpus.schedule import assign, work_of
from clearhead.corpus.totals import PAIRS, Totals
from clearhead.observe.head_sums import FIGURES


def _blocks(count: int, seed: int) -> list[BlockFigures]:
    draw, blocks, line = np.random.default_rng(seed), [], 0
    for _ in range(count):
        texts = []
        for _ in range(draw.integers(0, 5)):
            line += 1
            lengths = draw.integers(1, 9, size=draw.integers(1, 4)).tolist()
            texts.append(Text(line, sum(lengths), [[0] * length for length in lengths]))
        # Magnitudes that round differently in another order.
        sums = {name: draw.standard_normal((len(texts), 3, 6)) * 10.0 ** draw.integers(-6, 7) for name in ("a", "b")}
        blocks.append(BlockFigures(texts, ["bad"] if draw.integers(2) else [], sums))
    return blocks


def _grouped(blocks: list[BlockFigures], groups: list[list[int]]) -> Totals:
    total = Totals()
    for group in groups:
        part = Totals()
        for index in group:
            part.add(Totals.of(index, blocks[index]))
        total.add(Totals.from_dict(json.loads(json.dumps(part.to_dict()))))
    return total


@pytest.mark.parametrize("seed", range(5))
def test_totals_do_not_depend_on_order_or_grouping(seed: int) -> None:
    blocks = _blocks(12, seed)
    whole = _grouped(blocks, [list(range(12))]).to_dict()
    shuffled = random.Random(seed).sample(range(12), 12)
    for groups in ([[index] for index in shuffled], [shuffled[:5], [], shuffled[5:]]):
        assert _grouped(blocks, groups).to_dict() == whole


def test_figures_of_floats_alone_depend_on_the_order() -> None:
    """The test above can fail: the same blocks, added as floats, give other bits in another order."""
    sums = [block.layers["a"].sum(axis=0) for block in _blocks(12, 0)]
    assert (sum(sums[1:], sums[0]) != sum(sums[-2::-1], sums[-1])).any()


@pytest.mark.parametrize("seed", range(5))
def test_mean_and_error_agree_with_the_formula_over_texts(seed: int) -> None:
    blocks = _blocks(12, seed)
    total = _grouped(blocks, [list(range(12))])
    texts = [text for block in blocks for text in block.texts]
    assert total.texts == len(texts)
    assert total.tokens == sum(text.tokens for text in texts)
    assert total.longest == min(((text.tokens, text.line) for text in texts), key=lambda each: (-each[0], each[1]))
    for layer in ("a", "b"):
        sums = np.concatenate([block.layers[layer] for block in blocks])
        for place, figure in enumerate(FIGURES):
            n = np.array([text.queries - len(text.parts) * (figure in PAIRS) for text in texts], dtype=float)
            for head in range(3):
                s = sums[:, head, place]
                mean, error = total.moments(layer, head, figure)
                assert mean == pytest.approx(s.sum() / n.sum(), rel=1e-9, abs=1e-12)
                spread = (len(texts) / (len(texts) - 1) * ((s - mean * n) ** 2).sum()) ** 0.5 / n.sum()
                assert error == pytest.approx(spread, rel=1e-6)


def test_one_text_has_no_error_and_one_token_has_no_pair() -> None:
    block = BlockFigures([Text(1, 1, [[0]])], [], {"a": np.ones((1, 2, 6))})
    total = Totals.of(0, block)
    assert total.moments("a", 1, "entropy") == (1.0, None)
    assert total.moments("a", 1, "previous") == (0.0, None)


def test_work_is_balanced_and_every_block_has_one_rank() -> None:
    draw = random.Random(0)
    work = {index: work_of([draw.randrange(1, 512) for _ in range(64)], 2304) for index in range(400)}
    for ranks in (1, 2, 3, 64):
        parts = assign(work, ranks)
        assert sorted(index for part in parts for index in part) == list(range(400))
        loads = [sum(work[index] for index in part) for part in parts]
        assert max(loads) <= 1.05 * sum(loads) / ranks or ranks > 32
        assert parts == assign(dict(reversed(work.items())), ranks)


def test_a_long_block_gets_a_rank_to_itself() -> None:
    assert assign({0: 1, 1: 1, 2: 50, 3: 1}, 2) == [[2], [0, 1, 3]]
