"""``functional.flex_attention`` against torch's compiled function, which has no backward pass on CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor

from clearhead.benchmark.cases import Comparison, PlainRow
from clearhead.benchmark.peers import OURS, Call, Groups
from clearhead.functional.exact import attention, explain_dispatch
from clearhead.functional.flex import ScoreMod, flex_attention
from clearhead.masks import Causal, from_block_mask
from clearhead.scores import Alibi

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["COMPILED", "PLAIN_CAUSAL", "FlexRow", "flex_rows"]

COMPILED: Final = "flex_attention, compiled"
#: The same sizes under the causal mask alone: the limit of the time of training is a multiple of it.
PLAIN_CAUSAL: Final = "attention, causal"
_WINDOW: Final = 256
_CAP: Final = 30.0

_ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
_MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def _window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= _WINDOW)


def _soft_cap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return _CAP * torch.tanh(score / _CAP)


def _alibi(heads: int) -> _ScoreMod:
    slopes = Alibi(heads).slopes

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    return score_mod


#: For each kind its score_mod, made for a number of heads, and its mask_mod.
_KINDS: Final[dict[str, tuple[Callable[[int], _ScoreMod | None], _MaskMod]]] = {
    "causal": (lambda heads: None, _causal),
    "window": (lambda heads: None, _window),
    "ALiBi": (_alibi, _causal),
    "soft cap": (lambda heads: _soft_cap, _causal),
}


@cache
def _compiled() -> Callable[..., Tensor]:
    """torch's function, compiled once for all rows."""
    from torch.nn.attention import flex_attention as torchs

    return torch.compile(torchs.flex_attention)


@dataclass(frozen=True, kw_only=True)
class FlexRow(PlainRow):
    """One kind of functions.

    Args:
        kind: a key of ``_KINDS``.
        shape: ``(batch, heads, length, head_dim)``.
        training: whether a call includes the backward pass.
    """

    kind: str
    shape: tuple[int, int, int, int]
    training: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def title(self) -> str:
        """Description of the work."""
        mode = "forward+backward" if self.training else "forward"
        return f"{self.kind}, {'x'.join(map(str, self.shape))} {mode} {str(self.dtype)[6:]}"

    @property
    def group(self) -> str:
        """Forward or training."""
        return "training" if self.training else "forward"

    @property
    def operations(self) -> float:
        """Two products forward and five backward (Dao 2023, FlashAttention-2, section 4.1)."""
        batch, heads, length, head_dim = self.shape
        reach = min(_WINDOW + 1, length) if self.kind == "window" else length
        pairs = reach * (reach + 1) / 2 + (length - reach) * reach
        return (3.5 if self.training else 1.0) * 4.0 * batch * heads * pairs * head_dim

    def comparison(self) -> Comparison:
        """The contenders."""
        from torch.nn.attention.flex_attention import create_block_mask

        make, mask_mod = _KINDS[self.kind]
        score_mod, length = make(self.shape[1]), self.shape[2]
        block_mask = create_block_mask(mask_mod, None, None, length, length, device="cpu")
        work = _FlexWork(self, score_mod, block_mask)
        ours = work.call(lambda q, k, v: flex_attention(q, k, v, score_mod, block_mask))
        if self.training:
            others = {PLAIN_CAUSAL: work.call(lambda q, k, v: attention(q, k, v, mask=Causal()))}
        else:
            others = {
                COMPILED: work.call(lambda q, k, v: _compiled()(q, k, v, score_mod=score_mod, block_mask=block_mask))
            }
        return Comparison(
            title=self.title,
            calls={OURS: ours, **others},
            exact=lambda: work.by_heads(torch.float64),
            plain=lambda: work.by_heads(self.dtype),
            checked={OURS: ours} if self.training else None,
            backend=lambda: work.backend,
        )

    def small(self) -> Self:
        """At most 70 tokens."""
        _, heads, length, head_dim = self.shape
        return replace(self, shape=(1, min(heads, 2), min(length, 70), min(head_dim, 16)))


class _FlexWork:
    """The tensors of a row, and its functions."""

    def __init__(self, row: FlexRow, score_mod: _ScoreMod | None, block_mask: BlockMask) -> None:
        self._row, self._score_mod, self._block_mask = row, score_mod, block_mask
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(row.shape, generator=generator).to(row.dtype) for _ in range(4)]
        self._inputs, self._upstream = [tensor.requires_grad_(row.training) for tensor in drawn[:3]], drawn[3]

    def call(self, attend: Callable[[Tensor, Tensor, Tensor], Any]) -> Call:
        """A call that returns the output, and in training the gradients."""

        def call() -> Groups:
            if not self._row.training:
                with torch.no_grad():
                    return ((attend(*self._inputs),),)
            output = attend(*self._inputs)
            return (output.detach(),), torch.autograd.grad(output, self._inputs, self._upstream)

        return call

    @cached_property
    def backend(self) -> str:
        """The backend that runs the functions."""
        scores = () if self._score_mod is None else (ScoreMod(self._score_mod),)
        mask = from_block_mask(self._block_mask)
        return explain_dispatch(*self._inputs, mask=mask, scores=scores, query_offset=0).choice or "none"

    def by_heads(self, dtype: torch.dtype) -> Groups:
        """Results of the textbook formula, computed one head at a time."""
        _, heads, length, head_dim = self._row.shape
        zero, place = torch.zeros((), dtype=torch.int64), torch.arange(length)
        allowed = self._block_mask.mask_mod(zero, zero, place[:, None], place)
        by_head: list[tuple[Tensor, ...]] = []
        for head in range(heads):
            parts = [tensor.detach()[:, head : head + 1].to(dtype).requires_grad_() for tensor in self._inputs]
            scores = parts[0] @ parts[1].mT / math.sqrt(head_dim)
            if self._score_mod is not None:
                scores = self._score_mod(scores, zero, torch.tensor(head), place[:, None], place)
            output = torch.softmax(scores.masked_fill(~allowed, -torch.inf), dim=-1) @ parts[2]
            grads: tuple[Tensor, ...] = ()
            if self._row.training:
                grads = torch.autograd.grad(output, parts, self._upstream[:, head : head + 1].to(dtype))
            by_head.append((output.detach(), *grads))
        output, *grads_of = (torch.cat(one, dim=1) for one in zip(*by_head, strict=True))
        return ((output,), tuple(grads_of)) if self._row.training else ((output,),)


def flex_rows() -> list[FlexRow]:
    """Every kind, forward and in training, at the length of its floor."""
    return [
        FlexRow(kind=kind, shape=(1, 12, 2048, 64), training=training)
        for training, kind in product((False, True), _KINDS)
    ]
