"""Models of other libraries, whose linear layers swap replaces, give the outputs and gradients of the original."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.integrations.torch.parts import SwappedLinear
from tests.budget import within_budget

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "swapped_models.py"))


@pytest.fixture(autouse=True)
def native(_kernels: None) -> None:
    """Use the kernels on every processor."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARK["MODELS"])
def test_swapped_models_give_the_outputs_and_gradients_of_the_original(name: str) -> None:
    torch.manual_seed(0)
    try:
        model, inputs = BENCHMARK["MODELS"][name](True, 2)
    except (ImportError, RuntimeError, AttributeError) as error:
        pytest.skip(f"its library cannot be imported beside this torch: {type(error).__name__}: {error}"[:150])
    theirs: nn.Module = BENCHMARK["without_dropout"](model).eval()
    ours, exact = copy.deepcopy(theirs), copy.deepcopy(theirs).double()
    report = ch.swap(ours)
    assert any(type(module) is SwappedLinear for module in ours.modules()), report
    wide = tuple(each.double() if each.is_floating_point() else each for each in inputs)
    calls = ((ours, inputs), (theirs, inputs), (exact, wide))
    output_of, gradients = BENCHMARK["output_of"], BENCHMARK["gradients"]
    try:
        with torch.no_grad():
            truth: Any = output_of(*calls[2])
    except RuntimeError as error:
        pytest.skip(f"it does not compute in float64: {error}"[:150])
    with torch.no_grad():
        within_budget("output", *(output_of(*call) for call in calls[:2]), truth, terms=512)
    for each, _ in calls:
        each.train()
    names = [key for key, part in theirs.named_parameters() if part.requires_grad]
    for key, actual, textbook, right in zip(names, *(gradients(*call) for call in calls), strict=True):
        assert (actual is None) == (right is None), key
        if right is not None:
            within_budget(key, actual, textbook, right, terms=512, size=float(right.abs().max()))
    assert ch.unswap(ours).replaced == report.replaced
    assert [type(module) for module in ours.modules()] == [type(module) for module in theirs.modules()]
