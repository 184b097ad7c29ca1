"""Cost of user-defined functions: ALiBi through ``ScoreFunction``, against torch with a dense bias."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.benchmark.cases import Comparison, PlainRow
from clearhead.benchmark.peers import OURS, SDPA, Call, Groups
from clearhead.functional.exact import attention, explain_dispatch
from clearhead.masks import MaskFunction
from clearhead.scores import Alibi, ScoreFunction

__all__ = ["ALIBI", "CAUSAL", "DENSE", "LEARNED", "MADE", "FunctionRow", "function_rows"]

DENSE: Final = f"{SDPA}, dense bias"
#: The dense bias is built in each call; a model that caches it between calls does not pay for that.
MADE: Final = f"{SDPA}, dense bias made in the call"
ALIBI: Final = "ScoreFunction, Alibi by hand"
LEARNED: Final = "ScoreFunction, Alibi with learned slopes"
CAUSAL: Final = "MaskFunction, causal by hand"

_Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class FunctionRow(PlainRow):
    """Attention with a user-defined function, forward and backward.

    Args:
        kind: ``ALIBI``, ``LEARNED`` or ``CAUSAL``.
        shape: ``(batch, heads, length, head_dim)``.
        dtype: of the tensors.
    """

    kind: str
    shape: tuple[int, int, int, int]
    dtype: torch.dtype = torch.float32
    #: The peak memory is measured too.
    memory: bool = True

    @property
    def title(self) -> str:
        """Description of the work."""
        return f"{self.kind}, {'x'.join(map(str, self.shape))} forward+backward {str(self.dtype)[6:]}"

    @property
    def group(self) -> str:
        """The kind of function."""
        return self.kind

    @property
    def operations(self) -> float:
        """Two products forward and five backward (Dao 2023, FlashAttention-2, section 4.1)."""
        batch, heads, length, head_dim = self.shape
        pairs = length * (length + 1) / 2 if self.kind == CAUSAL else length * length
        return 3.5 * 4.0 * batch * heads * pairs * head_dim

    def comparison(self) -> Comparison:
        """The contenders."""
        inputs, upstream = self._drawn()
        calls = {name: self._call(attend, inputs, upstream) for name, attend in self._contenders(inputs[3]).items()}
        return Comparison(
            title=self.title,
            calls=calls,
            exact=lambda: self._by_heads(inputs, upstream, torch.float64),
            plain=lambda: self._by_heads(inputs, upstream, self.dtype),
            backend=lambda: explain_dispatch(*inputs[:3], **_ours(self.kind, inputs[3])).choice or "none",
        )

    def _drawn(self) -> tuple[list[Tensor], Tensor]:
        """Query, key, value and slopes; and the output's gradient."""
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(self.shape, generator=generator).to(self.dtype) for _ in range(4)]
        inputs = [tensor.requires_grad_() for tensor in drawn[:3]]
        slopes = Alibi(self.shape[1]).slopes.to(self.dtype).requires_grad_(self.kind == LEARNED)
        return [*inputs, slopes], drawn[3]

    def _contenders(self, slopes: Tensor) -> dict[str, _Attend]:
        kind, length, options = self.kind, self.shape[2], _ours(self.kind, slopes)
        contenders: dict[str, _Attend] = {OURS: lambda q, k, v, _: attention(q, k, v, **options)}
        if kind != LEARNED:
            bias = _bias(kind, length, slopes)
            contenders[DENSE] = lambda q, k, v, _: F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        contenders[MADE] = lambda q, k, v, slopes: F.scaled_dot_product_attention(
            q, k, v, attn_mask=_bias(kind, length, slopes)
        )
        return contenders

    def _call(self, attend: _Attend, inputs: list[Tensor], upstream: Tensor) -> Call:
        wanted = [tensor for tensor in inputs if tensor.requires_grad]

        def call() -> Groups:
            output = attend(*inputs)
            grads = torch.autograd.grad(output, wanted, upstream)
            return (output.detach(),), grads[:3], *((grad,) for grad in grads[3:])

        return call

    def _by_heads(self, inputs: list[Tensor], upstream: Tensor, dtype: torch.dtype) -> Groups:
        """Results of the textbook formula, computed one head at a time."""
        by_head: list[list[Tensor]] = []
        for head in range(self.shape[1]):
            parts = [tensor.detach()[:, head : head + 1].to(dtype).requires_grad_() for tensor in inputs[:3]]
            slope = inputs[3].detach()[head : head + 1].to(dtype).requires_grad_(self.kind == LEARNED)
            scores = parts[0] @ parts[1].mT / math.sqrt(self.shape[3])
            output = torch.softmax(scores + _bias(self.kind, self.shape[2], slope), dim=-1) @ parts[2]
            wanted = [*parts, slope] if slope.requires_grad else parts
            grads = torch.autograd.grad(output, wanted, upstream[:, head : head + 1].to(dtype))
            by_head.append([output.detach(), *grads])
        whole = [torch.cat(heads, dim=1 if heads[0].ndim == 4 else 0) for heads in zip(*by_head, strict=True)]
        return (whole[0],), tuple(whole[1:4]), *((grad,) for grad in whole[4:])

    def small(self) -> Self:
        """At most 70 tokens."""
        _, heads, length, head_dim = self.shape
        return replace(self, shape=(1, min(heads, 2), min(length, 70), min(head_dim, 8)))


def _ours(kind: str, slopes: Tensor) -> dict[str, Any]:
    """Options of ``attention`` with the user-defined function."""
    if kind == CAUSAL:
        return {"mask": MaskFunction(lambda batch, head, q_pos, k_pos: k_pos <= q_pos)}
    return {
        "scores": ScoreFunction(lambda score, batch, head, q_pos, k_pos: score - slopes[head] * (q_pos - k_pos).abs())
    }


def _bias(kind: str, length: int, slopes: Tensor) -> Tensor:
    """The same as a dense bias ``[1, heads, length, length]``."""
    place = torch.arange(length)
    if kind == CAUSAL:
        return torch.zeros(length, length, dtype=slopes.dtype).masked_fill_(place > place[:, None], -torch.inf)
    return -slopes.view(1, -1, 1, 1) * (place[:, None] - place).abs()


def function_rows() -> list[FunctionRow]:
    """Each function at the length of its floor."""
    return [FunctionRow(kind=kind, shape=(1, 12, 2048, 64)) for kind in (ALIBI, LEARNED, CAUSAL)]
