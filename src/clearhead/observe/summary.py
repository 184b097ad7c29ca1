"""Statistics of each head over a text of any length, accumulated part by part."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from clearhead.observe.observe import Observed, Seen
from clearhead.statistics import Want

__all__ = ["HeadSummary", "StrongEdge", "Summary"]


@dataclass(frozen=True, order=True)
class StrongEdge:
    """A query with a large weight on one key; positions count from the start of the text."""

    weight: float
    query: int
    key: int


@dataclass(frozen=True)
class HeadSummary:
    """Means over all queries of one head, and its largest weights.

    Attributes:
        layer: the module's dotted name, and the number of the call if a model uses it several times.
        head: index of the head.
        entropy: mean entropy of a query's weights in nats; its ``exp`` is the effective number of keys.
        distance: mean distance between a query and the keys it attends to, in tokens.
        first: mean weight on the first token of the query's part of the text.
        edges: the largest weights of queries after the first token, in descending order.
    """

    layer: str
    head: int
    entropy: float
    distance: float
    first: float
    edges: tuple[StrongEdge, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


@dataclass(eq=False)
class _Layer:
    """Sums over the parts of a text that were added."""

    queries: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    edges: list[list[StrongEdge]] = field(default_factory=list)
    parts: dict[str, list[Tensor]] = field(default_factory=dict)


class Summary:
    """Accumulates statistics from ``observe`` over the parts of a text.

    Args:
        num_edges: how many of each head's largest weights to record.
        keep_tensors: whether to record the statistics of every token too.
    """

    def __init__(self, num_edges: int = 3, *, keep_tensors: bool = False) -> None:
        self._num_edges, self._keep = num_edges, keep_tensors
        self._layers: dict[str, _Layer] = {}

    def want(self, length: int) -> Want:
        """The statistics to observe on a part of ``length`` tokens."""
        top = min(max(self._num_edges, 1), length)
        return Want(entropy=True, distance=True, sink=1, received=True, top_k=top)

    def add(self, observations: Seen, first: int) -> None:
        """Add the observations of a part that starts at token ``first`` of the text."""
        for name, observed in observations.every_call():
            self._add(self._layers.setdefault(name, _Layer()), observed, first)

    def _add(self, layer: _Layer, observed: Observed, first: int) -> None:
        assert observed.entropy is not None
        assert observed.top_indices is not None
        assert observed.top_weights is not None
        layer.queries += observed.entropy.shape[2]
        for name in ("entropy", "distance", "sink"):
            total = getattr(observed, name)[0].double().sum(dim=-1)
            layer.sums[name] = layer.sums[name] + total if name in layer.sums else total
        indices, weights = observed.top_indices[0], observed.top_weights[0].double()
        for head in range(weights.shape[0]):
            old = layer.edges[head] if head < len(layer.edges) else []
            new = sorted([*old, *self._strongest(indices[head], weights[head], first)], key=_heaviest_first)
            layer.edges[head : head + 1] = [new[: self._num_edges]]
        if self._keep:
            self._keep_tensors(layer, observed, first)

    def _strongest(self, indices: Tensor, weights: Tensor, first: int) -> list[StrongEdge]:
        """The strongest edges of one head in one part, without the first token, which often attends only to itself."""
        count = min(self._num_edges, max(weights.numel() - weights.shape[-1], 0))
        heaviest, places = weights[1:].flatten().topk(count)
        edges = []
        for weight, place in zip(heaviest.tolist(), places.tolist(), strict=True):
            row, column = divmod(place, weights.shape[-1])
            edges.append(StrongEdge(weight, first + row + 1, first + int(indices[row + 1, column])))
        return edges

    def _keep_tensors(self, layer: _Layer, observed: Observed, first: int) -> None:
        for name in ("entropy", "distance", "sink", "received", "top_weights"):
            layer.parts.setdefault(name, []).append(_padded(getattr(observed, name)[0], self._num_edges))
        assert observed.top_indices is not None
        layer.parts.setdefault("top_indices", []).append(_padded(observed.top_indices[0] + first, self._num_edges))

    def heads(self) -> list[HeadSummary]:
        """One summary per head and layer, in the model's order."""
        summaries = []
        for name, layer in self._layers.items():
            means = {statistic: (total / layer.queries).tolist() for statistic, total in layer.sums.items()}
            for head, edges in enumerate(layer.edges):
                mean = {statistic: values[head] for statistic, values in means.items()}
                summaries.append(
                    HeadSummary(name, head, mean["entropy"], mean["distance"], mean["sink"], edges=tuple(edges))
                )
        return summaries

    def tensors(self) -> dict[str, Tensor]:
        """Each layer's statistics by the name ``"<layer>.<statistic>"``.

        They have shape ``[heads, tokens]``, and ``top_indices`` and ``top_weights`` ``[heads, tokens, num_edges]``.
        Indices count from the start of the text; a part with fewer than ``num_edges`` tokens is padded with -1.
        """
        return {
            f"{name}.{statistic}".removeprefix("."): torch.cat(parts, dim=1)
            for name, layer in self._layers.items()
            for statistic, parts in layer.parts.items()
        }


def _heaviest_first(strong_edge: StrongEdge) -> tuple[float, int, int]:
    return (-strong_edge.weight, strong_edge.query, strong_edge.key)


def _padded(part: Tensor, num_edges: int) -> Tensor:
    """The top-k axis padded to ``num_edges``."""
    if part.ndim < 3:
        return part
    filling = -1 if not part.is_floating_point() else 0.0
    return torch.nn.functional.pad(part, (0, max(num_edges - part.shape[-1], 0)), value=filling)
