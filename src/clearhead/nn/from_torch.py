"""Blocks with the weights of torch's transformer layers."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import torch
from torch import nn

from clearhead.errors import UnsupportedError
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.weights import copy_into

__all__ = ["block_like"]

_Block = TypeVar("_Block", bound=nn.Module)

#: Of each kind of layer: attentions and norms of a block, by their names in torch's layer.
_PARTS: Final[dict[type[nn.Module], tuple[dict[str, str], dict[str, str]]]] = {
    nn.TransformerEncoderLayer: (
        {"self_attn": "attention"},
        {"norm1": "attention_norm", "norm2": "feedforward_norm"},
    ),
    nn.TransformerDecoderLayer: (
        {"self_attn": "attention", "multihead_attn": "cross_attention"},
        {"norm1": "attention_norm", "norm2": "cross_norm", "norm3": "feedforward_norm"},
    ),
}


def block_like(cls: type[_Block], kind: type[nn.Module], layer: nn.Module, **more: Any) -> _Block:
    """A block of ``cls`` with the weights of torch's ``layer``; ``more`` are further arguments of the block.

    Raises:
        UnsupportedError: ``layer`` is of another kind, its activation is neither GELU nor ReLU, or its parts are not
            torch's own.
    """
    name = cls.__name__
    if not isinstance(layer, kind):
        raise UnsupportedError.about(
            f"{name}.from_torch",
            "layer",
            must=f"be a torch.nn.{kind.__name__}",
            got=type(layer).__name__,
            then=f"Build {_a(name)} and copy the weights part by part.",
        )
    attentions, norms = _PARTS[kind]
    _check_parts(name, layer, [*attentions], [*norms])
    torchs: Any = layer
    attention, expand = torchs.self_attn, torchs.linear1
    block = cls(
        attention.embed_dim,
        attention.num_heads,
        feedforward_dim=expand.out_features,
        dropout=torchs.dropout.p,
        attention_dropout=attention.dropout,
        norm_first=torchs.norm_first,
        activation=_activation_of(name, torchs),
        bias=expand.bias is not None,
        **more,
    )
    weight = expand.weight
    block.to(device=weight.device, dtype=weight.dtype)
    for theirs, ours in attentions.items():
        setattr(block, ours, MultiHeadAttention.from_torch(getattr(layer, theirs)))
    feedforward = block.get_submodule("feedforward")
    for theirs, ours in (("linear1", "expand"), ("linear2", "contract")):
        linear = getattr(layer, theirs)
        copy_into(getattr(feedforward, ours), linear.weight, linear.bias)
    for theirs, ours in norms.items():
        norm, other = getattr(block, ours), getattr(layer, theirs)
        norm.load_state_dict(other.state_dict())
        norm.eps = other.eps
    return block.train(layer.training)


def _check_parts(name: str, layer: Any, attentions: list[str], norms: list[str]) -> None:
    """Raise unless a block has parts like the layer's."""
    parts: tuple[tuple[type[nn.Module], list[str]], ...] = (
        (nn.MultiheadAttention, attentions),
        (nn.Linear, ["linear1", "linear2"]),
        (nn.LayerNorm, norms),
        (nn.Dropout, ["dropout"]),
    )
    for kind, places in parts:
        for place in places:
            part = getattr(layer, place)
            # A norm's subclass may compute something else, and all must have a bias or none.
            fits = isinstance(part, kind) and (kind is not nn.LayerNorm or type(part).forward is nn.LayerNorm.forward)
            if fits and kind is nn.LayerNorm:
                fits = part.weight is not None and (part.bias is None) == (layer.linear1.bias is None)
            if not fits:
                raise UnsupportedError.about(
                    f"{name}.from_torch",
                    "layer",
                    must=f"have a plain {kind.__name__} as its {place}",
                    got=repr(part)[:80],
                    then=f"Build {_a(name)}, exchange that part in it and copy the weights.",
                )


def _activation_of(name: str, layer: Any) -> str:
    activation = layer.activation
    if activation is nn.functional.relu or activation is torch.relu or type(activation) is nn.ReLU:
        return "relu"
    if activation is nn.functional.gelu or (type(activation) is nn.GELU and activation.approximate == "none"):
        return "gelu"
    raise UnsupportedError.about(
        f"{name}.from_torch",
        "layer",
        must="use GELU or ReLU",
        got=getattr(activation, "__name__", activation),
        then=f"Build {_a(name)} and set block.feedforward.activation.",
    )


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
