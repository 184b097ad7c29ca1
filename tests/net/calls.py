"""Calls of a module, their results, and the code paths that compute them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

import clearhead as ch
from tests.budget import within_budget

__all__ = ["Call", "agree", "as_tensor", "distance", "equal", "hooked", "observed", "results"]


@dataclass(frozen=True)
class Call:
    """Keyword arguments of a module's ``forward``.

    Attributes:
        arguments: tensors, masks and options.
        real: bool, the rows of the output that are compared; None for all.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    real: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Self:
        """The same call with floating-point tensors of another dtype."""
        moved = {
            name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in self.arguments.items()
        }
        return replace(self, arguments=moved)

    def on(self, device: torch.device) -> Self:
        """The same call with tensors and masks on another device."""
        moved = {
            name: value.to(device) if isinstance(value, (Tensor, ch.Mask)) else value
            for name, value in self.arguments.items()
        }
        return replace(self, arguments=moved, real=None if self.real is None else self.real.to(device))


def results(
    module: nn.Module, call: Call, *, seed: int = 7, gradients: bool = True, upstream_seed: int = 3
) -> dict[str, Tensor]:
    """Output, and gradients of floating-point arguments and parameters, for one upstream gradient."""
    leaves = {
        name: value.detach().clone().requires_grad_(gradients)
        for name, value in call.arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point() and "mask" not in name
    }
    # A call fills the caches that it gets.
    arguments = {name: leaves.get(name, copy.deepcopy(value)) for name, value in call.arguments.items()}
    torch.manual_seed(seed)
    with torch.set_grad_enabled(gradients):
        output = as_tensor(module(**arguments))
    output = output if call.real is None else output[call.real]
    if not gradients:
        return {"output": output}
    wanted = {**leaves, **{name: part for name, part in module.named_parameters() if part.requires_grad}}
    generator = torch.Generator().manual_seed(upstream_seed)
    upstream = torch.randn(output.shape, generator=generator).to(output)
    grads = torch.autograd.grad(output, list(wanted.values()), upstream, allow_unused=True)
    actual = {f"gradient of {name}": grad for name, grad in zip(wanted, grads, strict=True) if grad is not None}
    return {"output": output.detach(), **actual}


def as_tensor(output: Any) -> Tensor:
    """The tensor of an output that the loss uses."""
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if hasattr(output, name):
            tensor: Tensor = getattr(output, name)
            return tensor
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def hooked(module: nn.Module) -> Iterator[None]:
    """Empty forward hooks on every submodule, so that layers compute op by op."""
    parts = [part for name, part in module.named_modules() if name]
    handles = [part.register_forward_hook(lambda *_: None) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def observed(module: nn.Module) -> Iterator[None]:
    """The module's attention under observation, with statistics of every row."""
    with ch.observe(module, ch.Want(lse=True, received=True)):
        yield


def equal(actual: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Assert the same tensors, bit for bit; NaN equals NaN."""
    assert actual.keys() == wanted.keys()
    wrong = [
        f"{name}: {(actual[name].double() - wanted[name].double()).abs().max():.3g} of {wanted[name].abs().max():.3g}"
        for name in wanted
        if not torch.equal(actual[name], wanted[name])
    ]
    assert not wrong, f"differ: {'; '.join(wrong)}"


def agree(
    actual: Mapping[str, Tensor], textbook: Mapping[str, Tensor], exact: Mapping[str, Tensor], terms: int
) -> None:
    """Assert that every tensor is within the error budget of the textbook's."""
    assert actual.keys() == textbook.keys() == exact.keys()
    for name, truth in exact.items():
        within_budget(name, actual[name], textbook[name], truth, terms=terms, dtype=actual[name].dtype)


def distance(actual: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Largest relative difference of a tensor, in the 2-norm; tensors that are 0 except for rounding count little."""
    assert actual.keys() == wanted.keys()
    norms = {name: float(tensor.double().norm()) for name, tensor in wanted.items()}
    floor = 1e-2 * max(norms.values()) or 1.0
    return max(
        float((actual[name].double() - wanted[name].double()).norm()) / max(norm, floor) for name, norm in norms.items()
    )
