"""A swapped model under torch's higher derivatives, function transforms, copies and modes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from tests.net.calls import Call, as_tensor, distance, equal, hooked, results
from tests.net.families import FAMILIES, TOKENS, Family, by_structure

FAR = 1e-4
EACH = pytest.mark.parametrize("name", by_structure(FAMILIES))


def _both(family: Family, of: Callable[[Any, Call], dict[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results of the swapped model and of the original."""
    call = family.call(TOKENS, "none")
    with sdpa_kernel(SDPBackend.MATH):
        plain = family.plain()
        # Under a hook torch does not use its fused layer, which has no derivatives.
        with hooked(plain):
            return of(family.swapped(), call), of(plain, call)


def _penalty(model: Any, call: Call) -> dict[str, Tensor]:
    parameters = {name: part for name, part in model.named_parameters() if part.requires_grad}
    output = as_tensor(model(**call.arguments))
    first = torch.autograd.grad(output.square().sum(), [*parameters.values()], create_graph=True, allow_unused=True)
    penalty = torch.stack([grad.square().sum() for grad in first if grad is not None]).sum()
    second = torch.autograd.grad(penalty, [*parameters.values()], allow_unused=True)
    return {name: grad for name, grad in zip(parameters, second, strict=True) if grad is not None}


@EACH
def test_gradient_penalty(name: str) -> None:
    family = FAMILIES[name]
    actual, right = _both(family, _penalty)
    assert distance(actual, right) < 10 * FAR


def _jacobian(model: Any, call: Call) -> dict[str, Tensor]:
    name, part = next((name, part) for name, part in model.named_parameters() if part.ndim == 1 and part.numel() > 1)

    def first_values(given: Tensor) -> Tensor:
        output = torch.func.functional_call(model, {name: given}, (), dict(call.arguments))
        return as_tensor(output).flatten()[:5]

    return {"jacobian": torch.autograd.functional.jacobian(first_values, part.detach().clone(), vectorize=True)}


@EACH
def test_vectorized_jacobian(name: str) -> None:
    family = FAMILIES[name]
    actual, right = _both(family, _jacobian)
    # A key bias shifts all scores of a row equally: its derivatives are 0 except for rounding.
    torch.testing.assert_close(actual["jacobian"], right["jacobian"], rtol=FAR, atol=1e-6)


def _counted(model: nn.Module, call: Call) -> int:
    with FlopCounterMode(display=False) as counter:
        as_tensor(model(**call.arguments)).sum().backward()
    return counter.get_total_flops()


@EACH
def test_operations_are_counted(name: str) -> None:
    family = FAMILIES[name]
    call, plain = family.call(TOKENS, "none"), family.plain()
    with hooked(plain):
        wanted = _counted(plain, call)
    assert wanted > 0
    assert _counted(family.swapped(), call) >= 0.8 * wanted


@EACH
def test_copies_and_pickles_are_independent_models(name: str) -> None:
    family = FAMILIES[name]
    model, call = family.swapped(), family.call(TOKENS, "none")
    right = results(model, call)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        equal(results(other, call), right)
        with torch.no_grad():
            for part in other.parameters():
                part.zero_()
        equal(results(model, call), right)


@EACH
def test_modes_may_alternate(name: str) -> None:
    family = FAMILIES[name]
    model, call = family.swapped(), family.call(TOKENS, "none")
    right = results(family.swapped(), call)
    for mode in (torch.no_grad, torch.inference_mode, nullcontext):
        with mode():
            actual = results(model, call, gradients=False)
        assert distance(actual, {"output": right["output"]}) < FAR
        assert distance(results(model, call), right) < FAR


def _for_several_gradients(model: Any, call: Call) -> dict[str, Tensor]:
    """Stacked results for eight upstream gradients, because a single gradient may be near 0."""
    each_seed = [results(model, call, upstream_seed=seed) for seed in range(8)]
    return {name: torch.stack([each[name] for each in each_seed]) for name in each_seed[0]}


@EACH
def test_autocast(name: str) -> None:
    family = FAMILIES[name]
    call = family.call(TOKENS, "none")
    exact = _for_several_gradients(family.exact(), call.to(torch.float64))
    plain = family.plain()
    with torch.autocast("cpu", torch.bfloat16):
        with hooked(plain):
            theirs = _for_several_gradients(plain, call)
        ours = _for_several_gradients(family.swapped(), call)
    # A ReLU's gradient jumps at 0, where rounding decides.
    assert distance(ours, exact) < max(0.3, 2.0 * distance(theirs, exact))
    exact = _outputs(family.exact(), family, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        with hooked(plain):
            theirs = _outputs(plain, family)
        ours = _outputs(family.swapped(), family)
    assert distance(ours, exact) < max(0.01, 2.0 * distance(theirs, exact))


def _outputs(model: Any, family: Family, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Outputs for several lengths as one, because one of a contrastive model has four elements."""
    calls = [family.call(length, "none").to(dtype) for length in range(TOKENS - 7, TOKENS + 1)]
    return {"output": torch.cat([results(model, call, gradients=False)["output"].flatten() for call in calls])}
