"""Dropout of a fused layer, by its definition."""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.nn import EncoderBlock
from clearhead.problem import draw_seed
from tests.agreement import needs_native
from tests.nn.layers.definition import (
    DTYPES,
    KINDS,
    Block,
    block,
    budget_of,
    checked,
    dropping,
    factors_of,
    fused,
    numbers,
    same,
    seeds_of,
    tokens,
    unfused,
)

pytestmark = needs_native

DROPS = [(0.3, 0.0, 0.0), (0.0, 0.3, 0.0), (0.0, 0.0, 0.3), (0.0, 0.5, 0.25), (0.2, 0.4, 0.1), (0.9, 0.9, 0.9)]


class TestDropout:
    @pytest.mark.parametrize("drops", DROPS, ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
    @pytest.mark.parametrize("activation", ["gelu", "relu", "silu, gated"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_it_is_its_definition(
        self,
        kind: type[Block],
        activation: str,
        norm_first: bool,
        dtype: torch.dtype,
        drops: tuple[float, ...],
    ) -> None:
        activation, _, gated = activation.partition(", ")
        # The gradient of a bias of keys is 0, a sum that cancels: where nearly all is dropped it is all rounding.
        options = {"norm_first": norm_first, "activation": activation, "gated": bool(gated), "bias": not gated}
        own, x = dropping(kind, dtype, drops, **options), tokens(dtype)
        mask = ch.Padding(torch.tensor([7, 3]))
        factors = factors_of(own, x, seeds_of(own))
        first = numbers(own, x, mask)
        budget_of(own, x, mask, first, factors)
        same(numbers(own, x, mask), first)
        budget_of(own, x, mask, numbers(own, x, mask, seed=8), factors_of(own, x, seeds_of(own, 8)))

    def test_wide_rows_and_many(self) -> None:
        own = dropping(EncoderBlock, torch.float32, (0.1, 0.2, 0.3), width=160, heads=5, feedforward_dim=300)
        x = tokens(batch=3, length=65, width=160)
        for _ in range(2):
            budget_of(own, x, None, numbers(own, x), factors_of(own, x, seeds_of(own)))

    def test_others_each_time(self) -> None:
        own, x = block(dropout=0.5), tokens()
        outputs = [own(x).detach() for _ in range(6)]
        assert len({tuple(output.flatten().tolist()) for output in outputs}) == 6
        seeded = []
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            seeded.append(own(x).detach())
        assert torch.equal(seeded[0], seeded[2])
        assert not torch.equal(seeded[0], seeded[1])

    def test_those_after_attention_and_feedforward_are_two(self) -> None:
        """Both parts give ones, so that what is added to the residual shows what was kept."""
        own = dropping(EncoderBlock, torch.float32, (0.0, 0.0, 0.5))
        with torch.no_grad():
            for layer in (own.attention.output_projection, own.feedforward.contract):
                layer.weight.zero_()
                layer.bias.fill_(1.0)
        x = torch.zeros(2, 33, 32, requires_grad=True)
        added = fused(own, x)
        counts = [int((added == value).sum()) for value in (0.0, 2.0, 4.0)]
        assert sum(counts) == added.numel()
        share = [count / added.numel() for count in counts]
        # 2112 places: one standard deviation is 0.011 for a half.
        assert share == pytest.approx([0.25, 0.5, 0.25], abs=0.05)

    def test_what_drops_all_runs_op_by_op(self) -> None:
        own, x = dropping(EncoderBlock, torch.float32, (0.0, 0.0, 1.0)), tokens()
        output = unfused(own, x)
        assert torch.equal(output, x)

    def test_none_in_eval_mode(self) -> None:
        own, x = dropping(EncoderBlock, torch.float32, (0.3, 0.3, 0.3)), tokens()
        own(x)
        own.eval()
        state = torch.random.get_rng_state()
        checked(own, x)
        torch.manual_seed(0)
        torch.random.set_rng_state(state)
        own(x)
        assert torch.equal(torch.random.get_rng_state(), state)

    @pytest.mark.parametrize("part", ["attention", "feedforward", "residual_dropout"])
    def test_one_part_in_eval_mode(self, part: str) -> None:
        own, x = block(dropout=0.4), tokens()
        own.get_submodule(part).eval()
        off = {"attention": "weights", "feedforward": "hidden", "residual_dropout": "after"}[part]
        torch.manual_seed(7)
        drops = [
            0.0 if name == off or (name == "last" and off == "after") else 0.4
            for name in ("weights", "after", "hidden", "last")
        ]
        factors = factors_of(own, x, [draw_seed(drop) for drop in drops])
        for name in ("weights", "after", "hidden", "last"):
            if name == off or (name == "last" and off == "after"):
                setattr(factors, name, torch.ones(()).expand(getattr(factors, name).shape))
        budget_of(own, x, None, numbers(own, x), factors)
