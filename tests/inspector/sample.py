"""Attentions for the tests of ``view``, and a page's weights as its format defines them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import clearhead as ch
from clearhead.inspector.arrays import unpack

#: The largest allowed difference between the library's weights and a page's.
TOLERANCE = 1e-4

Floats = NDArray[np.float64]


@dataclass
class Case:
    """A call of ``view`` on tensors, and the same call of the library."""

    query: Tensor
    key: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def weights(self) -> Floats:
        """The library's weights, ``[batch, heads, q_len, k_len]``."""
        want = ch.Want(rows=range(self.query.shape[-2]))
        rows = ch.observe_attention(self.query, self.key, self.key, want=want, **self.options).rows
        assert rows is not None
        return rows.double().numpy()


def _case(q_shape: tuple[int, ...], k_shape: tuple[int, ...] | None = None, sharp: float = 1.0, **options: Any) -> Case:
    generator = torch.Generator().manual_seed(7)
    query = sharp * torch.randn(q_shape, generator=generator)
    return Case(query, torch.randn(k_shape or q_shape, generator=generator), options)


def cases() -> dict[str, Case]:
    """One case for each mask and rule that a page stores in a different way."""
    table = torch.rand(1, 1, 20, 20, generator=torch.Generator().manual_seed(1)) > 0.5
    bias = torch.randn(20, 20, generator=torch.Generator().manual_seed(2))
    small = (1, 2, 20, 8)
    return {
        "plain": _case(small),
        "causal": _case(small, mask=ch.Causal()),
        "peaked": _case((1, 1, 60, 64), sharp=8.0),
        "window": _case(small, mask=ch.Causal() & ch.Window(4)),
        "table": _case(small, mask=ch.Dense(table[0, 0])),
        "empty rows": _case(small, mask=~ch.Window(30)),
        "batch": _case((3, 2, 20, 8), mask=ch.Padding([20, 9, 4])),
        "grouped": _case((1, 4, 20, 8), (1, 2, 20, 8), mask=ch.Causal()),
        "offset": _case((1, 2, 5, 8), (1, 2, 20, 8), mask=ch.Causal(), scores=ch.Alibi(2), query_offset=15),
        "soft cap and distances": _case(
            small, sharp=3.0, scores=[ch.SoftCap(2.0), ch.RelativeBias(torch.linspace(-1, 1, 14).reshape(2, 7))]
        ),
        "sink": _case(small, mask=ch.Causal(), scores=ch.Sink([0.0, 1.5])),
        "bias": _case(small, scores=[ch.DenseBias(bias), ch.SoftCap(5.0)]),
        "function": _case(small, scores=ch.ScoreFunction(lambda s, b, h, q, k: s - 0.1 * (q - k).abs())),
        "scale": _case(small, scale=1.3),
        "long rows": _case((1, 1, 40, 16), (1, 1, 900, 16), sharp=2.0),
    }


def page_weights(data: dict[str, Any], layer: int, place: int) -> Floats:
    """The weights of one head on a page, by the formula of its format."""
    record = data["layers"][layer]
    head = record["heads"][place]
    q_len, k_len = record["q_len"], record["k_len"]
    scores = unpack(head["query"]).astype(np.float64) @ unpack(record["keys"][head["key"]]).astype(np.float64).T
    scores = scores * record["scale"]
    distance = np.arange(q_len)[:, None] - np.arange(k_len) + k_len - 1
    for rule in head["rules"]:
        if rule["kind"] == "softcap":
            scores = rule["cap"] * np.tanh(scores / rule["cap"])
        else:
            scores = scores + unpack(rule["bias"])[distance]
    if "table" in head:
        scores = unpack(head["table"]).astype(np.float64)
    allowed = np.ones((q_len, k_len), dtype=bool)
    if head["mask"] is not None:
        mask = data["masks"][head["mask"]]
        if mask["kind"] == "table":
            allowed = np.unpackbits(unpack(mask["bits"]), axis=1, bitorder="little")[:, :k_len].astype(bool)
        else:
            start, stop = (unpack(mask[name])[:, :, None] for name in ("start", "stop"))
            allowed = ((np.arange(k_len) >= start) & (np.arange(k_len) < stop)).any(axis=1)
    lse = unpack(head["lse"]).astype(np.float64)[:, None]
    open_rows = allowed & np.isfinite(lse)
    weights = np.exp(np.where(open_rows, scores - np.where(np.isfinite(lse), lse, 0.0), -np.inf))
    if "near" in head:
        near = {name: unpack(part) for name, part in head["near"].items()}
        weights[np.repeat(np.arange(q_len), near["counts"]), near["places"].astype(int)] += near["fix"]
        return np.maximum(weights, 0.0)
    return np.maximum(weights + np.where(open_rows, unpack(head["fix"]), 0.0), 0.0) if "fix" in head else weights
