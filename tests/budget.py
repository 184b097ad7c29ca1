"""The error budget of the tests is that of the conformance suite."""

from __future__ import annotations

from clearhead.verify.budget import excess, rounding, within_budget

__all__ = ["excess", "rounding", "within_budget"]
