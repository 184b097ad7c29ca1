"""Attention over sequences of different lengths: packed, padded, and in torch's nested tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Final, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.benchmark.cases import Comparison, PlainRow
from clearhead.benchmark.encoders import ragged
from clearhead.benchmark.peers import OURS, SDPA, Call, Groups
from clearhead.functional.exact import attention, explain_dispatch
from clearhead.functional.varlen import varlen_attn
from clearhead.masks import Causal, Documents, Mask, Padding

__all__ = ["NESTED", "PADDED", "PADDED_SDPA", "VarlenRow", "varlen_rows"]

PADDED_SDPA: Final = f"{SDPA}, padded"
PADDED: Final = "ch.attention, padded"
NESTED: Final = f"{SDPA}, nested"
#: Batch, heads, longest sequence and head_dim.
_SIZES: Final = ((8, 12, 512, 64), (4, 12, 2048, 64), (64, 12, 64, 64))

_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class VarlenRow(PlainRow):
    """Self-attention of a batch that is filled to a half.

    Args:
        shape: ``(batch, heads, longest, head_dim)``.
        dtype: of the tensors.
        causal: whether the mask is causal.
        training: whether the backward pass is included.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    causal: bool = False
    training: bool = False

    @property
    def title(self) -> str:
        """Description of the work."""
        kind, passes = "causal" if self.causal else "full", " forward+backward" if self.training else ""
        size = "x".join(map(str, self.shape))
        return f"half filled {size}{passes} {str(self.dtype).removeprefix('torch.')} {kind}"

    @property
    def group(self) -> str:
        """The dtype, and whether it is training."""
        return str(self.dtype).removeprefix("torch.") + (", training" if self.training else "")

    @property
    def operations(self) -> float:
        """Two products forward and five backward, of real tokens."""
        _, heads, _, head_dim = self.shape
        pairs = sum(n * (n + 1) / 2 if self.causal else n * n for n in self._lengths)
        return (3.5 if self.training else 1.0) * 4.0 * heads * head_dim * pairs

    @property
    def _lengths(self) -> list[int]:
        return ragged(self.shape[0], self.shape[2])

    def comparison(self) -> Comparison:
        """The contenders; each takes and returns its own layout. Results are compared at the real tokens."""
        packed, upstream = self._drawn()
        padded = [self._pad(tensor).requires_grad_() for tensor in packed]
        packed = [tensor.requires_grad_() for tensor in packed]
        mask: Mask = Documents(lengths=self._lengths)
        mask = mask & Causal() if self.causal else mask
        calls = {
            OURS: self._call(self._packed, packed, upstream),
            PADDED: self._call(self._padded, padded, self._pad(upstream)),
            PADDED_SDPA: self._call(self._padded_by_torch(), padded, self._pad(upstream)),
        }
        if not self.causal:
            calls[NESTED] = self._call(self._nested, packed, upstream)
        return Comparison(
            title=self.title,
            calls=calls,
            exact=lambda: self._alone(packed, upstream, torch.float64),
            plain=lambda: self._alone(packed, upstream, self.dtype),
            pick=lambda groups: tuple(tuple(map(self._real, group)) for group in groups),
            left_out={NESTED: "torch has no causal attention of nested tensors on a CPU"} if self.causal else {},
            backend=lambda: self._backend(packed, mask),
        )

    def _backend(self, packed: Sequence[Tensor], mask: Mask) -> str:
        """Name of the backend that runs the packed tensors."""
        with torch.set_grad_enabled(self.training):
            return explain_dispatch(*map(_heads_first, packed), mask=mask).choice or "none"

    def small(self) -> Self:
        """At most 40 tokens and two heads."""
        batch, _, longest, _ = self.shape
        return replace(self, shape=(min(batch, 3), 2, min(longest, 40), 8))

    def _drawn(self) -> tuple[list[Tensor], Tensor]:
        """Query, key and value ``[total, heads, head_dim]``, and the output's gradient."""
        generator = torch.Generator().manual_seed(0)
        shape = (sum(self._lengths), self.shape[1], self.shape[3])
        drawn = [torch.randn(shape, generator=generator).to(self.dtype) for _ in range(4)]
        return drawn[:3], drawn[3]

    def _real_places(self) -> Tensor:
        return torch.arange(self.shape[2]) < torch.tensor(self._lengths)[:, None]

    def _pad(self, packed: Tensor) -> Tensor:
        """``[batch, heads, longest, head_dim]`` with 0 at the padding."""
        batch, heads, longest, head_dim = self.shape
        padded = packed.new_zeros(batch, longest, heads, head_dim)
        padded[self._real_places()] = packed.detach()
        return padded.transpose(1, 2).contiguous()

    def _real(self, result: Tensor) -> Tensor:
        """The real tokens of a packed or a padded result."""
        return result if result.ndim == 3 else result.transpose(1, 2)[self._real_places()]

    def _packed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        boundaries = torch.tensor([0, *accumulate(self._lengths)], dtype=torch.int32)
        longest, window = self.shape[2], (-1, 0) if self.causal else (-1, -1)
        output = varlen_attn(query, key, value, boundaries, boundaries, longest, longest, window_size=window)
        assert isinstance(output, Tensor)
        return output

    def _padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        padding = Padding(self._lengths)
        return attention(query, key, value, mask=padding & Causal() if self.causal else padding)

    def _padded_by_torch(self) -> _Attend:
        """torch's attention with a mask, which a model makes once for all its layers."""
        longest = self.shape[2]
        allowed = self._real_places()[:, None, None]
        if self.causal:
            allowed = allowed & torch.ones(longest, longest, dtype=torch.bool).tril()
        return lambda query, key, value: F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)

    def _nested(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        offsets = torch.tensor([0, *accumulate(self._lengths)])
        query, key, value = (
            torch.nested.nested_tensor_from_jagged(part, offsets).transpose(1, 2) for part in (query, key, value)
        )
        output: Tensor = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).values()
        return output

    def _call(self, attend: _Attend, inputs: Sequence[Tensor], upstream: Tensor) -> Call:
        def forward() -> Groups:
            with torch.no_grad():
                return ((attend(*inputs),),)

        def training() -> Groups:
            output = attend(*inputs)
            return (output.detach(),), torch.autograd.grad(output, list(inputs), upstream)

        return training if self.training else forward

    def _alone(self, packed: Sequence[Tensor], upstream: Tensor, dtype: torch.dtype) -> Groups:
        """Results of the textbook formula, one sequence and head at a time."""
        outputs, grads = [], []
        for parts in zip(*(tensor.detach().split(self._lengths) for tensor in (*packed, upstream)), strict=True):
            query, key, value, grad = (_heads_first(part.to(dtype))[0] for part in parts)
            by_head = [self._textbook(*each) for each in zip(query, key, value, grad, strict=True)]
            stacked = [torch.stack(each, dim=1) for each in zip(*by_head, strict=True)]
            outputs.append(stacked[0])
            grads.append(stacked[1:])
        output = (torch.cat(outputs),)
        return (output, tuple(torch.cat(each) for each in zip(*grads, strict=True))) if self.training else (output,)

    def _textbook(self, query: Tensor, key: Tensor, value: Tensor, upstream: Tensor) -> list[Tensor]:
        inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        scores = inputs[0] @ inputs[1].mT / math.sqrt(query.shape[1])
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        output = torch.softmax(scores, dim=-1) @ inputs[2]
        return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]


def _heads_first(packed: Tensor) -> Tensor:
    return packed.transpose(0, 1)[None]


def varlen_rows() -> list[VarlenRow]:
    """Every size in both dtypes, full and causal, forward and with backward."""
    kinds = product((torch.float32, torch.bfloat16), (False, True), _SIZES, (False, True))
    return [
        VarlenRow(shape=shape, dtype=dtype, causal=causal, training=training)
        for dtype, training, shape, causal in kinds
    ]
