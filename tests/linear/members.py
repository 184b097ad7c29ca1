"""Every function of linear attention with its inputs, and its formula in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead import linear
from tests.linear import oracle

SHAPE = (2, 3, 21, 6)
VALUE_DIM = 5


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call; ``extra`` are gates or rates, by the name of their argument."""

    query: Tensor
    key: Tensor
    value: Tensor
    extra: dict[str, Tensor]

    def tensors(self) -> list[Tensor]:
        return [self.query, self.key, self.value, *self.extra.values()]

    def cut(self, start: int, stop: int) -> Inputs:
        """The tokens of a part of the sequence."""
        return self.mapped(lambda part: part[:, :, start:stop])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        extra = {name: change(part) for name, part in self.extra.items()}
        return Inputs(change(self.query), change(self.key), change(self.value), extra)


@dataclass(frozen=True)
class Member:
    verb: Callable[..., Any]
    fixed: dict[str, Any] = field(default_factory=dict)
    gates: int = 0  # how many gates a token has
    corrects: bool = False
    phi: Callable[..., Any] = oracle.identity
    normalized: bool = False
    decay: tuple[float, ...] | None = None

    def draw(
        self, shape: tuple[int, int, int, int] = SHAPE, dtype: torch.dtype = torch.float64, seed: int = 0
    ) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        batch, heads, length, _ = shape

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

        extra = {}
        query, key = normal(*shape), normal(*shape)
        value = normal(batch, heads, length, VALUE_DIM)
        if self.gates:
            extra["log_gate"] = -3.0 * normal(batch, heads, length, self.gates).square()
        if self.corrects:
            extra["rate"] = torch.sigmoid(normal(batch, heads, length))
        return Inputs(query, key, value, extra)

    def run(self, inputs: Inputs, **options: Any) -> Any:
        return self.verb(inputs.query, inputs.key, inputs.value, **inputs.extra, **{**self.fixed, **options})

    def meaning(self, inputs: Inputs, present: Callable[[int, int], list[int]]) -> Tensor:
        """By the oracle; ``present(batch, i)`` are the keys that query ``i`` may read."""
        query, key, value = (part.detach().numpy() for part in (inputs.query, inputs.key, inputs.value))
        output = np.zeros((*query.shape[:3], value.shape[3]))
        scale = 1.0 if self.verb is linear.linear_attention else 1.0 / math.sqrt(query.shape[3])
        for b in range(query.shape[0]):
            for h in range(query.shape[1]):
                gate = None
                if self.gates:
                    gate = np.exp(inputs.extra["log_gate"][b, h].detach().numpy())
                    gate = np.broadcast_to(gate, key.shape[2:])
                if self.decay is not None:
                    gate = np.full(key.shape[2:], self.decay[h])
                triple = query[b, h], key[b, h], value[b, h]
                if self.corrects:
                    rate = inputs.extra["rate"][b, h].detach().numpy()
                    output[b, h] = oracle.fast_weights(*triple, rate, phi=self.phi, gate=gate, scale=scale)
                else:
                    output[b, h] = oracle.weighted(
                        *triple,
                        lambda i, b=b: present(b, i),
                        phi=self.phi,
                        normalized=self.normalized,
                        gate=gate,
                        scale=scale,
                    )
        return torch.from_numpy(output)


_DRAWN = linear.PositiveRandomFeatures.draw(SHAPE[3], 7, seed=3)


def _random_features(x: Any) -> Any:
    exponents = x @ _DRAWN.weights.numpy().T * math.sqrt(_DRAWN.scale) - _DRAWN.scale * (x * x).sum() / 2
    return np.exp(exponents) / math.sqrt(7)


_DECAY = (0.5, 0.97, 1.0)
MEMBERS = {
    "elu": Member(linear.linear_attention, {"causal": True}, phi=oracle.elu, normalized=True),
    "relu": Member(linear.linear_attention, {"causal": True, "feature_map": "relu"}, phi=oracle.relu, normalized=True),
    "identity": Member(linear.linear_attention, {"causal": True, "feature_map": "identity"}),
    "performer": Member(
        linear.linear_attention, {"causal": True, "feature_map": _DRAWN}, phi=_random_features, normalized=True
    ),
    "retention": Member(linear.retention, {"decay": _DECAY}, decay=_DECAY),
    "gate per channel": Member(linear.gated_linear_attention, gates=SHAPE[3]),
    "gate per token": Member(linear.gated_linear_attention, gates=1),
    "delta": Member(linear.delta_attention, corrects=True, phi=oracle.unit),
    "delta, gate per token": Member(linear.delta_attention, gates=1, corrects=True, phi=oracle.unit),
    "delta, gate per channel": Member(linear.delta_attention, gates=SHAPE[3], corrects=True, phi=oracle.unit),
}
