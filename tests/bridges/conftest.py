"""Fixtures: the kernels, and the fused operators that run."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from clearhead.testing import choices, fused_calls
from tests.gemms import name_gemm

#: Models with the structure of another one: slow here; ``tests/net`` runs every family.
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
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        name = parameters.get("name")
        if isinstance(name, str) and name in SAME_STRUCTURE and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def _small_parts_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swap the parts of small models too, which swap leaves alone by default."""
    if find_spec("transformers") is not None:
        from clearhead.integrations.torch import parts as torch_parts
        from clearhead.integrations.transformers import parts, replace

        for module, name in (
            (replace, "_LEAST_WEIGHTS"),
            (replace, "_LEAST_WIDTH"),
            (parts.TokenwiseForward, "few"),
            (torch_parts, "_FEW_ELEMENTS"),
        ):
            monkeypatch.setattr(module, name, 0)


@pytest.fixture
def fused_kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kinds of the block operators that run, without the trial calls of swap."""
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
    """Use the kernels' GEMM and attention on every processor."""
    name_gemm(monkeypatch, "native")
    with choices(attention="native"):
        yield
