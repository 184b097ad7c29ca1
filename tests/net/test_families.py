"""A swapped model equals the original: fused, op by op, observed, padded, in training and in eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from clearhead.integrations.transformers.interface import passes_by
from tests.net.calls import agree, distance, equal, hooked, observed, results
from tests.net.families import FAMILIES, TOKENS, TRANSFORMERS_4, Family, by_structure

#: Tolerance of float32 against float64, relative in the 2-norm; the scores of CLIP and SigLIP are differences.
FAR = 1e-4
TERMS = 2 * 65 + 4 * 32
LENGTHS = (1, 2, 17, 65)


def _padded() -> Iterator[object]:
    """Every family with every side; all but one side of each family are marked slow, the sides in turn."""
    for row, family in enumerate(FAMILIES.values()):
        sides = ("none", *family.paddings)
        for column, side in enumerate(sides):
            slow = [pytest.mark.slow] * ((row + column) % len(sides) > 0)
            yield pytest.param(family, side, id=f"{family.name}, padding: {side}", marks=slow)


@pytest.mark.parametrize(("family", "side"), list(_padded()))
def test_swapped_model_equals_original(family: Family, side: str) -> None:
    call = family.call(TOKENS, side)
    textbook = results(family.plain(), call)
    if TRANSFORMERS_4 and family.name == "clip":
        pytest.skip("transformers 4 makes CLIP's mask in float32 with float64's smallest number")
    exact = results(family.exact(), call.to(torch.float64))
    if TRANSFORMERS_4 and exact["output"].isnan().any():
        pytest.skip("this release of transformers computes NaN")
    agree(results(family.swapped(), call), textbook, exact, TERMS)


def _at_lengths() -> list[Any]:
    """Every family at every length; all but one length of each family are marked slow, each length for as many."""
    return [
        pytest.param(
            family,
            length,
            id=f"{family.name}, {length} tokens",
            marks=[pytest.mark.slow] * ((row + column) % len(LENGTHS) > 0),
        )
        for row, family in enumerate(FAMILIES.values())
        for column, length in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize(("family", "length"), _at_lengths())
def test_swapped_model_equals_original_at_odd_lengths(family: Family, length: int) -> None:
    call = family.call(length, "none")
    textbook, actual = (results(model, call, gradients=False) for model in (family.plain(), family.swapped()))
    assert distance(actual, textbook) < FAR


@pytest.mark.parametrize("name", by_structure(FAMILIES))
def test_swapped_model_in_bfloat16_is_as_exact_as_the_original(name: str) -> None:
    family = FAMILIES[name]
    call = family.call(TOKENS, family.paddings[-1] if family.paddings else "none")
    exact = results(family.plain().to(torch.bfloat16).float(), call.to(torch.bfloat16).to(torch.float32))
    textbook, actual = (
        results(model.to(torch.bfloat16), call.to(torch.bfloat16)) for model in (family.plain(), family.swapped())
    )
    # A ReLU's gradient jumps at 0, where rounding decides.
    assert distance(actual, exact) < max(0.4, 2.0 * distance(textbook, exact))
    actual, textbook, exact = ({"output": each["output"]} for each in (actual, textbook, exact))
    assert distance(actual, exact) < max(0.05, 2.0 * distance(textbook, exact))


@pytest.mark.parametrize("name", by_structure(FAMILIES))
def test_fused_observed_and_unfused_models_agree(name: str) -> None:
    family = FAMILIES[name]
    model = family.swapped()
    call = family.call(TOKENS, family.paddings[0] if family.paddings else "none")
    fused = results(model, call)
    equal(results(model, call), fused)
    with hooked(model):
        unfused = results(model, call)
    assert distance(unfused, fused) < FAR
    if TRANSFORMERS_4 and not any(map(passes_by, model.modules())):
        pytest.skip("transformers 4 has no attention interface for it")
    with observed(model):
        watched = results(model, call)
    assert distance(watched, fused) < FAR


@pytest.mark.parametrize("name", by_structure(FAMILIES))
def test_hooks_get_the_output_of_every_call(name: str) -> None:
    family = FAMILIES[name]
    model = family.swapped()
    call = family.call(TOKENS, "none")
    results(model, call, gradients=False)
    calls: list[str] = []
    handles = [
        part.register_forward_hook(lambda *_, name=name: calls.append(name))
        for name, part in model.named_modules()
        if not list(part.children())
    ]
    results(model, call, gradients=False)
    swapped = set(calls)
    for handle in handles:
        handle.remove()
    calls.clear()
    plain = family.plain()
    for name, part in plain.named_modules():
        if not list(part.children()):
            part.register_forward_hook(lambda *_, name=name: calls.append(name))
    results(plain, call, gradients=False)
    # transformers 4 applies GPT-2's weight dropout only in eager attention.
    assert swapped >= {name for name in calls if not (TRANSFORMERS_4 and name.endswith("attn_dropout"))}
