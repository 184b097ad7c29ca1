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

pytestmark = needs_native

#: Every layer under one mask, and one under every mask.
CASES = [(*within, MASK_IDS[place % 2]) for place, within in enumerate(WITHIN)]
CASES += [("gelu", True, dtype, mask) for dtype in DTYPES for mask in MASK_IDS[2:]]


@pytest.mark.parametrize(("activation", "bias", "dtype", "mask"), CASES, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_every_gradient(
    kind: type[Block], norm_first: bool, activation: str, bias: bool, dtype: torch.dtype, mask: str
) -> None:
    own = block(kind, dtype, norm_first=norm_first, activation=activation, bias=bias)
    checked(own, tokens(dtype), MASKS[MASK_IDS.index(mask)])


@pytest.mark.parametrize(("activation", "bias", "dtype"), WITHIN, ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_gates(norm_first: bool, activation: str, bias: bool, dtype: torch.dtype) -> None:
    norm = "rms" if norm_first else "layer"
    own = block(dtype=dtype, norm_first=norm_first, activation=activation, bias=bias, gated=True, norm=norm)
    checked(own, tokens(dtype), ch.Causal())


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
@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
def test_of_any_size(
    norm_first: bool, dtype: torch.dtype, batch: int, length: int, width: int, heads: int, options: dict[str, Any]
) -> None:
    own = block(DecoderBlock, dtype, width, heads, norm_first=norm_first, **options)
    checked(own, tokens(dtype, batch, length, width))


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_norms(dtype: torch.dtype, norm_first: bool) -> None:
    for first, second in (
        (nn.RMSNorm(32, eps=1e-3), nn.RMSNorm(32, eps=1e-6)),
        (nn.LayerNorm(32, eps=0.1), nn.LayerNorm(32, bias=False)),
        (nn.RMSNorm(32, eps=0.5), nn.LayerNorm(32, elementwise_affine=False)),
        (nn.LayerNorm(32), nn.RMSNorm(32, eps=0.5, elementwise_affine=False)),
    ):
        own = block(norm_first=norm_first)
        own.attention_norm, own.feedforward_norm = first, second
        checked(own.to(dtype), tokens(dtype))


def test_a_norm_of_another_width_is_refused() -> None:
    own, x = block(), tokens()
    for norm in (nn.LayerNorm(16), nn.LayerNorm(16, elementwise_affine=False), nn.RMSNorm(8, elementwise_affine=False)):
        own.feedforward_norm = norm
        for _ in range(3):
            with pytest.raises(RuntimeError, match="normalized_shape"):
                own(x)


def test_a_norm_in_float32_in_a_layer_of_16_bits() -> None:
    own, x = block(dtype=torch.bfloat16), tokens(torch.bfloat16)
    own.feedforward_norm.float()
    unfused(own, x)
    assert torch.equal(own(x), by_modules(own, x))


@pytest.mark.parametrize("activation", ["none", "tanh"])
def test_both_forms_of_gelu(activation: str) -> None:
    own = block()
    own.feedforward.activation = nn.GELU(approximate=activation)
    checked(own, tokens())


@pytest.mark.parametrize("norm_first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_gradients_too(dtype: torch.dtype, norm_first: bool) -> None:
    own, x = block(dtype=dtype, norm_first=norm_first), tokens(dtype)
    right = fused(own, x, mask=ch.Causal())
    for context in (torch.no_grad, torch.inference_mode):
        for _ in range(2):
            with context():
                assert torch.equal(own(x, mask=ch.Causal()), right)
