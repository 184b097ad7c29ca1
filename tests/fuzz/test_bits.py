"""Random comparisons bit by bit: 1,000 in ``make test``, 20,000 in ``make test-all``, four times CLEARHEAD_FUZZ in
``make fuzz``."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

import clearhead as ch
from tests.agreement import needs_native
from tests.fuzz import bits

_DRAWN = 4 * int(os.environ["CLEARHEAD_FUZZ"]) if "CLEARHEAD_FUZZ" in os.environ else None
_COUNTS = [1_000, pytest.param(20_000, marks=pytest.mark.slow)] if _DRAWN is None else [_DRAWN]
#: Failures that are described; the others are counted.
_SHOWN = 5


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("count", _COUNTS)
def test_random_calls_have_the_same_bits_in_every_way(count: int) -> None:
    # New calls in each run of `make fuzz`.
    first = 0 if _DRAWN is None else int(torch.randint(2**40, ()))
    wrong = []
    with ch.invariant(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        for seed in range(first, first + count):
            with torch.enable_grad():
                difference = bits.compare(seed)
            wrong += [] if difference is None else [difference]
    assert not wrong, "\n".join([f"{len(wrong)} of {count} differ:", *wrong[:_SHOWN]])


@needs_native
@pytest.mark.parametrize("kind", bits.KINDS)
def test_comparison_detects_bits_that_depend_on_the_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result whose last bit depends on how many rows there are, on the threads, or on the tensors of the call."""
    calls = 0

    def moved(output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return output * (1.0 + calls % 2 / 64)

    attention, project, layers, norm = ch.attention, bits.project, bits.project_activate_project, bits.normed
    monkeypatch.setattr(ch, "attention", lambda *args, **kwargs: moved(attention(*args, **kwargs)))
    monkeypatch.setattr(bits, "project", lambda *args: moved(project(*args)))
    monkeypatch.setattr(bits, "project_activate_project", lambda *args, **kwargs: moved(layers(*args, **kwargs)))  # type: ignore[arg-type]
    monkeypatch.setattr(bits, "normed", lambda *args: moved(norm(*args)))
    with ch.invariant():
        difference = bits.compare(3, (kind,))
    assert difference is not None
    assert difference.startswith(f"compare(3): {kind}: ")
