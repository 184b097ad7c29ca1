"""The model's attention on digits: queries, keys and values, and the influence of each head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.demo.training import log_probabilities
from clearhead.nn.attention import MultiHeadAttention
from clearhead.observe.capture import attention_modules, capture
from clearhead.shapes import Float, Int

__all__ = ["InfluentialHead", "Layer", "influence", "layers_on", "most_influential"]


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention module with its inputs; ``heads`` is its output before the output projection."""

    name: str
    module: MultiHeadAttention
    x: Float[Tensor, "batch tokens embed_dim"]
    query: Float[Tensor, "batch heads tokens head_dim"]
    key: Float[Tensor, "batch heads tokens head_dim"]
    value: Float[Tensor, "batch heads tokens head_dim"]
    heads: Float[Tensor, "batch heads tokens head_dim"]

    @property
    def scale(self) -> float:
        """The scale of the scores."""
        scale = self.module.scale
        return float(self.module.head_dim**-0.5 if scale is None else scale)


def layers_on(model: nn.Module, ids: Int[Tensor, "batch tokens"]) -> list[Layer]:
    """Every attention module of the model, with its tensors on ``ids``."""
    return [_layer(name, model, module, ids) for name, module in attention_modules(model).items()]


def _layer(name: str, model: nn.Module, module: MultiHeadAttention, ids: Tensor) -> Layer:
    captured = capture(model, module, (ids,), {})
    given = captured.options.get("query", captured.inputs[0] if captured.inputs else None)
    assert isinstance(given, Tensor)
    # A model may pack its batch into one sequence; all digits have the same length, so a reshape unpacks it.
    x = given.reshape(*ids.shape, -1)
    with torch.no_grad():
        query, key, value = module.project(x)
    heads = captured.heads.reshape(*ids.shape, module.num_heads, module.head_dim).transpose(1, 2)
    return Layer(name, module, x, query, key, value, heads)


@dataclass(frozen=True)
class InfluentialHead:
    """The head with the largest influence on a prediction, and the token where its output is largest."""

    layer: int
    head: int
    token: int


def influence(model: nn.Module, ids: Int[Tensor, " tokens"], predicted: int) -> list[list[float]]:
    """For each layer and head, the drop in the predicted class's log-probability without that head's output."""
    with_all = log_probabilities(model, ids[None])[0, predicted].item()
    lost = []
    for module in attention_modules(model).values():
        row = []
        for head in range(module.num_heads):
            with _without(module, head):
                row.append(with_all - log_probabilities(model, ids[None])[0, predicted].item())
        lost.append(row)
    return lost


def most_influential(layers: list[Layer], lost: list[list[float]], place: int) -> InfluentialHead:
    """The most influential head for sequence ``place`` of the batch of ``layers``."""
    _, layer, head = max((lost[i][j], -i, -j) for i in range(len(lost)) for j in range(len(lost[i])))
    layer, head = -layer, -head
    module = layers[layer].module
    assert module.output_projection is not None
    columns = slice(head * module.head_dim, (head + 1) * module.head_dim)
    part = layers[layer].heads[place, head] @ module.output_projection.weight.detach()[:, columns].T
    return InfluentialHead(layer, head, int(part.norm(dim=-1).argmax()))


@contextmanager
def _without(module: MultiHeadAttention, head: int) -> Iterator[None]:
    """Set one head's output to 0 within the context."""
    assert module.output_projection is not None
    columns = slice(head * module.head_dim, (head + 1) * module.head_dim)

    def silence(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
        joined = inputs[0].clone()
        joined[..., columns] = 0.0
        return (joined,)

    hook = module.output_projection.register_forward_pre_hook(silence)
    try:
        yield
    finally:
        hook.remove()
