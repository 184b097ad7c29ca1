"""FLOPs of the operators of single layers and of blocks, by the rules of ``clearhead.ops.flops``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from clearhead.ops.block_shapes import AttentionShapes, BlockShapes, FeedForwardShapes, LinearShape, Shape, read_blocks
from clearhead.ops.flops import pairs

__all__ = ["LAYER_FLOPS"]


def _linear(x: Shape, weight: Shape, **others: Any) -> int:
    return 2 * math.prod(x) * weight[0]


def _linear_quantized(x: Shape, scale: Shape, **others: Any) -> int:
    return 2 * math.prod(x) * scale[0]


def _linear_packed(x: Shape, out: int, **others: Any) -> int:
    return 2 * math.prod(x) * out


def _linear_input_gradient(grads: Sequence[Shape], weights: Sequence[Shape], **others: Any) -> int:
    return sum(2 * math.prod(grad) * weight[1] for grad, weight in zip(grads, weights, strict=True))


def _linear_weight_gradient(grad: Shape, x: Shape, **others: Any) -> int:
    return 2 * math.prod(grad) * x[-1]


def _none(**others: Any) -> int:
    """Element-wise work."""
    return 0


def _block(tokens: Sequence[Shape], tensors: Sequence[Shape], integers: Sequence[int], **others: Any) -> int:
    total = 0
    for block in read_blocks(tensors, integers):
        call = _BlockSizes(block, tokens)
        for place, sublayer in enumerate(block.sublayers):
            if isinstance(sublayer, FeedForwardShapes):
                total += sum(map(call.gemm, sublayer.layers))
            else:
                total += sum(call.gemm(layer, memory) for layer, memory in call.gemms(place, sublayer))
                total += call.gemm(sublayer.last) + call.attention(place, sublayer, 2)
    return total


def _block_backward(
    tokens: Sequence[Shape], tensors: Sequence[Shape], integers: Sequence[int], needs: Sequence[int], **others: Any
) -> int:
    (block,) = read_blocks(tensors, integers)
    return _BackwardFlops(block, tokens, needs).flops()


class _BlockSizes:
    """Sizes of one block's call."""

    def __init__(self, block: BlockShapes, tokens: Sequence[Shape]) -> None:
        self._block, self._tokens = block, tokens
        self._rows = [batch * length for batch, length, _ in tokens]

    def gemm(self, layer: LinearShape, memory: bool = False) -> int:
        """Any of a linear layer's three GEMMs."""
        return 2 * self._rows[memory] * layer.outputs * layer.inputs

    def gemms(self, place: int, shapes: AttentionShapes) -> list[tuple[LinearShape, bool]]:
        return shapes.gemms(self._block.reads_memory(place, len(self._tokens)))

    def attention(self, place: int, shapes: AttentionShapes, products: int) -> int:
        """So many GEMMs between queries and keys."""
        batch, length, _ = self._tokens[0]
        keys = self._tokens[self._block.reads_memory(place, len(self._tokens))][1]
        if shapes.cache:
            keys = shapes.cached + (length if shapes.cache == 1 else 0)
        count = pairs(length, keys, shapes.before, shapes.after, shapes.query_offset)
        return 2 * batch * shapes.heads * count * products * shapes.head_dim


class _BackwardFlops(_BlockSizes):
    """Backward of a block, as native/torch/block_backward.cpp computes it: only the gradients that are needed."""

    def __init__(self, block: BlockShapes, tokens: Sequence[Shape], needs: Sequence[int]) -> None:
        super().__init__(block, tokens)
        self._of_tokens, self._needs = needs[: len(tokens)], needs[len(tokens) :]

    def flops(self) -> int:
        block = self._block
        if not block.residual:
            return self._through(0, bool(self._of_tokens[0]))
        total = 0
        for place in reversed(range(len(block.sublayers))):
            if not self._needed(place + 1, place + block.pre_norm):
                break
            of_input = self._needed(place, place + block.pre_norm)
            total += self._through(place, of_input)
            if not of_input:
                break
        return total

    def _needs_any(self, places: Iterable[int]) -> bool:
        return any(place >= 0 and self._needs[place] for place in places)

    def _needs_layers(self, layers: Iterable[LinearShape]) -> bool:
        return self._needs_any(place for layer in layers for place in (layer.weight, layer.bias))

    def _needed(self, sublayers: int, norms: int) -> bool:
        """Whether a gradient is needed of the tokens, or within so many first sublayers and norms."""
        within = (self._needs_sublayer(place) for place in range(sublayers))
        return bool(self._of_tokens[0]) or any(within) or any(map(self._needs_any, self._block.norms[:norms]))

    def _needs_sublayer(self, place: int) -> bool:
        sublayer = self._block.sublayers[place]
        if isinstance(sublayer, FeedForwardShapes):
            return self._needs_layers(sublayer.layers)
        return self._needs_layers((*sublayer.sources, sublayer.last)) or self._needs_memory(place)

    def _needs_memory(self, place: int) -> bool:
        return self._block.reads_memory(place, len(self._of_tokens)) and bool(self._of_tokens[1])

    def _through(self, place: int, of_input: bool) -> int:
        sublayer = self._block.sublayers[place]
        if isinstance(sublayer, FeedForwardShapes):
            return self._through_feedforward(sublayer, of_input)
        return self._through_attention(place, sublayer, of_input)

    def _through_feedforward(self, shapes: FeedForwardShapes, of_input: bool) -> int:
        *expanding, last = shapes.layers
        total = self._weight_gradient(last)
        if not (of_input or self._needs_layers(expanding)):
            return total
        total += self.gemm(last)
        return total + sum(self._weight_gradient(layer) + of_input * self.gemm(layer) for layer in expanding)

    def _through_attention(self, place: int, shapes: AttentionShapes, of_input: bool) -> int:
        total, of_memory = self._weight_gradient(shapes.last), self._needs_memory(place)
        if not (of_input or of_memory or self._needs_layers(shapes.sources)):
            return total
        total += self.gemm(shapes.last) + self.attention(place, shapes, 5)
        for layer, memory in self.gemms(place, shapes):
            wanted = of_memory if memory else of_input
            total += self._weight_gradient(layer, memory) + wanted * self.gemm(layer, memory)
        return total

    def _weight_gradient(self, layer: LinearShape, memory: bool = False) -> int:
        return self.gemm(layer, memory) if self._needs_any([layer.weight]) else 0


LAYER_FLOPS: Final[dict[str, Callable[..., int]]] = {
    "linear": _linear,
    "linear_packed": _linear_packed,
    "linear_quantized": _linear_quantized,
    "pack_weight": _none,
    "unpack_weight": _none,
    "linear_input_gradient": _linear_input_gradient,
    "linear_weight_gradient": _linear_weight_gradient,
    "norm": _none,
    "norm_gradients": _none,
    "rotary": _none,
    "token_angles": _none,
    "dropout_add": _none,
    "cache_append": _none,
    "paged_append": _none,
    "block": _block,
    "block_forward": _block,
    "block_backward": _block_backward,
}
"""As ``FLOPS``, of the operators of single layers and of blocks."""
