"""Fused layers of any size: the definition's values within the error budget, the same bits on every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.nn import DecoderBlock
from tests.agreement import needs_native
from tests.nn.layers.definition import (
    DTYPES,
    KINDS,
    LLAMA,
    MASK_IDS,
    MASKS,
    WITHIN,
    Block,
    block,
    by_modules,
    checked,
    fused,
    tokens,
    unfused,
)

pytestmark = [needs_native, pytest.mark.covering(1)]

#: Every layer under one mask, and one under every mask.
CASES = [(*within, MASK_IDS[place % 2]) for place, within in enumerate(WITHIN)]
CASES += [("gelu", True, dtype, mask) for dtype in DTYPES for mask in MASK_IDS[2:]]


@pytest.mark.parametrize(("activation", "bias", "dtype", "mask"), CASES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_every_gradient(
    kind: type[Block], norm_first: bool, activation: str, bias: bool, dtype: torch.dtype, mask: str
) -> None:
    module = block(kind, dtype, norm_first=norm_first, activation=activation, bias=bias)
    checked(module, tokens(dtype), MASKS[MASK_IDS.index(mask)])


@pytest.mark.parametrize(("activation", "bias", "dtype"), WITHIN, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_gated_feedforwards_match_the_formula(
    norm_first: bool, activation: str, bias: bool, dtype: torch.dtype
) -> None:
    norm = "rms" if norm_first else "layer"
    module = block(dtype=dtype, norm_first=norm_first, activation=activation, bias=bias, gated=True, norm=norm)
    checked(module, tokens(dtype), ch.Causal())


@pytest.mark.parametrize(
    ("width", "heads", "options"),
    [(20, 2, {}), (36, 3, {"num_kv_heads": 1}), (32, 2, {"num_kv_heads": 1}),
     (64, 4, {"num_kv_heads": 2}), (96, 3, {}), (96, 6, {"feedforward_dim": 100}),
     (64, 1, {"feedforward_dim": 33}), (64, 4, {"num_kv_heads": 2, "rotary": True}), (36, 3, {"rotary": 100.0}),
     (32, 4, {**LLAMA, "feedforward_dim": 100}), (20, 2, {"gated": True, "feedforward_dim": 33})],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 17), (1, 300)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_any_size_matches_the_formula(
    norm_first: bool, dtype: torch.dtype, batch: int, length: int, width: int, heads: int, options: dict[str, Any]
) -> None:
    module = block(DecoderBlock, dtype, width, heads, norm_first=norm_first, **options)
    checked(module, tokens(dtype, batch, length, width))


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_norms_match_the_formula(dtype: torch.dtype, norm_first: bool) -> None:
    for first, second in (
        (nn.RMSNorm(32, eps=1e-3), nn.RMSNorm(32, eps=1e-6)),
        (nn.LayerNorm(32, eps=0.1), nn.LayerNorm(32, bias=False)),
        (nn.RMSNorm(32, eps=0.5), nn.LayerNorm(32, elementwise_affine=False)),
        (nn.LayerNorm(32), nn.RMSNorm(32, eps=0.5, elementwise_affine=False)),
    ):
        module = block(norm_first=norm_first)
        module.attention_norm, module.feedforward_norm = first, second
        checked(module.to(dtype), tokens(dtype))


def test_a_norm_of_another_width_raises() -> None:
    module, x = block(), tokens()
    for norm in (nn.LayerNorm(16), nn.LayerNorm(16, elementwise_affine=False), nn.RMSNorm(8, elementwise_affine=False)):
        module.feedforward_norm = norm
        for _ in range(3):
            with pytest.raises(RuntimeError, match="normalized_shape"):
                module(x)


def test_a_float32_norm_in_a_bfloat16_layer_runs_op_by_op() -> None:
    module, x = block(dtype=torch.bfloat16), tokens(torch.bfloat16)
    module.feedforward_norm.float()
    unfused(module, x)
    assert torch.equal(module(x), by_modules(module, x))


@pytest.mark.parametrize("activation", ["none", "tanh"])
def test_exact_and_tanh_gelu_match_the_formula(activation: str) -> None:
    module = block()
    module.feedforward.activation = nn.GELU(approximate=activation)
    checked(module, tokens())


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_grad_and_inference_mode_give_the_same_bits(dtype: torch.dtype, norm_first: bool) -> None:
    module, x = block(dtype=dtype, norm_first=norm_first), tokens(dtype)
    right = fused(module, x, mask=ch.Causal())
    for context in (torch.no_grad, torch.inference_mode):
        for _ in range(2):
            with context():
                assert torch.equal(module(x, mask=ch.Causal()), right)
