"""The kernels, and the steps that calls are, for tests that ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from clearhead.testing import choices, fused_calls

#: Models that are built like another one; ``make test`` runs the others here, and every family in ``tests/net``.
SAME_STRUCTURE = frozenset(
    {
        "altclip",
        "arcee",
        "bert, relu",
        "clip, pictures",
        "distilbert",
        "electra",
        "gemma",
        "llama, biased, scaled positions",
        "marian",
        "mbart",
        "mistral",
        "phi3",
        "qwen2",
        "qwen3",
        "roberta",
        "siglip",
        "splinter",
    }
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and isinstance(item, pytest.Function):
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            if parameters.get("name") in SAME_STRUCTURE:
                item.add_marker("slow")


@pytest.fixture(autouse=True)
def _small_parts_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of small models gain nothing by themselves; here they are swapped as those of large ones."""
    if find_spec("transformers") is not None:
        from clearhead.integrations.torch import parts as torch_parts
        from clearhead.integrations.transformers import parts, replace

        for module, name in (
            (replace, "_LEAST_WEIGHTS"),
            (replace, "_LEAST_WIDTH"),
            (parts, "_FEW_ELEMENTS"),
            (torch_parts, "_FEW_ELEMENTS"),
        ):
            monkeypatch.setattr(module, name, 0)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What runs as one block operator, trials left out."""
    with fused_calls() as calls:
        if find_spec("transformers") is not None:
            from clearhead.integrations.transformers import replace

            attempt = replace.attempt

            def uncounted(*args: Any, **kwargs: Any) -> Any:
                before = len(calls)
                trial = attempt(*args, **kwargs)
                del calls[before:]
                return trial

            monkeypatch.setattr(replace, "attempt", uncounted)
        yield calls


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """GEMM and attention are the kernels' on every processor."""
    monkeypatch.setenv("CLEARHEAD_PROJECTION", "native")
    with choices(attention="native"):
        yield
