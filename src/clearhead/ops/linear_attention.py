"""Linear attention in chunks by the operators ``clearhead::linear_attention_forward`` and ``..._gradients``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from clearhead.backends.containment import without_autocast
from clearhead.backends.recorded import is_recorded, recorded_gradients
from clearhead.ops.kinds import Feature

__all__ = ["FEATURE_MAPS", "Compute", "LinearOptions", "linear_attention_chunks"]

#: Feature maps that the kernels apply.
FEATURE_MAPS: Final = {feature.name.lower(): int(feature) for feature in Feature}

#: Query, key, value, log decay, rate, state and normaliser in; output, last state and, if normalised, last normaliser
#: out.
Compute: TypeAlias = Callable[[list[Tensor | None]], Sequence[Tensor]]


@dataclass(frozen=True)
class LinearOptions:
    """What of a call is not a tensor.

    Attributes:
        feature_map: a key of ``FEATURE_MAPS``.
        scale: factor on the queries' features.
        chunk: tokens of a chunk.
        normalized: whether outputs are divided by ``phi(q) z``.
        compute: the same call by torch's operations, for higher derivatives.
    """

    feature_map: str
    scale: float
    chunk: int
    normalized: bool
    compute: Compute

    @property
    def numbers(self) -> tuple[int, float, int]:
        """The operators' arguments that are not tensors."""
        return FEATURE_MAPS[self.feature_map], self.scale, self.chunk


def linear_attention_chunks(options: LinearOptions, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output, last state and last normaliser, which is None where outputs are not normalised.

    Args:
        options: what is not a tensor.
        inputs: query, key, value, log decay, rate, state and normaliser, all float32; None for absent ones.
    """
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in inputs):
        results: tuple[Tensor, Tensor, Tensor | None] = _LinearAttention.apply(options, *inputs)  # type: ignore[no-untyped-call]
        return results
    output, state, normalizer, *_ = _forward(options, inputs, for_backward=False)
    return output, state, normalizer


def _forward(options: LinearOptions, inputs: Sequence[Tensor | None], *, for_backward: bool) -> Any:
    return torch.ops.clearhead.linear_attention_forward.default(
        *inputs, *options.numbers, options.normalized, for_backward
    )


class _LinearAttention(torch.autograd.Function):
    """Backward reads the inputs, one state per chunk and, where outputs are normalised, the output and row sums."""

    @staticmethod
    def forward(ctx: Any, options: LinearOptions, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        output, state, normalizer, shares, states, sums = _forward(options, inputs, for_backward=True)
        ctx.options = options
        ctx.set_materialize_grads(False)
        # An output that backward does not read may be modified in place.
        ctx.save_for_backward(*inputs, output if options.normalized else None, shares, states, sums)
        return output, state, normalizer

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        options: LinearOptions = ctx.options
        saved = ctx.saved_tensors
        inputs = saved[:7]
        if is_recorded(*grads):
            outputs = grads if options.normalized else grads[:2]
            with without_autocast("cpu"):
                return None, *recorded_gradients(options.compute, inputs, outputs, ctx.needs_input_grad[1:])
        return None, *torch.ops.clearhead.linear_attention_gradients.default(
            *grads, *inputs[:5], *saved[7:], *options.numbers
        )
