"""Compares a backend's output and gradients with the float64 specification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.ops import library as native_library
from tests.budget import within_budget

needs_native = pytest.mark.skipif(
    native_library.reason() is not None, reason=f"native {native_library.reason() or 'runs'}"
)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made.requires_grad_(grad)


def results(inputs: tuple[Tensor, ...], backend: str = "native", **options: Any) -> list[Tensor]:
    """Output, log-sum-exp and gradients of query, key, value and what else is learned."""
    learned = [tensor for rule in options.get("scores", ()) for tensor in rule.parameters() if tensor.requires_grad]
    observation = ch.observe_attention(*inputs, want=ch.Want(lse=True), backend=backend, **options)
    slope = torch.linspace(-1.0, 1.0, observation.output.numel()).to(observation.output).view_as(observation.output)
    grads = torch.autograd.grad(observation.output, [*inputs, *learned], slope)
    return [observation.output.detach(), observation.lse.detach(), *grads]


def gradients(inputs: tuple[Tensor, ...], backend: str, **options: Any) -> list[Tensor]:
    output = ch.attention(*inputs[:3], backend=backend, **options)
    slope = torch.linspace(-1.0, 1.0, output.numel(), dtype=torch.float64).to(output).view_as(output)
    return [output, *torch.autograd.grad(output, inputs, slope)]


def _formula_in_16_bits(inputs: tuple[Tensor, ...], mask: ch.Mask | None, **options: Any) -> list[Tensor]:
    """Output and gradients of the formula with every step rounded to the inputs' 16-bit dtype."""
    assert not options.get("scores")
    query, key, value = inputs
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    if mask is not None:
        allowed = mask.dense(query.shape[2], key.shape[2], query_offset=options.get("query_offset"))
        scores = scores.masked_fill(~allowed, -torch.inf)
        scores = scores.masked_fill(~allowed.any(dim=-1, keepdim=True), 0.0)
    weights = torch.softmax(scores, dim=-1)
    if mask is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    output = weights @ value
    slope = torch.linspace(-1.0, 1.0, output.numel(), dtype=torch.float64).to(output).view_as(output)
    return [output, *torch.autograd.grad(output, inputs, slope)]


def compare(backend: str, inputs: tuple[Tensor, ...], **options: Any) -> None:
    """Output and every gradient on the error budget; skips what the backend's capability refuses."""
    reasons = ch.explain_dispatch(*inputs, **options).reasons[backend]
    if reasons:
        pytest.skip(f"{backend}: {'; '.join(reasons)}")
    exact_inputs = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    exact = gradients(exact_inputs, "reference", **options)
    # The kernels multiply in bfloat16 what is bfloat16, weights included; the others go up to float32.
    if backend == "native" and inputs[0].dtype == torch.bfloat16:
        textbook = _formula_in_16_bits(inputs, **options)
    else:
        textbook = gradients(inputs, "reference", **options)
    query, key, value = (tensor.detach().double().square().mean().sqrt().item() for tensor in inputs)
    # A gradient's terms are weight-gradient times key or query; an output's are values.
    sizes = {"output": value, "dquery": value * key, "dkey": value * query, "dvalue": 1.0}
    terms = max(inputs[0].shape[2], inputs[1].shape[2])
    compared = zip(gradients(inputs, backend, **options), textbook, exact, strict=True)
    for (name, size), tensors_of in zip(sizes.items(), compared, strict=True):
        within_budget(f"{backend} {name}", *tensors_of, terms=terms, size=size)
