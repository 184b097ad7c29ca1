"""A module gives the same results fused, op by op, observed and in float64, for every combination of options."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from clearhead.errors import ShapeError
from tests.net.calls import agree, distance, equal, hooked, observed, results
from tests.net.modules import MODULES, Module, modules

PAIRS = [row for kind in MODULES for row in modules(kind)]
TRIPLES = [row for kind in MODULES for row in modules(kind, 3)]
#: Tolerance against float64, relative in the 2-norm.
FAR = {torch.float32: 1e-5, torch.bfloat16: 0.25}
#: Dtypes in which an observed module gives the same bits.
BITS_OBSERVED = (torch.float32,)
#: Terms in the longest sum of a module.
TERMS = 2 * 65 + 4 * 32


def _params(rows: list[Module], *pytest_marks: pytest.MarkDecorator) -> list[object]:
    return [pytest.param(row, id=row.name, marks=pytest_marks) for row in rows]


def _in_turns(rows: list[Module], step: int) -> list[object]:
    """All rows; all but every ``step``-th are slow."""
    return [*_params(rows[::step]), *(one for n in range(1, step) for one in _params(rows[n::step], pytest.mark.slow))]


@pytest.mark.parametrize("row", [*_params(PAIRS), *_params(TRIPLES, pytest.mark.slow)])
def test_fused_module_equals_unfused_module(row: Module) -> None:
    module, call = row.make(), row.call()
    fused = results(module, call)
    with hooked(module):
        unfused = results(module, call)
    exact = results(copy.deepcopy(module).double(), call.to(torch.float64))
    if row.gradient_jumps:
        fused, unfused, exact = ({"output": each["output"]} for each in (fused, unfused, exact))
    assert max(distance(unfused, exact), distance(fused, exact)) < FAR[row.dtype]
    if row.dtype is torch.float32:
        agree(fused, unfused, exact, TERMS)


@pytest.mark.parametrize("row", _in_turns([row for row in PAIRS if row.kind != "FeedForward"], 2))
def test_observed_module_equals_unobserved_module(row: Module) -> None:
    module, call = row.make(), row.call()
    plain = results(module, call)
    equal(results(module, call), plain)
    with observed(module):
        watched = results(module, call)
    if row.dtype in BITS_OBSERVED:
        equal(watched, plain)
    else:
        assert distance(watched, plain) < FAR[row.dtype]


@pytest.mark.parametrize("row", _in_turns(PAIRS, 24))
def test_other_devices_use_no_kernel(row: Module) -> None:
    """The kernels read CPU memory. The meta device stands for every other one; lengths stay where they are read."""
    module, call = row.make().to("meta"), row.call()
    read = {name: value for name, value in call.arguments.items() if name.endswith("lengths")}
    arguments = {**call.on(torch.device("meta")).arguments, **read}
    # Documents without elements are refused.
    with torch.autograd.profiler.profile() as profile, suppress(ShapeError):
        results(module, replace(call, arguments=arguments))
    assert not [event.name for event in profile.function_events if event.name.startswith("clearhead::")]
