"""The table of a report: an error is shown once, with the smallest call that raises it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch


def test_error_under_every_law_is_shown_once() -> None:
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
    # The dictionary has every finding.
    assert len(report.to_dict()["findings"]) == len(report.findings)


def test_error_under_some_laws_is_shown_under_the_first() -> None:
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


def test_error_in_an_empty_call_is_not_a_failure() -> None:
    def never_empty(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if 0 in key.shape or 0 in query.shape:
            raise ValueError("nothing to attend to")
        return F.scaled_dot_product_attention(query, key, value)

    finding = ch.verify(never_empty, laws=["empty calls"], examples=0)["empty calls"]
    assert finding.status == "does not apply"
    assert finding.detail.startswith("without a key it raises ValueError: nothing to attend to")


def test_mask_of_three_axes_may_be_refused_but_not_misread() -> None:
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
    finding = ch.verify(sequences_first, laws=[law], examples=0)[law]
    assert finding.detail == "the first of a mask's three axes is read as sequences, not as heads"


def test_unhashable_function_is_inspected_at_each_call() -> None:
    class Unhashable:
        def __eq__(self, other: object) -> bool:
            return False

        __hash__ = None  # type: ignore[assignment]

        def __call__(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    report = ch.verify(Unhashable(), laws=["output", "causal flag", "masks"], examples=0)
    assert report.ok, report
    assert report["masks"].status == "does not apply"


def test_inputs_are_drawn_anew_if_a_function_writes_to_them() -> None:
    def spoiling(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = F.scaled_dot_product_attention(query, key, value)
        for tensor in (query, key, value):
            tensor.detach().fill_(torch.nan)
        return output

    for dtype in (torch.float32, torch.float64):
        report = ch.verify(spoiling, laws=["output", "inputs unchanged"], examples=0, dtype=dtype)
        assert report.broken == ("inputs unchanged",), report
        assert ch.verify(F.scaled_dot_product_attention, laws=["output"], examples=0, dtype=dtype).ok
