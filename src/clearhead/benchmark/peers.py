"""Who is measured: the same attention by clearhead, by torch's own functions and modules, and by the textbook.

A *call* runs one contender once and returns what it computed, in groups: ``((output,),)`` forward, and behind it
the gradients of the inputs and of the parameters in training. Groups of all contenders mean the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.functional import attention
from clearhead.masks import Causal
from clearhead.nn.attention import MultiHeadAttention

__all__ = [
    "Call", "Groups", "ModuleWork", "TensorWork", "forbidden", "textbook",
]  # fmt: skip

Groups: TypeAlias = tuple[tuple[Tensor, ...], ...]
Call: TypeAlias = Callable[[], Groups]
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

_ROWS_AT_ONCE = 256


def forbidden(length: int, device: torch.device) -> Tensor:
    """The causal mask as torch's modules want it: ``True`` where a query may not look."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def textbook(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> Tensor:
    """The formula as it stands in the paper: the whole matrix of scores, its softmax, times the values."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, dim=-1) @ value


class TensorWork:
    """Attention on plain tensors ``[batch, heads, len, head_dim]``, without projections."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, *, causal: bool, training: bool, seed: int = 0
    ) -> None:
        self.causal, self.training = causal, training
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]
        self.inputs = [tensor.requires_grad_(training) for tensor in drawn[:3]]
        self.upstream = drawn[3]

    def calls(self) -> dict[str, Call]:
        """Each contender's call."""
        mask = Causal() if self.causal else None
        hidden = forbidden(self.upstream.shape[-2], self.upstream.device) if self.causal else None
        contenders: dict[str, Attend] = {
            "clearhead": lambda q, k, v: attention(q, k, v, mask=mask),
            "scaled_dot_product_attention": lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, is_causal=self.causal
            ),
            "textbook formula": lambda q, k, v: textbook(q, k, v, hidden),
        }
        return {name: self._call(attend) for name, attend in contenders.items()}

    def _call(self, attend: Attend) -> Call:
        inputs, upstream = self.inputs, self.upstream

        def forward() -> Groups:
            with torch.no_grad():
                return ((attend(*inputs),),)

        def training() -> Groups:
            output = attend(*inputs)
            return (output.detach(),), torch.autograd.grad(output, inputs, upstream)

        return training if self.training else forward

    def by_rows(self, dtype: torch.dtype) -> Groups:
        """The textbook's numbers in ``dtype``, some queries at a time so that long sequences fit in memory."""
        query, key, value = (tensor.detach().to(dtype) for tensor in self.inputs)
        batch, heads, length, _ = query.shape
        output = torch.empty_like(query)
        grads = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in (query, key, value)]
        hidden = forbidden(length, query.device) if self.causal else None
        for at in ((b, h) for b in range(batch) for h in range(heads)):
            for start in range(0, length, _ROWS_AT_ONCE):
                rows = slice(start, start + _ROWS_AT_ONCE)
                some = [query[at][rows], key[at], value[at]]
                leaves = [tensor.clone().requires_grad_(self.training) for tensor in some]
                part = textbook(leaves[0], leaves[1], leaves[2], None if hidden is None else hidden[rows])
                output[at][rows] = part.detach()
                if self.training:
                    found = torch.autograd.grad(part, leaves, self.upstream[at][rows].to(dtype))
                    grads[0][at][rows] += found[0]
                    grads[1][at] += found[1]
                    grads[2][at] += found[2]
        return ((output,), tuple(grads)) if self.training else ((output,),)


class ModuleWork:
    """Self-attention with its projections on ``[batch, len, embed_dim]``, one set of weights for all."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, *, causal: bool, training: bool, seed: int = 0
    ) -> None:
        batch, heads, length, head_dim = shape
        width = heads * head_dim
        self.causal, self.training = causal, training
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.theirs = nn.MultiheadAttention(width, heads, batch_first=True).to(dtype).train(training)
            self.x = torch.randn(batch, length, width).to(dtype).requires_grad_(training)
            self.upstream = torch.randn(batch, length, width).to(dtype)
        self.ours = MultiHeadAttention.from_torch(self.theirs)

    def calls(self) -> dict[str, Call]:
        """Each contender's call."""
        mask = Causal() if self.causal else None
        return {
            "clearhead": self._call(lambda x: self.ours(x, mask=mask), self.x, _our_parameters(self.ours)),
            "nn.MultiheadAttention": self._theirs(self.theirs, self.x, weights=False),
            "nn.MultiheadAttention, weights": self._theirs(self.theirs, self.x, weights=True),
            "textbook formula": self._textbook(self.theirs, self.x),
        }

    def exact(self) -> Groups:
        """The numbers of torch's module in float64."""
        return self._theirs(deepcopy(self.theirs).double(), self.x.detach().double(), weights=False)()

    def _theirs(self, module: nn.MultiheadAttention, x: Tensor, *, weights: bool) -> Call:
        hidden = forbidden(x.shape[1], x.device) if self.causal else None

        def run(x: Tensor) -> Tensor:
            output: Tensor = module(x, x, x, need_weights=weights, attn_mask=hidden, is_causal=self.causal)[0]
            return output

        return self._call(run, x.requires_grad_(self.training), _their_parameters(module))

    def _textbook(self, module: nn.MultiheadAttention, x: Tensor) -> Call:
        hidden = forbidden(x.shape[1], x.device) if self.causal else None
        heads = module.num_heads

        def run(x: Tensor) -> Tensor:
            projected = F.linear(x, module.in_proj_weight, module.in_proj_bias)
            query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in projected.chunk(3, dim=-1))
            output: Tensor = module.out_proj(textbook(query, key, value, hidden).transpose(1, 2).flatten(-2))
            return output

        return self._call(run, x, _their_parameters(module))

    def _call(self, run: Callable[[Tensor], Tensor], x: Tensor, parameters: Sequence[Tensor]) -> Call:
        def forward() -> Groups:
            with torch.no_grad():
                return ((run(x),),)

        def training() -> Groups:
            output = run(x)
            found = torch.autograd.grad(output, (x, *parameters), self.upstream.to(x.dtype))
            return (output.detach(),), found[:1], found[1:]

        return training if self.training else forward


def _our_parameters(module: MultiHeadAttention) -> list[Tensor]:
    """In the order in which torch's module packs them, so that the gradients side by side are the same numbers."""
    inner = (module.query_projection, module.key_projection, module.value_projection)
    output = module.output_projection
    assert output is not None
    return [layer.weight for layer in inner] + [layer.bias for layer in inner] + [output.weight, output.bias]


def _their_parameters(module: nn.MultiheadAttention) -> list[Tensor]:
    return [module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias]
