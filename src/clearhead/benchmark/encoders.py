"""A stack of encoder layers on a ragged batch, padded for torch and packed by clearhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

from clearhead.benchmark.peers import OURS, Call, Groups, parameters_as_torch_packs_them, torch_parameters
from clearhead.functional.exact import explain_dispatch
from clearhead.integrations.swap import swap
from clearhead.masks import Documents
from clearhead.nn.blocks import DecoderBlock, EncoderBlock
from clearhead.nn.stacks import Encoder

__all__ = ["STACK", "SWAPPED", "EncoderWork", "dropping", "our_parameters", "ragged", "their_parameters"]

_Model = TypeVar("_Model", bound=nn.Module)

STACK = "nn.TransformerEncoder"
SWAPPED = f"{OURS}, swapped into torch's"
#: Distance of a unit's bias from 0, in standard deviations of its input for normalised tokens.
_KINK_DISTANCE = 5.0


def ragged(batch: int, longest: int) -> list[int]:
    """Lengths of a half-filled batch: one sequence has the longest length, the others are spread evenly around a mean.

    >>> ragged(4, 16), sum(ragged(16, 256)) / (16 * 256)
    ([16, 1, 5, 10], 0.5)
    """
    mean = (batch * longest / 2 - longest) / (batch - 1)
    low = max(1.0, 2 * mean - longest + 1)
    step = 2 * (mean - low) / max(1, batch - 2)
    edges = [round(place * low + step * place * (place - 1) / 2) for place in range(batch)]
    return [longest, *(end - start for start, end in pairwise(edges))]


class EncoderWork:
    """A training step of torch's encoder, of ours with the same weights, and of torch's after ``swap``.

    The loss uses real tokens only, so a contender's output at the padding has no effect.

    Args:
        lengths: real tokens of each sequence.
        embed_dim: width of a token.
        num_heads: number of heads.
        num_layers: number of layers.
        feedforward_dim: hidden width of the feedforward.
        dtype: of weights and inputs.
        activation: of the feedforward, ``"relu"`` or ``"gelu"``.
        seed: the seed of the random weights and inputs.
    """

    def __init__(
        self, lengths: Sequence[int], *, embed_dim: int, num_heads: int, num_layers: int, feedforward_dim: int,
        dtype: torch.dtype, activation: str = "relu", seed: int = 0,
    ) -> None:  # fmt: skip
        self.lengths, self.heads = list(lengths), num_heads
        size = (len(self.lengths), max(self.lengths), embed_dim)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layer = nn.TransformerEncoderLayer(
                embed_dim, num_heads, feedforward_dim, dropout=0.0, activation=activation, batch_first=True
            )
            self.theirs = nn.TransformerEncoder(layer, num_layers).to(dtype).train()
            for parameter in self.theirs.parameters():
                # The stack copies one layer; with different weights, a skipped layer changes the output.
                parameter.data += 0.02 * torch.randn(parameter.shape).to(dtype)
            for layer in _layers(self.theirs) if activation == "relu" else ():
                _keep_off_the_kink(layer.linear1)
            self.x = torch.randn(size).to(dtype).requires_grad_()
            upstream = torch.randn(size).to(dtype)
        self.padding = torch.arange(size[1]) >= torch.tensor(self.lengths)[:, None]
        self.upstream = upstream.masked_fill(self.padding[..., None], 0.0)

    @property
    def contenders(self) -> dict[str, Callable[[float], Call]]:
        """The contenders; each builds its call for a dropout probability."""
        return {OURS: self.our_call, SWAPPED: self.swapped_call, STACK: self.their_call}

    @property
    def backend(self) -> str:
        """The backend that clearhead runs the packed batch on."""
        width = self.x.shape[-1] // self.heads
        one = torch.zeros(1, self.heads, sum(self.lengths), width, dtype=self.x.dtype, requires_grad=True)
        return explain_dispatch(one, one, one, mask=Documents(lengths=self.lengths)).choice or "none"

    def our_call(self, dropout: float = 0.0) -> Call:
        """The call of clearhead's encoder."""
        layers = [EncoderBlock.from_torch(layer) for layer in _layers(dropping(self.theirs, dropout))]
        first = layers[0]
        encoder = Encoder(self.x.shape[-1], self.heads, len(layers), norm_first=first.norm_first)
        encoder.blocks = nn.ModuleList(layers)
        lengths = torch.tensor(self.lengths)
        parameters = [tensor for block in layers for tensor in our_parameters(block)]
        return self._call(lambda x: encoder(x, lengths=lengths), self.x, parameters)

    def their_call(self, dropout: float = 0.0) -> Call:
        """The call of torch's encoder with a padding mask."""
        return self._theirs(dropping(self.theirs, dropout), self.x)

    def swapped_call(self, dropout: float = 0.0) -> Call:
        """The call of torch's encoder after ``swap``, which changes it in place."""
        stack = dropping(self.theirs, dropout)
        swap(stack)
        return self._theirs(stack, self.x)

    def exact(self) -> Groups:
        """The numbers of torch's encoder in float64."""
        return self._theirs(deepcopy(self.theirs).double(), self.x.detach().double().requires_grad_())()

    def _theirs(self, stack: nn.TransformerEncoder, x: Tensor) -> Call:
        parameters = [tensor for layer in _layers(stack) for tensor in their_parameters(layer)]
        return self._call(lambda x: stack(x, src_key_padding_mask=self.padding), x, parameters)

    def _call(self, run: Callable[[Tensor], Tensor], x: Tensor, parameters: Sequence[Tensor]) -> Call:
        upstream, real = self.upstream.to(x.dtype), ~self.padding

        def training() -> Groups:
            output = run(x)
            gradients = torch.autograd.grad(output, (x, *parameters), upstream)
            return (output.detach()[real],), gradients[:1], gradients[1:]

        return training


def _layers(stack: nn.TransformerEncoder) -> list[nn.TransformerEncoderLayer]:
    return [layer for layer in stack.layers if isinstance(layer, nn.TransformerEncoderLayer)]


def _keep_off_the_kink(expand: nn.Linear) -> None:
    """Set the biases so that half of the ReLU units are on and half are off for every token.

    Among millions of units a few are always within rounding error of 0. Whether such a unit has a gradient depends on
    the last digits of each contender, and the difference spreads to every token of the sequence.
    """
    signs = torch.ones(expand.out_features)
    signs[1::2] = -1.0
    expand.bias.data += _KINK_DISTANCE * expand.weight.data.float().norm(dim=1).to(expand.bias.dtype) * signs


def dropping(model: _Model, dropout: float) -> _Model:
    """A copy of the model with this dropout probability in all its layers."""
    copy = deepcopy(model)
    for module in copy.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = dropout
    return copy


def our_parameters(block: EncoderBlock | DecoderBlock) -> list[Tensor]:
    """The parameters of a block, in the order and form of ``their_parameters``."""
    cross, norm = getattr(block, "cross_attention", None), getattr(block, "cross_norm", None)
    attentions = [block.attention, *([] if cross is None else [cross])]
    norms = [block.attention_norm, *([] if norm is None else [norm]), block.feedforward_norm]
    rest = (block.feedforward.expand, block.feedforward.contract, *norms)
    packed = [parameter for attention in attentions for parameter in parameters_as_torch_packs_them(attention)]
    return packed + [parameter for layer in rest for parameter in (layer.weight, layer.bias)]


def their_parameters(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> list[Tensor]:
    """The parameters of torch's layer."""
    attentions, norms = [layer.self_attn], [layer.norm1, layer.norm2]
    if isinstance(layer, nn.TransformerDecoderLayer):
        attentions, norms = [*attentions, layer.multihead_attn], [*norms, layer.norm3]
    packed = [parameter for attention in attentions for parameter in torch_parameters(attention)]
    rest: tuple[nn.Module, ...] = (layer.linear1, layer.linear2, *norms)
    return packed + [part.get_parameter(name) for part in rest for name in ("weight", "bias")]
