"""Every test of a layer in one step has the kernels' products, and nothing is known of calls before."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from clearhead.nn import step
from clearhead.projection import chosen
from tests.nn.layers.definition import forget


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are the kernels' where larger ones are."""
    monkeypatch.setenv("CLEARHEAD_PROJECTION", "native")
    monkeypatch.setattr(chosen, "_CHOICES", {})


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the steps that calls are from here on."""
    found: list[str] = []
    forward = step.Step.forward

    def noting(self: step.Step, *given: Any) -> list[Tensor]:
        found.append(type(self).__name__)
        return forward(self, *given)

    monkeypatch.setattr(step.Step, "forward", noting)
    return found
