"""The table: an error is told once, under the smallest call that meets it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch


def test_an_error_at_every_call_is_told_once_with_its_smallest_call() -> None:
    def broken_down(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        raise IndexError(f"nothing here for {tuple(query.shape)}")

    report = ch.verify(broken_down)
    assert not report.ok
    assert len(report.broken) > 30
    assert report.always_raises is not None
    text = str(report)
    assert text.count("nothing here") == 1
    assert "FAILS every law" in text
    assert "raises IndexError: nothing here for (1, 1, 1, 1)" in text
    assert "with batch=1 heads=1 q_len=1 k_len=1 head_dim=1" in text
    assert report.verdict == f"it raises under all {len(report.broken)} laws that apply."
    # Nothing is left out of what a program reads.
    assert len(report.to_dict()["findings"]) == len(report.findings)


def test_an_error_under_some_laws_is_told_under_the_first() -> None:
    def without_masks(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if attn_mask is not None:
            raise TypeError("no masks here")
        return F.scaled_dot_product_attention(query, key, value)

    report = ch.verify(without_masks, laws=["output", "mask polarity", "masks"], examples=0)
    assert report.broken == ("mask polarity", "masks")
    assert report.always_raises is None
    assert str(report).count("no masks here") == 1
    assert "FAILS masks          the same error as under mask polarity" in str(report)
    assert report["masks"].detail == "raises TypeError: no masks here"


def test_what_a_call_with_nothing_in_it_raises_does_not_count() -> None:
    def never_empty(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if 0 in key.shape or 0 in query.shape:
            raise ValueError("nothing to attend to")
        return F.scaled_dot_product_attention(query, key, value)

    finding = ch.verify(never_empty, laws=["empty calls"], examples=0)["empty calls"]
    assert finding.status == "does not apply"
    assert finding.detail.startswith("without a key it raises ValueError: nothing to attend to")


def test_a_mask_of_three_axes_may_be_refused_but_not_misread() -> None:
    def two_or_four(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if attn_mask is not None and attn_mask.ndim == 3:
            raise ValueError("masks have two axes or four")
        return F.scaled_dot_product_attention(query, key, value, attn_mask)

    def sequences_first(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = attn_mask[:, None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask)

    law = "masks of three axes"
    assert ch.verify(two_or_four, laws=[law], examples=0)[law].status == "does not apply"
    found = ch.verify(sequences_first, laws=[law], examples=0)[law]
    assert found.detail == "the first of a mask's three axes is read as the sequences', not the heads'"


def test_a_function_without_a_hash_is_read_at_each_call() -> None:
    class Unhashable:
        def __eq__(self, other: object) -> bool:
            return False

        __hash__ = None  # type: ignore[assignment]

        def __call__(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    report = ch.verify(Unhashable(), laws=["output", "causal flag", "masks"], examples=0)
    assert report.ok, report
    assert report["masks"].status == "does not apply"


def test_numbers_are_drawn_anew_where_a_function_writes_to_its_inputs() -> None:
    def spoiling(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = F.scaled_dot_product_attention(query, key, value)
        for tensor in (query, key, value):
            tensor.detach().fill_(torch.nan)
        return output

    for dtype in (torch.float32, torch.float64):
        report = ch.verify(spoiling, laws=["output", "inputs unchanged"], examples=0, dtype=dtype)
        assert report.broken == ("inputs unchanged",), report
        assert ch.verify(F.scaled_dot_product_attention, laws=["output"], examples=0, dtype=dtype).ok
