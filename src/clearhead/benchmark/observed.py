"""Cost of statistics, against attention without them and against the textbook formula with all weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead.benchmark.cases import Comparison, PlainRow
from clearhead.benchmark.peers import OURS, Groups, TensorWork
from clearhead.functional.exact import explain_dispatch, observe_attention
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
#: The statistics of each row.
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
class ObserveRow(PlainRow):
    """``observe_attention`` of one of ``WANTS``.

    Args:
        wanted: a key of ``WANTS``.
        shape: ``(batch, heads, length, head_dim)``; the length must be a multiple of the heatmap's tiles.
        causal: whether the mask is causal.
        dtype: of the tensors.
    """

    wanted: str
    shape: tuple[int, int, int, int]
    causal: bool = False
    dtype: torch.dtype = torch.float32
    #: The peak memory is measured too.
    memory: bool = True

    @property
    def title(self) -> str:
        """Description of the work."""
        kind = "causal" if self.causal else "full"
        return f"{'x'.join(map(str, self.shape))} {kind} {str(self.dtype)[6:]}, {self.wanted}"

    @property
    def group(self) -> str:
        """The name of the statistics."""
        return self.wanted

    @property
    def operations(self) -> None:
        """None: the operations are not counted."""

    @property
    def want(self) -> Want:
        """The requested statistics."""
        return Want(**WANTS[self.wanted])  # type: ignore[arg-type]

    def comparison(self) -> Comparison:
        """The contenders."""
        work, want = TensorWork(self.shape, self.dtype, causal=self.causal, training=False), self.want

        def ours() -> Groups:
            return _groups(observe_attention(*work.inputs, want=want, mask=work.mask))

        def materialised() -> Groups:
            return _groups(_from_weights(work.inputs[0], work.inputs[1], work.inputs[2], work.hidden, want))

        return Comparison(
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


def _groups(observation: Observation) -> Groups:
    statistics = (getattr(observation, name) for name in _COMPARED)
    return tuple((tensor,) for tensor in statistics if tensor is not None)


def _from_weights(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, want: Want) -> Observation:
    """Every statistic computed from the whole matrix of weights."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    statistics: dict[str, Tensor] = {"output": weights @ value}
    if want.lse:
        statistics["lse"], statistics["max_score"] = torch.logsumexp(scores, dim=-1), scores.amax(dim=-1)
        statistics["entropy"] = -torch.special.xlogy(weights, weights).sum(dim=-1)
        statistics["sink"] = weights[..., : want.sink].sum(dim=-1)
        place = torch.arange(scores.shape[-1], dtype=scores.dtype)
        statistics["distance"] = (weights * (place[:, None] - place).abs()).sum(dim=-1)
    if want.top_k:
        statistics["top_weights"] = weights.topk(want.top_k, dim=-1).values
    if want.heatmap:
        statistics["heatmap_max"] = F.max_pool2d(weights, want.heatmap)
        statistics["heatmap_mean"] = F.avg_pool2d(weights, want.heatmap)
    if want.received:
        statistics["received"] = weights.sum(dim=-2)
    return Observation(**statistics)


def _first_heads(groups: Groups) -> Groups:
    return tuple((tensor[:, :_CHECKED_HEADS],) for (tensor,) in groups)


def _exact(work: TensorWork, want: Want) -> Groups:
    """Statistics of the first heads in float64, one head at a time."""
    query, key, value = (tensor[:, :_CHECKED_HEADS].double() for tensor in work.inputs)
    heads = [
        _groups(_from_weights(query[:, h : h + 1], key[:, h : h + 1], value[:, h : h + 1], work.hidden, want))
        for h in range(query.shape[1])
    ]
    return tuple((torch.cat([head[place][0] for head in heads], dim=1),) for place in range(len(heads[0])))
