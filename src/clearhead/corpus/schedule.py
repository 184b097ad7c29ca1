"""Which rank computes which blocks: balanced by the work of their texts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from torch import nn

from clearhead.observe import attention_layers

__all__ = ["assign", "linear_share", "work_of"]


def linear_share(model: nn.Module) -> int:
    """How many keys of attention cost a query as much as its linear layers do.

    A layer of width ``d`` has about ``12 d^2`` weights, and a query and key cost about ``4 d`` multiplications with
    the statistics: ``3 d`` keys.
    """
    embedded = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    weights = sum(each.numel() for each in model.parameters() if each.ndim == 2 and id(each) not in embedded)
    width = math.sqrt(weights / (12 * max(1, len(attention_layers(model)))))
    return max(1, round(3 * width))


def work_of(lengths: Sequence[int], linear: int) -> int:
    """The work of texts that are read in parts of these lengths: ``sum(n^2 + linear n)``."""
    return sum(length * (length + linear) for length in lengths)


def assign(work: Mapping[int, int], ranks: int) -> list[list[int]]:
    """The blocks of each rank, in ascending order: the largest first, each to the rank with the least work so far.

    The result depends on the arguments alone. The most work of a rank is at most ``4/3`` of the best possible (Graham
    1969, "Bounds on multiprocessing timing anomalies"), and with many blocks close to the mean.
    """
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for block in sorted(work, key=lambda block: (-work[block], block)):
        load, rank = heapq.heappop(loads)
        parts[rank].append(block)
        heapq.heappush(loads, (load + work[block], rank))
    return [sorted(part) for part in parts]
