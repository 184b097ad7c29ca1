"""Other packages' models under ``ch.accelerate`` and ``ch.swap`` give their own results, in evaluation and in training.

The models are those of ``benchmarks/programs.py``, built small by the packages themselves. They are large enough that
attention and linear layers run on the kernels, which the tests see in torch's profiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from benchmarks.programs import PROGRAMS, Program, checked, disagreements, trained
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import clearhead as ch
from clearhead import testing
from tests.agreement import needs_native


def _operators(model: nn.Module, arguments: tuple[object, ...], context: AbstractContextManager[object]) -> set[str]:
    """The operators of clearhead in a training step."""
    with context, profile(activities=[ProfilerActivity.CPU]) as recorded:
        trained(model.train(), arguments)
    return {event.name for event in recorded.events() if event.name.startswith("clearhead::")}


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_program_agrees_with_float64_as_well_as_by_itself(program: Program) -> None:
    if reason := program.missing():
        pytest.skip(reason)
    # Every processor takes the kernels.
    with testing.choices(gemm="native", attention="native"):
        (model, arguments), _, _ = checked(program, quick=True)
        served = _operators(model, arguments, ch.accelerate())
    assert {"clearhead::linear", "clearhead::linear_input_gradient", "clearhead::linear_weight_gradient"} <= served
    assert _operators(model, arguments, nullcontext()) == set()


def _values() -> dict[str, Tensor]:
    return {"eval output 0": torch.ones(4, 8).double(), "gradient of weight": torch.ones(8).double()}


def _wrong(name: str, value: float) -> Mapping[str, Tensor]:
    values = _values()
    values[name][..., 0] = value
    return values


@pytest.mark.parametrize("name", _values())
@pytest.mark.parametrize("value", [1.001, float("nan"), float("inf")])
def test_wrong_results_are_found(name: str, value: float) -> None:
    assert list(disagreements(_values(), _values(), _values(), 64)) == []
    (said,) = disagreements(_values(), _wrong(name, value), _values(), 64)
    assert said.startswith(f"{name}: error ")


def test_missing_results_are_found() -> None:
    fast = _values()
    del fast["gradient of weight"]
    assert list(disagreements(_values(), fast, _values(), 64)) == ["other results: ['gradient of weight']"]


def test_missing_package_has_a_reason() -> None:
    program = Program("nothing", "no_such_package", lambda quick: (nn.Linear(1, 1), ()), "no-such-package")
    assert program.missing() == (
        "no-such-package cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"
    )
