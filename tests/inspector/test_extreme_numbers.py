"""A page of huge, tiny, infinite or NaN numbers is within the limit of the library's weights, or is refused."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.errors import ClearheadError
from clearhead.inspector.page import Page
from tests.inspector.sample import TOLERANCE, page_weights

SIZES = (1e-300, 1e-44, 1e-40, 1e-20, 1.0, 1e4, 1e6, 1e8, 1e9, 1e12, 1e17, 1e30, 1e38, 1e100, 1e300)
SHORT, LONG = 12, 530


def check(path: Path, query: Tensor, key: Tensor, value: Tensor, **options: object) -> bool:
    """Whether the page was made; a page that was made states its error, which is within the limit."""
    refusal, page = "", None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            page = ch.view(query, key, value, **options)
        except ClearheadError as error:
            refusal = str(error)
        if page is None:
            assert refusal.startswith("view: ")
            assert "\n" not in refusal
            return False
        page.save(path / "page.html")
    data = Page.open(path / "page.html").data
    observed = ch.observe_attention(query, key, value, want=ch.Want(rows=range(query.shape[0])), **options)
    assert observed.rows is not None
    truth = observed.rows.double().numpy()
    sound = ~np.isnan(truth).any(axis=1)
    with np.errstate(all="ignore"):
        off = np.abs(page_weights(dict(data), 0, 0) - truth)[sound]
    stated = data["layers"][0]["heads"][0]["error"]["weight"]
    assert off.max(initial=0.0) <= stated * 1.01 + 1e-12
    assert stated <= TOLERANCE
    return True


def draw(length: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(length, 8, generator=generator, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("length", "every"),
    [
        pytest.param(SHORT, 5, id="few"),
        pytest.param(SHORT, 1, marks=pytest.mark.slow, id="short"),
        pytest.param(LONG, 1, marks=pytest.mark.slow, id="long"),
    ],
)
@pytest.mark.parametrize("rules", [(), (ch.SoftCap(5.0),)], ids=["plain", "soft cap"])
def test_scores_of_every_size_are_shown_or_refused(
    tmp_path: Path, dtype: torch.dtype, length: int, rules: tuple[ch.ScoreRule, ...], every: int
) -> None:
    for size in SIZES[::every]:
        query, key, value = draw(length, dtype)
        made = check(tmp_path, query * size, key, value, mask=ch.Causal(), scores=rules)
        assert made or size > (1.0 if rules else 1e4), size
        # Beyond float32, queries are infinite and every row is NaN.
        assert rules or not (made and 1e12 <= size <= 1e30), size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e-300, 1e-40, 1e17, 1e38, 1e300])
def test_values_of_every_size_are_shown_or_refused(tmp_path: Path, dtype: torch.dtype, size: float) -> None:
    query, key, value = draw(SHORT, dtype)
    check(tmp_path, query, key, value * size)


@pytest.mark.parametrize("length", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [1e-40, 1.0, 1e4, 1e9, torch.finfo(torch.float32).max, torch.inf])
def test_biases_of_every_size_are_shown_or_refused(tmp_path: Path, size: float, length: int) -> None:
    query, key, value = draw(length, torch.float32)
    bias = torch.zeros(length, length).masked_fill(torch.ones(length, length).triu(1).bool(), -size)
    assert check(tmp_path, query, key, value, scores=ch.DenseBias(bias))


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("length", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
def test_page_with_nan_or_infinity_shows_the_other_rows(
    tmp_path: Path, place: int, special: float, length: int
) -> None:
    tensors = draw(length, torch.float32)
    tensors[place][5, 2] = special
    assert check(tmp_path, *tensors, mask=ch.Causal())


def test_rows_beside_infinity_that_float32_cannot_hold_are_refused(tmp_path: Path) -> None:
    query, key, value = draw(SHORT, torch.float32)
    query[5, 2] = torch.inf
    assert not check(tmp_path, query * 1e12, key, value)
