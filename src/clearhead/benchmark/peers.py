"""The contenders: the same attention by clearhead, by torch's functions and modules, and by the textbook formula.

A *call* runs one contender once and returns its results in groups: ``((output,),)`` forward, followed by the
gradients of the inputs and of the parameters in training. The groups have the same meaning for all contenders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.functional.exact import attention, explain_dispatch
from clearhead.masks import Causal, Mask, Window
from clearhead.nn.attention import MultiHeadAttention

__all__ = [
    "MODULE", "OURS", "SDPA", "SDPA_WINDOW", "TEXTBOOK", "Call", "Groups", "ModuleWork", "TensorWork", "forbidden",
    "parameters_as_torch_packs_them", "short_name", "textbook", "torch_parameters",
]  # fmt: skip

OURS = "clearhead"
SDPA = "scaled_dot_product_attention"
SDPA_WINDOW = "scaled_dot_product_attention, dense window mask"
MODULE = "nn.MultiheadAttention"
TEXTBOOK = "textbook formula"

Groups: TypeAlias = tuple[tuple[Tensor, ...], ...]
Call: TypeAlias = Callable[[], Groups]
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

_ROWS_AT_ONCE = 256


def short_name(name: str) -> str:
    """Short form of a contender's name, for tables.

    >>> short_name("scaled_dot_product_attention, dense window mask")
    'SDPA, dense window mask'
    """
    return name.replace(SDPA, "SDPA")


def forbidden(length: int, device: torch.device) -> Tensor:
    """The causal mask in the convention of torch's modules: ``True`` where a key is masked."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


def textbook(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> Tensor:
    """The textbook formula: softmax of the whole score matrix, times the values."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, dim=-1) @ value


class TensorWork:
    """Attention on plain tensors ``[batch, heads, len, head_dim]``, without projections.

    Args:
        shape: ``(batch, heads, q_len, head_dim)`` of the queries.
        dtype: of all tensors.
        causal: whether the mask is causal.
        training: whether a call includes the backward pass.
        kv_heads: number of key heads; by default that of the queries.
        k_len: number of keys; by default that of the queries.
        window: number of keys before its own position that a query attends to, by default all.
        asked: the ``backend`` argument of clearhead's call.
        seed: the seed of the random tensors.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, *, causal: bool, training: bool,
        kv_heads: int | None = None, k_len: int | None = None, window: int | None = None, asked: str = "auto",
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.causal, self.training, self.window, self.asked = causal, training, window, asked
        batch, heads, q_len, head_dim = shape
        kv_shape = (batch, kv_heads or heads, k_len or q_len, head_dim)
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(size, generator=generator).to(dtype) for size in (shape, kv_shape, kv_shape, shape)]
        self.inputs = [tensor.requires_grad_(training) for tensor in drawn[:3]]
        self.upstream = drawn[3]

    @property
    def mask(self) -> Mask | None:
        """The mask as a clearhead mask."""
        if self.window is not None:
            return Causal() & Window(self.window)
        return Causal() if self.causal else None

    @cached_property
    def hidden(self) -> Tensor | None:
        """The mask as a matrix, ``True`` where a key is masked."""
        if not self.causal:
            return None
        matrix = forbidden(self.upstream.shape[-2], self.upstream.device)
        return matrix if self.window is None else matrix | ~matrix.new_ones(matrix.shape).triu(-self.window)

    @property
    def backend(self) -> str:
        """Name of the backend that clearhead selects; "none" where ``asked`` does not support the call."""
        return explain_dispatch(*self.inputs, mask=self.mask, backend=self.asked).choice or "none"

    def call(self, name: str, *, dropout: float = 0.0) -> Call:
        """The call of one contender, with a dropout probability."""
        return self._call(self._attend(name, dropout))

    def calls(self) -> dict[str, Call]:
        """The call of clearhead, of torch's function and of the textbook formula."""
        return {name: self.call(name) for name in (OURS, SDPA, TEXTBOOK)}

    def _attend(self, name: str, dropout: float) -> Attend:
        mask, hidden, causal = self.mask, self.hidden, self.causal
        grouped = self.inputs[0].shape[1] != self.inputs[1].shape[1]
        if name == OURS and self.asked == "auto":
            # As a user writes it: in a call of some microseconds every further argument counts.
            return lambda q, k, v: attention(q, k, v, mask=mask, dropout=dropout)
        if name == OURS:
            return lambda q, k, v: attention(q, k, v, mask=mask, dropout=dropout, backend=self.asked)
        if name == SDPA:
            return lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, dropout_p=dropout, enable_gqa=grouped
            )
        if name == SDPA_WINDOW:
            assert hidden is not None
            allowed = ~hidden
            return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        assert name == TEXTBOOK
        assert dropout == 0.0
        return lambda q, k, v: textbook(q, k, v, hidden)

    def _call(self, attend: Attend) -> Call:
        inputs, upstream = self.inputs, self.upstream

        def forward() -> Groups:
            return ((attend(*inputs),),)

        def training() -> Groups:
            output = attend(*inputs)
            return (output.detach(),), torch.autograd.grad(output, inputs, upstream)

        return training if self.training else forward

    def by_rows(self, dtype: torch.dtype, pairs: Sequence[tuple[int, int]] | None = None) -> Groups:
        """Results of the textbook formula in ``dtype``, computed in slices of queries to limit memory.

        Args:
            dtype: the dtype of the computation.
            pairs: the (batch, head) pairs to compute, by default all; the others stay 0.
        """
        query, key, value = (tensor.detach().to(dtype) for tensor in self.inputs)
        output = torch.zeros_like(query)
        grads = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in (query, key, value)]
        per_key_head = query.shape[1] // key.shape[1]
        for batch, head in self.pairs() if pairs is None else pairs:
            at, kv_at = (batch, head), (batch, head // per_key_head)
            for start in range(0, query.shape[2], _ROWS_AT_ONCE):
                rows = slice(start, start + _ROWS_AT_ONCE)
                some = [query[at][rows], key[kv_at], value[kv_at]]
                leaves = [tensor.clone().requires_grad_(self.training) for tensor in some]
                hidden = None if self.hidden is None else self.hidden[rows]
                part = textbook(leaves[0], leaves[1], leaves[2], hidden)
                output[at][rows] = part.detach()
                if self.training:
                    gradients = torch.autograd.grad(part, leaves, self.upstream[at][rows].to(dtype))
                    grads[0][at][rows] += gradients[0]
                    grads[1][kv_at] += gradients[1]
                    grads[2][kv_at] += gradients[2]
        return ((output,), tuple(grads)) if self.training else ((output,),)

    def pairs(self, most_scores: float = math.inf) -> list[tuple[int, int]]:
        """All (batch, head) pairs, or evenly spread ones with at most ``most_scores`` scores in total."""
        batch, heads, q_len, _ = self.inputs[0].shape
        every = [(b, h) for b in range(batch) for h in range(heads)]
        wanted = max(1, min(len(every), most_scores / (q_len * self.inputs[1].shape[2])))
        number = int(wanted)
        return [every[round(place * (len(every) - 1) / max(1, number - 1))] for place in range(number)]


class ModuleWork:
    """Self-attention with its projections on ``[batch, len, embed_dim]``, one set of weights for all.

    Args:
        shape: ``(batch, heads, length, head_dim)``.
        dtype: of weights and inputs.
        causal: whether the mask is causal.
        training: whether the modules are in training mode and a call includes the backward pass.
        seed: the seed of the random weights and inputs.
    """

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
        return {
            OURS: self.our_call(),
            MODULE: self.their_call(),
            f"{MODULE}, weights": self._theirs(self.theirs, self.x, weights=True),
            TEXTBOOK: self._textbook(self.theirs, self.x),
        }

    def our_call(self, *, dropout: float = 0.0) -> Call:
        """The call of clearhead's module, with a dropout probability."""
        mask = Causal() if self.causal else None
        module = deepcopy(self.ours)
        module.dropout = dropout
        return self._call(lambda x: module(x, mask=mask), self.x, parameters_as_torch_packs_them(module))

    def their_call(self, *, dropout: float = 0.0) -> Call:
        """The call of torch's module without returned weights, with a dropout probability."""
        module = deepcopy(self.theirs)
        module.dropout = dropout
        return self._theirs(module, self.x, weights=False)

    def textbook_call(self) -> Call:
        """The call of the textbook formula."""
        return self._textbook(self.theirs, self.x)

    def exact(self) -> Groups:
        """The numbers of torch's module in float64."""
        return self._theirs(deepcopy(self.theirs).double(), self.x.detach().double(), weights=False)()

    def _theirs(self, module: nn.MultiheadAttention, x: Tensor, *, weights: bool) -> Call:
        hidden = forbidden(x.shape[1], x.device) if self.causal else None

        def run(x: Tensor) -> Tensor:
            output: Tensor = module(x, x, x, need_weights=weights, attn_mask=hidden, is_causal=self.causal)[0]
            return output

        return self._call(run, x.requires_grad_(self.training), torch_parameters(module))

    def _textbook(self, module: nn.MultiheadAttention, x: Tensor) -> Call:
        hidden = forbidden(x.shape[1], x.device) if self.causal else None
        heads = module.num_heads

        def run(x: Tensor) -> Tensor:
            projected = F.linear(x, module.in_proj_weight, module.in_proj_bias)
            query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in projected.chunk(3, dim=-1))
            output: Tensor = module.out_proj(textbook(query, key, value, hidden).transpose(1, 2).flatten(-2))
            return output

        return self._call(run, x, torch_parameters(module))

    def _call(self, run: Callable[[Tensor], Tensor], x: Tensor, parameters: Sequence[Tensor]) -> Call:
        def forward() -> Groups:
            with torch.no_grad():
                return ((run(x),),)

        def training() -> Groups:
            output = run(x)
            gradients = torch.autograd.grad(output, (x, *parameters), self.upstream.to(x.dtype))
            return (output.detach(),), gradients[:1], gradients[1:]

        return training if self.training else forward


def parameters_as_torch_packs_them(module: MultiHeadAttention) -> list[Tensor]:
    """The parameters in the order of torch's packed module, so that gradients compare one to one."""
    inner = (module.query_projection, module.key_projection, module.value_projection)
    output = module.output_projection
    assert output is not None
    return [layer.weight for layer in inner] + [layer.bias for layer in inner] + [output.weight, output.bias]


def torch_parameters(module: nn.MultiheadAttention) -> list[Tensor]:
    """The parameters of torch's module as it packs them."""
    return [module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias]
