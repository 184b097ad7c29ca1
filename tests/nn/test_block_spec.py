"""Blocks and stacks from a record of their options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from clearhead.errors import ShapeError, UnsupportedError
from clearhead.nn import BlockSpec, Decoder, DecoderBlock, Encoder, EncoderBlock
from clearhead.positions import Rotary
from clearhead.scores import SoftCap

SPEC = BlockSpec(
    16, 4, feedforward_dim=24, dropout=0.2, attention_dropout=0.1, norm_first=False, activation="silu", bias=False,
    num_kv_heads=2, rotary=Rotary(500.0), gated=True, norm="rms", checkpoint_activations=True,
)  # fmt: skip
#: What a constructor takes besides a block's options.
OTHERS: Mapping[type[nn.Module], dict[str, Any]] = {
    EncoderBlock: {"scores": SoftCap(30.0)},
    DecoderBlock: {"scores": SoftCap(30.0), "cross_attention": True, "memory_dim": 12},
    Encoder: {"scores": SoftCap(30.0), "num_layers": 2},
    Decoder: {"scores": SoftCap(30.0), "num_layers": 2, "cross_attention": True, "memory_dim": 12},
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("spec", [BlockSpec(8, 2), SPEC], ids=["default", "every option"])
def test_module_of_a_record_is_that_of_its_options(kind: Any, spec: BlockSpec) -> None:
    torch.manual_seed(0)
    module = kind.from_spec(spec, **OTHERS[kind])
    torch.manual_seed(0)
    other = kind(**{field.name: getattr(spec, field.name) for field in fields(spec)}, **OTHERS[kind])
    assert str(module) == str(other)
    expected = other.state_dict()
    assert module.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())
    x = torch.randn(2, 5, spec.embed_dim)
    memory = {"memory": torch.randn(2, 3, 12)} if "memory_dim" in OTHERS[kind] else {}
    assert torch.equal(module.eval()(x, **memory), other.eval()(x, **memory))


@pytest.mark.parametrize("kind", OTHERS)
def test_record_has_every_option_of_a_constructor(kind: type[nn.Module]) -> None:
    parameters = inspect.signature(kind).parameters
    defaults = {field.name: field.default for field in fields(BlockSpec)}
    assert {*parameters} == {*defaults, *OTHERS[kind]}
    # A block drops elements while training, a stack does not, unless told to.
    same = {name for name in defaults if name != "dropout" and parameters[name].default is not inspect.Parameter.empty}
    assert {name: parameters[name].default for name in same} == {name: defaults[name] for name in same}


@pytest.mark.parametrize(
    "name", [field.name for field in fields(BlockSpec) if field.name not in ("embed_dim", "num_heads")]
)
def test_every_option_changes_the_module(name: str) -> None:
    """An option that is not handed on would leave the module as it is by default."""

    def said(spec: BlockSpec) -> str:
        block = EncoderBlock.from_spec(spec)
        return f"{block} {block.checkpoint_activations} {block.attention.dropout} {block.attention.rotary}"

    plain = BlockSpec(16, 4)
    assert said(replace(plain, **{name: getattr(SPEC, name)})) != said(plain)


def test_record_is_frozen_and_hashable() -> None:
    assert hash(SPEC) == hash(replace(SPEC))
    assert {SPEC: 1}[replace(SPEC)] == 1
    assert replace(SPEC, gated=False) != SPEC
    with pytest.raises(FrozenInstanceError):
        SPEC.bias = True  # type: ignore[misc]


def test_what_does_not_fit_raises_as_in_the_constructor() -> None:
    with pytest.raises(ShapeError, match=r"^MultiHeadAttention: num_heads must divide embed_dim 16; got 3\."):
        EncoderBlock.from_spec(BlockSpec(16, 3))
    with pytest.raises(UnsupportedError, match=r"^DecoderBlock: norm must "):
        Decoder.from_spec(BlockSpec(16, 4, norm="batch"), num_layers=1)
    with pytest.raises(TypeError, match="num_layers"):
        Encoder.from_spec(SPEC)
    with pytest.raises(TypeError, match="cross_attention"):
        EncoderBlock.from_spec(SPEC, cross_attention=True)
