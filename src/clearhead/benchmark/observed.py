"""What statistics cost: beside attention without them, and beside the textbook, which holds every weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.benchmark.cases import Case
from clearhead.benchmark.peers import OURS, Groups, TensorWork
from clearhead.functional import explain_dispatch, observe_attention
from clearhead.statistics import Observation, Want

__all__ = ["MATERIALISED", "PLAIN", "WANTS", "ObserveRow"]

PLAIN: Final = "clearhead without statistics"
MATERIALISED: Final = "textbook, weights materialised"

_HEATMAP, _SINK, _TOP = 64, 4, 8
#: Heads whose numbers are compared with float64.
_CHECKED_HEADS: Final = 2
_SUMS: Final[Mapping[str, object]] = {
    "lse": True,
    "max_score": True,
    "entropy": True,
    "sink": _SINK,
    "distance": True,
}
#: What each row asks for.
WANTS: Final[Mapping[str, Mapping[str, object]]] = {
    "row sums": _SUMS,
    f"top_k={_TOP}": {"top_k": _TOP},
    f"heatmap={_HEATMAP}": {"heatmap": _HEATMAP},
    "received": {"received": True},
    "everything": {**_SUMS, "top_k": _TOP, "heatmap": _HEATMAP, "received": True},
}
_COMPARED = (
    "output", "lse", "max_score", "entropy", "sink", "distance", "top_weights", "heatmap_max", "heatmap_mean",
    "received",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ObserveRow:
    """``observe_attention`` of one of ``WANTS``.

    Args:
        wanted: which.
        shape: ``(batch, heads, length, head_dim)``; the length must be a multiple of the heatmap's tiles.
        causal: whether later keys are forbidden.
        dtype: of the tensors.
    """

    wanted: str
    shape: tuple[int, int, int, int]
    causal: bool = False
    dtype: torch.dtype = torch.float32
    #: Peak memory is part of the answer.
    memory: bool = True

    @property
    def title(self) -> str:
        """What the work is."""
        kind = "causal" if self.causal else "full"
        return f"{'x'.join(map(str, self.shape))} {kind} {str(self.dtype)[6:]}, {self.wanted}"

    @property
    def group(self) -> str:
        """What is asked for."""
        return self.wanted

    @property
    def operations(self) -> None:
        """Nobody asks."""

    @property
    def memory_read(self) -> None:
        """Nobody asks."""

    @property
    def want(self) -> Want:
        """The statistics."""
        return Want(**WANTS[self.wanted])  # type: ignore[arg-type]

    def case(self) -> Case:
        """The contenders."""
        work, want = TensorWork(self.shape, self.dtype, causal=self.causal, training=False), self.want

        def ours() -> Groups:
            return _groups(observe_attention(*work.inputs, want=want, mask=work.mask))

        def materialised() -> Groups:
            return _groups(_from_weights(work.inputs[0], work.inputs[1], work.inputs[2], work.hidden, want))

        return Case(
            title=self.title,
            calls={OURS: ours, PLAIN: work.call(OURS), MATERIALISED: materialised},
            exact=lambda: _exact(work, want),
            plain=materialised,
            checked={OURS: ours, MATERIALISED: materialised},
            pick=_first_heads,
            backend=lambda: explain_dispatch(*work.inputs, mask=work.mask, want=want).choice or "none",
        )

    def small(self) -> Self:
        """64 tokens."""
        return replace(self, shape=(1, 2, _HEATMAP, 8))


def _groups(seen: Observation) -> Groups:
    found = (getattr(seen, name) for name in _COMPARED)
    return tuple((tensor,) for tensor in found if tensor is not None)


def _from_weights(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, want: Want) -> Observation:
    """Every statistic reduced from the whole matrix of weights, as one does without a kernel for it."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    found: dict[str, Tensor] = {"output": weights @ value}
    if want.lse:
        found["lse"], found["max_score"] = torch.logsumexp(scores, dim=-1), scores.amax(dim=-1)
        found["entropy"] = -torch.special.xlogy(weights, weights).sum(dim=-1)
        found["sink"] = weights[..., : want.sink].sum(dim=-1)
        place = torch.arange(scores.shape[-1], dtype=scores.dtype)
        found["distance"] = (weights * (place[:, None] - place).abs()).sum(dim=-1)
    if want.top_k:
        found["top_weights"] = weights.topk(want.top_k, dim=-1).values
    if want.heatmap:
        found["heatmap_max"] = F.max_pool2d(weights, want.heatmap)
        found["heatmap_mean"] = F.avg_pool2d(weights, want.heatmap)
    if want.received:
        found["received"] = weights.sum(dim=-2)
    return Observation(**found)


def _first_heads(groups: Groups) -> Groups:
    return tuple((tensor[:, :_CHECKED_HEADS],) for (tensor,) in groups)


def _exact(work: TensorWork, want: Want) -> Groups:
    """Of the first heads, in float64, one at a time."""
    query, key, value = (tensor[:, :_CHECKED_HEADS].double() for tensor in work.inputs)
    heads = [
        _groups(_from_weights(query[:, h : h + 1], key[:, h : h + 1], value[:, h : h + 1], work.hidden, want))
        for h in range(query.shape[1])
    ]
    return tuple((torch.cat([head[place][0] for head in heads], dim=1),) for place in range(len(heads[0])))
