"""Dropout of a layer in one step, by its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.backends import native_projection
from clearhead.nn import EncoderBlock
from clearhead.problem import draw_seed
from tests.nn.layers.definition import (
    DTYPES,
    KINDS,
    Block,
    block,
    budget_of,
    checked,
    dropping,
    factors_of,
    is_layer,
    layer_step_of,
    numbers,
    same,
    seeds_of,
    tokens,
)

pytestmark = pytest.mark.skipif(native_projection.absent() is not None, reason=f"{native_projection.absent()}")

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
        for _ in range(3):
            same(numbers(own, x, mask), first)
        for seed in (8, 9):  # played back under seeds of its own
            budget_of(own, x, mask, numbers(own, x, mask, seed=seed), factors_of(own, x, seeds_of(own, seed)))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
    def test_the_step_by_its_parts(self, norm_first: bool, dtype: torch.dtype) -> None:
        own, x = dropping(EncoderBlock, dtype, (0.2, 0.4, 0.1), norm_first=norm_first), tokens(dtype)
        made, tensors = layer_step_of(own, x, ch.Causal())
        torch.manual_seed(7)
        seeds = made.draw_seeds()
        assert list(seeds) == seeds_of(own)
        assert len({*seeds}) == 4

        def by_parts(_: Any, x: Tensor) -> Tensor:
            return made.by_parts(made.problems, [x], tensors, seeds)

        factors = factors_of(own, x, seeds)
        budget_of(own, x, ch.Causal(), numbers(own, x, call=by_parts, layer=False), factors)
        budget_of(own, x, ch.Causal(), numbers(own, x, ch.Causal()), factors)

    def test_wide_rows_and_many(self) -> None:
        own = dropping(EncoderBlock, torch.float32, (0.1, 0.2, 0.3), width=160, heads=5, feedforward_dim=300)
        x = tokens(batch=3, length=65, width=160)
        for _ in range(4):
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

    @pytest.mark.parametrize("calls", [0, 3], ids=["written down", "played back"])
    def test_those_behind_attention_and_feedforward_are_two(self, calls: int) -> None:
        """Both parts give ones, so that what is added to the residual shows what was kept."""
        own = dropping(EncoderBlock, torch.float32, (0.0, 0.0, 0.5))
        with torch.no_grad():
            for layer in (own.attention.output_projection, own.feedforward.contract):
                layer.weight.zero_()
                layer.bias.fill_(1.0)
        x = torch.zeros(2, 33, 32, requires_grad=True)
        for _ in range(calls):
            own(x)
        added = own(x)
        counts = [int((added == value).sum()) for value in (0.0, 2.0, 4.0)]
        assert sum(counts) == added.numel()
        share = [count / added.numel() for count in counts]
        # 2112 places: one standard deviation is 0.011 for a half.
        assert share == pytest.approx([0.25, 0.5, 0.25], abs=0.05)

    def test_what_drops_all_goes_in_parts(self) -> None:
        own, x = dropping(EncoderBlock, torch.float32, (0.0, 0.0, 1.0)), tokens()
        output = own(x)
        assert not is_layer(output)
        assert torch.equal(output, x)

    def test_none_in_eval_mode(self) -> None:
        own, x = dropping(EncoderBlock, torch.float32, (0.3, 0.3, 0.3)), tokens()
        for _ in range(3):
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
        drops = [0.0 if name == off or (name == "last" and off == "after") else 0.4
                 for name in ("weights", "after", "hidden", "last")]  # fmt: skip
        factors = factors_of(own, x, [draw_seed(drop) for drop in drops])
        for name in ("weights", "after", "hidden", "last"):
            if name == off or (name == "last" and off == "after"):
                setattr(factors, name, torch.ones(()).expand(getattr(factors, name).shape))
        budget_of(own, x, None, numbers(own, x), factors)
