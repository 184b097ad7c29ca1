"""Pages that could not be opened, or whose stated error would be wrong, are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import ClearheadError, DataError
from clearhead.inspector.schema import validate
from tests.inspector.sample import page_weights

MODULE = ch.nn.MultiHeadAttention(8, num_heads=2)
X = torch.randn(1, 4, 8)


def without_points() -> Any:
    with ch.trace(MODULE, record=False) as traced:
        MODULE(X)
    return traced


REFUSED: dict[str, Callable[[], object]] = {
    "subject must have a call": lambda: ch.view(without_points()),
    "heads must name at least one": lambda: ch.view(MODULE, X, heads=[]),
    "scores must stay within float32": lambda: ch.view(torch.full((3, 4), 1e20), torch.full((3, 4), 1e20)),
    "tokens must be text": lambda: ch.view(MODULE, X, tokens=["\ud800"] * 4),
    "title must be text": lambda: ch.view(MODULE, X, title=5),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("said", REFUSED)
def test_page_that_could_not_be_opened_is_refused(said: str) -> None:
    with pytest.raises(ClearheadError, match=said):
        REFUSED[said]()


def test_array_type_must_be_text() -> None:
    data = dict(ch.view(MODULE, X).data)
    data["layers"][0]["norms"][0]["type"] = []
    with pytest.raises(DataError, match="type must be one of"):
        validate(data)


def test_training_mode_of_each_part_is_restored() -> None:
    model = ch.nn.Encoder(8, num_heads=2, num_layers=2).train()
    model.blocks[0].eval()
    before = [part.training for part in model.modules()]
    ch.view(model, X)
    assert [part.training for part in model.modules()] == before


@pytest.mark.parametrize("size", [300.0, 1000.0])
def test_error_of_sharp_long_rows_is_at_most_the_stated_one(size: float) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 600, 16) * size, torch.randn(1, 600, 16)
    page = ch.view(query, key)
    observation = ch.observe_attention(query, key, key, want=ch.Want(rows=range(600)))
    assert observation.rows is not None
    off = np.abs(page_weights(page.data, 0, 0) - observation.rows[0].numpy()).max()
    assert off <= page.data["layers"][0]["heads"][0]["error"]["weight"] < 1e-4
