"""``Want``: requests that make no sense raise one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import clearhead as ch
from tests.problems import tensors

#: Of a call with batch 2, 4 heads, 13 queries and 13 keys.
REFUSED = [
    ({"top_k": 14}, "want.top_k must be a whole number from 0 to k_len 13; got 14"),
    ({"top_k": -1}, "want.top_k must be a whole number from 0 to k_len 13; got -1"),
    ({"top_k": True}, "want.top_k must be a whole number from 0 to k_len 13; got True"),
    ({"top_k": 2.0}, "got 2.0"),
    ({"top_k": "2"}, "got '2'"),
    ({"top_k": None}, "got None"),
    ({"sink": 14}, "want.sink must be a whole number from 0 to k_len 13; got 14"),
    ({"sink": -3}, "want.sink"),
    ({"sink": True}, "want.sink"),
    ({"heatmap": -1}, "want.heatmap must be 0 or more, a whole number; got -1"),
    ({"heatmap": True}, "want.heatmap"),
    ({"heatmap": 8.5}, "want.heatmap"),
    ({"lse": 1}, "want.lse must be True or False; got 1"),
    ({"entropy": "yes"}, "want.entropy must be True or False"),
    ({"received": None}, "want.received must be True or False"),
    ({"rows": [13]}, "want.rows must be query indices from 0 to 12; got [13]"),
    ({"rows": [0, -1]}, "got [-1]. Rows are indices of the call"),
    ({"rows": [1.5]}, "want.rows must be query indices from 0 to 12; got float32 of shape (1,)"),
    ({"rows": [True, False]}, "got bool of shape (2,)"),
    ({"rows": 3}, "got int64 of shape ()"),
    ({"rows": [[1, 2]]}, "got int64 of shape (1, 2)"),
    ({"rows": ["a"]}, "want.rows must be query indices"),
    ({"rows": torch.tensor([2, 99])}, "got [99]"),
    ({"row_weights": torch.ones(3)}, "want.row_weights must have shape [2 or 1, 4 or 1, n, 13]; got (3,)"),
    ({"row_weights": torch.ones(1, 1, 3, 12)}, "got (1, 1, 3, 12)"),
    ({"row_weights": torch.ones(3, 1, 3, 13)}, "got (3, 1, 3, 13)"),
    ({"row_weights": torch.ones(1, 2, 3, 13)}, "got (1, 2, 3, 13)"),
    ({"row_weights": torch.ones(1, 1, 3, 13).long()}, "must be a floating point tensor"),
    ({"row_weights": [[1.0] * 13]}, "must be a floating point tensor [2 or 1, 4 or 1, n, 13]; got list"),
]


@pytest.mark.parametrize(("asked", "words"), REFUSED, ids=[str(case[0])[:40] for case in REFUSED])
def test_wants_that_do_not_fit_are_refused(asked: dict[str, Any], words: str) -> None:
    inputs = tensors()
    for verb in (ch.observe_attention, ch.explain_dispatch):
        with pytest.raises(ch.ShapeError) as caught:
            verb(*inputs, want=ch.Want(**asked))
        assert words in str(caught.value)
        assert str(caught.value).startswith(f"{verb.__name__}: want.")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": 13},
        {"sink": 13},
        {"heatmap": 10**6},
        {"rows": []},
        {"rows": [5, 5, 0]},
        {"rows": range(13)},
        {"rows": torch.tensor([1, 2], dtype=torch.int32)},
        {"row_weights": torch.ones(2, 1, 3, 13, dtype=torch.float16)},
        {"row_weights": torch.ones(1, 4, 0, 13)},
    ],
    ids=repr,
)
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_valid_wants_are_computed(backend: str, asked: dict[str, Any]) -> None:
    want = ch.Want(**asked)
    (name,) = want.names
    observation = ch.observe_attention(*tensors(), want=want, backend=backend)
    answer = {"top_k": "top_weights", "heatmap": "heatmap_mean"}.get(name, name)
    assert getattr(observation, answer).shape[:2] == (2, 4)


def test_no_queries_have_no_rows() -> None:
    with pytest.raises(ch.ShapeError, match="must be empty where there are no queries"):
        ch.observe_attention(*tensors(q_len=0), want=ch.Want(rows=[0]))


def test_every_statistic_has_the_leading_axes_of_query() -> None:
    query, key, value = (tensor[0, 0] for tensor in tensors())
    want = ch.Want(
        lse=True, max_score=True, entropy=True, top_k=2, received=True, row_weights=torch.ones(1, 1, 3, 13), heatmap=4,
        sink=1, distance=True, rows=[2],
    )  # fmt: skip
    shapes = {
        "lse": (13,), "max_score": (13,), "entropy": (13,), "top_indices": (13, 2), "top_weights": (13, 2),
        "received": (13,), "row_weights": (3, 13), "heatmap_max": (4, 4), "heatmap_mean": (4, 4), "sink": (13,),
        "distance": (13,), "rows": (1, 13),
    }  # fmt: skip
    for backend in ("reference", "tiled"):
        observation = ch.observe_attention(query, key, value, want=want, backend=backend)
        assert {name: getattr(observation, name).shape for name in shapes} == shapes


def test_names_are_the_requested_statistics() -> None:
    assert ch.Want().names == frozenset()
    assert ch.Want(top_k=2, rows=[], sink=1).names == {"top_k", "rows", "sink"}
