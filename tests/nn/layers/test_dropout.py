"""Dropout of a fused layer matches its definition."""

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
    output_and_gradients,
    same,
    seeds_of,
    tokens,
    unfused,
)

pytestmark = [needs_native, pytest.mark.covering(1)]

DROPS = [(0.3, 0.0, 0.0), (0.0, 0.3, 0.0), (0.0, 0.0, 0.3), (0.0, 0.5, 0.25), (0.2, 0.4, 0.1), (0.9, 0.9, 0.9)]


class TestDropout:
    @pytest.mark.parametrize("drops", DROPS, ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
    @pytest.mark.parametrize("activation", ["gelu", "relu", "silu, gated"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_dropout_matches_its_definition(
        self,
        kind: type[Block],
        activation: str,
        norm_first: bool,
        dtype: torch.dtype,
        drops: tuple[float, ...],
    ) -> None:
        activation, _, gated = activation.partition(", ")
        # The gradient of a key bias is 0: a sum that cancels, so only rounding is left if nearly all is dropped.
        options = {"norm_first": norm_first, "activation": activation, "gated": bool(gated), "bias": not gated}
        module, x = dropping(kind, dtype, drops, **options), tokens(dtype)
        mask = ch.Padding(torch.tensor([7, 3]))
        factors = factors_of(module, x, seeds_of(module))
        first = output_and_gradients(module, x, mask)
        budget_of(module, x, mask, first, factors)
        same(output_and_gradients(module, x, mask), first)
        budget_of(
            module, x, mask, output_and_gradients(module, x, mask, seed=8), factors_of(module, x, seeds_of(module, 8))
        )

    def test_many_wide_rows_match_the_formula(self) -> None:
        module = dropping(EncoderBlock, torch.float32, (0.1, 0.2, 0.3), width=160, heads=5, feedforward_dim=300)
        x = tokens(batch=3, length=65, width=160)
        for _ in range(2):
            budget_of(module, x, None, output_and_gradients(module, x), factors_of(module, x, seeds_of(module)))

    def test_each_call_draws_a_new_mask(self) -> None:
        module, x = block(dropout=0.5), tokens()
        outputs = [module(x).detach() for _ in range(6)]
        assert len({tuple(output.flatten().tolist()) for output in outputs}) == 6
        seeded = []
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            seeded.append(module(x).detach())
        assert torch.equal(seeded[0], seeded[2])
        assert not torch.equal(seeded[0], seeded[1])

    def test_attention_and_feedforward_dropout_are_independent(self) -> None:
        """Both sublayers output ones, so the value added to the residual counts those not dropped."""
        module = dropping(EncoderBlock, torch.float32, (0.0, 0.0, 0.5))
        with torch.no_grad():
            for layer in (module.attention.output_projection, module.feedforward.contract):
                layer.weight.zero_()
                layer.bias.fill_(1.0)
        x = torch.zeros(2, 33, 32, requires_grad=True)
        added = fused(module, x)
        counts = [int((added == value).sum()) for value in (0.0, 2.0, 4.0)]
        assert sum(counts) == added.numel()
        share = [count / added.numel() for count in counts]
        # 2112 elements: the standard deviation of a share of 0.5 is 0.011.
        assert share == pytest.approx([0.25, 0.5, 0.25], abs=0.05)

    def test_dropout_of_1_runs_op_by_op(self) -> None:
        module, x = dropping(EncoderBlock, torch.float32, (0.0, 0.0, 1.0)), tokens()
        output = unfused(module, x)
        assert torch.equal(output, x)

    def test_eval_mode_drops_nothing(self) -> None:
        module, x = dropping(EncoderBlock, torch.float32, (0.3, 0.3, 0.3)), tokens()
        module(x)
        module.eval()
        state = torch.random.get_rng_state()
        checked(module, x)
        torch.manual_seed(0)
        torch.random.set_rng_state(state)
        module(x)
        assert torch.equal(torch.random.get_rng_state(), state)

    @pytest.mark.parametrize("part", ["attention", "feedforward", "residual_dropout"])
    def test_a_part_in_eval_mode_drops_nothing(self, part: str) -> None:
        module, x = block(dropout=0.4), tokens()
        module.get_submodule(part).eval()
        off = {"attention": "weights", "feedforward": "hidden", "residual_dropout": "after"}[part]
        torch.manual_seed(7)
        drops = [
            0.0 if name == off or (name == "last" and off == "after") else 0.4
            for name in ("weights", "after", "hidden", "last")
        ]
        factors = factors_of(module, x, [draw_seed(drop) for drop in drops])
        for name in ("weights", "after", "hidden", "last"):
            if name == off or (name == "last" and off == "after"):
                setattr(factors, name, torch.ones(()).expand(getattr(factors, name).shape))
        budget_of(module, x, None, output_and_gradients(module, x), factors)
