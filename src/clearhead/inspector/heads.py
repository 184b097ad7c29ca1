"""One layer's attention in a page: quantised queries and keys, and the library's statistics of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from clearhead.dispatch import run
from clearhead.errors import UnsupportedError
from clearhead.inspector.arrays import pack, pack_part
from clearhead.inspector.carried import FUNCTION, array_of, mask_of, rules_of
from clearhead.inspector.rounding import ShownHeads, checked, fitted
from clearhead.inspector.values import largest_of, norms_of, outputs_of, values_of
from clearhead.observe.points import Points
from clearhead.observe.taxonomy import head_scores
from clearhead.problem import Problem
from clearhead.statistics import Observation, Want

__all__ = ["Shared", "layer_of"]

_OVERVIEW: Final = 512
_THUMB: Final = 32


@dataclass
class Shared:
    """Texts, masks and images that layers refer to by index, and options of the whole page.

    Attributes:
        numbers: number of elements in all queries and keys of the page.
        values: whether the page stores values.
    """

    numbers: int = 0
    values: bool = False
    texts: list[list[str]] = field(default_factory=list)
    masks: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)

    def place(self, texts: list[str]) -> int:
        return _place(self.texts, texts)

    def mask(self, mask: dict[str, Any]) -> int:
        return _place(self.masks, mask)

    def image(self, image: dict[str, Any]) -> int:
        return _place(self.images, image)


def _place(among: list[Any], one: Any) -> int:
    if one not in among:
        among.append(one)
    return among.index(one)


def layer_of(
    points: Points, batch: int, heads: Sequence[int], shared: Shared, period: int | None = None
) -> dict[str, Any]:
    """The layer's object of the schema, for the chosen heads of one sequence; ``period`` if its tokens repeat."""
    problem = points.padded
    side = -(-max(problem.q_len, problem.k_len) // _OVERVIEW)
    one = ShownHeads(problem, _observed(problem, side), batch)
    kinds = _kinds(points, batch, period)
    group = problem.num_heads // problem.num_kv_heads
    layer: dict[str, list[Any]] = {"keys": [], "norms": [], "values": []}
    records: list[dict[str, Any]] = []
    for place, key_head in enumerate(sorted({head // group for head in heads})):
        group_heads = [head for head in heads if head // group == key_head]
        _check_scores(one, group_heads)
        near = fitted(one, key_head, group_heads, shared.numbers, largest_of(one, key_head) if shared.values else 0.0)
        layer["keys"].append(near.key.packed())
        layer["norms"].append(norms_of(one, key_head))
        for head, carried in zip(group_heads, near.heads, strict=True):
            record = {"head": head, "key": place} | carried.packed() | rules_of(problem, head, carried.table)
            record["mask"] = None if problem.mask is None else shared.mask(mask_of(problem, problem.mask, batch, head))
            record["scores"] = _scores(one.observation, kinds, batch, head)
            records.append(record | _statistics(one.observation, side, batch, head))
        if shared.values:
            values = values_of(one, key_head)
            layer["values"].append(values.packed())
            for record, rest in zip(
                records[-len(group_heads) :], outputs_of(one, near, group_heads, values), strict=True
            ):
                record["rest"] = rest
    return {
        "name": points.layer,
        "first": problem.query_offset,
        "q_len": problem.q_len,
        "k_len": problem.k_len,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "scale": problem.scale,
        "num_heads": problem.num_heads,
        **layer,
        "says": [*([] if problem.mask is None else [repr(problem.mask)]), *map(repr, problem.scores)],
        "heads": sorted(records, key=lambda record: int(record["head"])),
    }


def _check_scores(one: ShownHeads, heads: Sequence[int]) -> None:
    """Raise if finite queries and keys give a NaN or infinite log-sum-exp."""
    for head in heads:
        lse = one.lse(head)
        if not (np.isnan(lse) | np.isposinf(lse)).any() or not all(np.isfinite(each).all() for each in one.exact(head)):
            continue
        raise UnsupportedError.about(
            FUNCTION,
            "scores",
            must="stay within float32 where queries and keys are finite",
            got="an overflow",
            then="Scale queries, keys or biases down.",
        )


def _observed(problem: Problem, side: int) -> Observation:
    """The library's statistics of every row, column and block of ``side`` by ``side``."""
    most = checked(problem)
    want = Want(
        lse=True,
        entropy=True,
        distance=True,
        received=True,
        sink=1,
        heatmap=side,
        top_k=most,
        rows=None if most else range(problem.q_len),
    )
    with torch.no_grad():
        return run(FUNCTION, replace(problem, dropout=0.0), want)


def _kinds(points: Points, batch: int, period: int | None) -> dict[str, Tensor]:
    """The scores of ``head_scores`` by name; empty if queries and keys are not the same tokens."""
    problem = points.padded
    if problem.q_len != problem.k_len or problem.query_offset != 0:
        return {}
    with torch.no_grad():
        scores = head_scores(points, period=period)
    kinds = {name: getattr(scores, name)[batch] for name in ("previous", "following", "same")}
    return kinds if scores.induction is None else kinds | {"induction": scores.induction[batch]}


def _scores(observation: Observation, kinds: dict[str, Tensor], batch: int, head: int) -> dict[str, float]:
    """The scores of a head by name, each a mean over its queries."""
    means = {"entropy": observation.entropy, "distance": observation.distance, "first": observation.sink}
    scores = {name: value[batch, head].double().mean() for name, value in means.items() if value is not None}
    scores |= {name: value[head].double() for name, value in kinds.items()}
    return {name: float(torch.nan_to_num(value)) for name, value in scores.items()}


def _statistics(observation: Observation, side: int, batch: int, head: int) -> dict[str, Any]:
    def numbers(tensor: Tensor | None) -> Any:
        assert tensor is not None
        return array_of(tensor[batch, head])

    cells = torch.from_numpy(np.nan_to_num(numbers(observation.heatmap_max)))
    pool = -(-max(cells.shape) // _THUMB)
    thumb = torch.nn.functional.max_pool2d(cells[None, None], pool, ceil_mode=True)[0, 0]
    statistics = {"thumb": {"side": side * pool, "cells": _roots(thumb)}}
    if side == 1:
        return statistics
    return statistics | {
        "entropy": pack_part(numbers(observation.entropy)),
        "distance": pack_part(numbers(observation.distance)),
        "first": pack_part(numbers(observation.sink)),
        "received": pack_part(numbers(observation.received)),
        "overview": {"side": side, "cells": _roots(cells)},
    }


def _roots(weights: Tensor) -> dict[str, Any]:
    """Square roots of weights in 255 steps, so that small weights remain distinguishable."""
    return pack(np.rint(np.sqrt(weights.clamp(0, 1).numpy()) * 255), "u8")
