"""Compares a backend's statistics and their gradients with the float64 specification."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.dispatch import BACKENDS, loaded
from tests.budget import rounding, within_budget

#: What every backend that gives it can differentiate.
DIFFERENTIABLE = ("lse", "max_score", "entropy", "received", "sink")
#: What the specification and the tiles can differentiate besides.
ALSO_DIFFERENTIABLE = ("row_weights", "distance", "rows")
#: Backends that run here and give more than the output.
GIVING = [
    backend.name
    for backend in map(loaded, BACKENDS)
    if backend.name != "reference" and backend.capability.statistics and backend.capability.requires() is None
]


def everything(
    inputs: Sequence[Tensor],
    *,
    only: Iterable[str] | None = None,
    top_k: int = 5,
    heatmap: int = 5,
    sink: int = 3,
    rows: Sequence[int] | None = None,
) -> ch.Want:
    """All statistics of a call, or ``only`` those named, each number cut to what the call has."""
    q_len, k_len = inputs[0].shape[-2], inputs[1].shape[-2]
    generator = torch.Generator().manual_seed(11)
    asked: dict[str, Any] = {
        "lse": True,
        "max_score": True,
        "entropy": True,
        "received": True,
        "distance": True,
        "top_k": min(top_k, k_len),
        "sink": min(sink, k_len),
        "heatmap": heatmap,
        "rows": rows if rows is not None else [row for row in (q_len - 1, 0, q_len // 2, 0) if 0 <= row < q_len],
        "row_weights": torch.rand(1, 1, 2, q_len, generator=generator, dtype=torch.float64),
    }
    names = set(asked) if only is None else set(only)
    return ch.Want(**{name: value for name, value in asked.items() if name in names})


def given_by(backend: str) -> frozenset[str]:
    """The statistics that a backend's capability names."""
    return loaded(backend).capability.statistics


def check_statistics(backend: str, inputs: tuple[Tensor, ...], want: ch.Want, **options: Any) -> None:
    """Compares the output bitwise, and every requested statistic; skips calls that the backend does not support."""
    _skip_refused(backend, inputs, want, options)
    inputs = tuple(tensor.detach() for tensor in inputs)
    exact_inputs = tuple(tensor.double() for tensor in inputs)
    exact = ch.observe_attention(*exact_inputs, want=want, backend="reference", **options)
    textbook = ch.observe_attention(*inputs, want=want, backend="reference", **options)
    observation = ch.observe_attention(*inputs, want=want, backend=backend, **options)
    plain = ch.attention(*inputs, backend=backend, **options)
    torch.testing.assert_close(
        observation.output, plain, rtol=0, atol=0, equal_nan=True, msg=f"{backend}: output's bits"
    )
    compare_observations(backend, observation, textbook, exact, scale_of(exact_inputs, options))


@dataclass(frozen=True)
class Scale:
    """Inputs of the error budget: all exact weights, the size of scores, and the number of terms in a sum."""

    weights: Tensor
    size: float
    terms: int


def scale_of(inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Scale:
    """Of a call in float64. A weight's relative error is its score's absolute one, so scores are the size."""
    lengths = [tensor.shape[-2] for tensor in inputs[:2]]
    want = ch.Want(lse=True, max_score=True, rows=range(lengths[0]))
    observation = ch.observe_attention(*inputs, want=want, backend="reference", **options)
    scores = torch.cat([observation.lse.flatten(), observation.max_score.flatten()]).detach()
    scores = scores[torch.isfinite(scores)].abs()
    size = max(1.0, scores.max().item() if scores.numel() else 1.0)
    return Scale(observation.rows.detach(), size, max(1, *lengths))


def compare_observations(
    backend: str, observation: ch.Observation, textbook: ch.Observation, exact: ch.Observation, scale: Scale
) -> None:
    """Assert that ``found`` has exactly the fields that ``textbook`` has, each within its budget."""
    for field in fields(ch.Observation)[1:]:
        name = f"{backend} {field.name}"
        result, plain, right = (getattr(source, field.name) for source in (observation, textbook, exact))
        assert (result is None) == (plain is None), f"{name}: missing, or there unasked"
        if result is None:
            continue
        assert result.dtype == plain.dtype, f"{name}: {result.dtype}"
        assert result.shape == plain.shape, f"{name}: shape {tuple(result.shape)}, not {tuple(plain.shape)}"
        if field.name == "top_indices":
            continue
        assert torch.equal(result.isnan(), plain.isnan()), f"{name}: NaN elsewhere"
        assert torch.equal(result.isinf(), plain.isinf()), f"{name}: infinite elsewhere"
        within_budget(name, result, plain, right, terms=scale.terms, size=scale.size)
    if observation.top_indices is not None:
        _compare_top(backend, observation, textbook, exact, scale)


def _compare_top(
    backend: str, observation: ch.Observation, textbook: ch.Observation, exact: ch.Observation, scale: Scale
) -> None:
    """Each index occurs once, with its weight; the right one if weights clearly differ; zeros in order."""
    name = f"{backend} top_indices"
    indices, weights, k = observation.top_indices, observation.top_weights, observation.top_indices.shape[-1]
    if not indices.numel():
        return
    k_len = scale.weights.shape[-1]
    assert bool(((indices >= 0) & (indices < k_len)).all()), f"{name}: out of range"
    assert bool((indices.sort(dim=-1).values.diff(dim=-1) > 0).all()), f"{name}: a key named twice"
    spoiled = weights.isnan().any(dim=-1)
    assert torch.equal(indices[spoiled], textbook.top_indices[spoiled]), f"{name}: NaN in another order"
    assert bool((weights.diff(dim=-1) <= 0)[~spoiled].all()), f"{name}: not in falling order"

    named_weights = scale.weights.gather(-1, indices)
    right, plain = exact.top_weights, textbook.top_weights.double()
    within_budget(
        f"{name} (weights there)", *(each[~spoiled] for each in (named_weights, plain, right)), size=scale.size
    )
    error = 2.0 * (plain - right)[~spoiled].abs().amax().item() if bool((~spoiled).any()) else 0.0
    tolerance = 4.0 * (error + rounding(right[~spoiled].reshape(-1)[:1], scale.terms, scale.size))
    ordered = scale.weights.sort(dim=-1, descending=True).values[..., : k + 1]
    gaps = torch.nn.functional.pad(-ordered.diff(dim=-1), (1, k + 1 - ordered.shape[-1]), value=torch.inf)[..., : k + 1]
    clear = (gaps[..., :k] > tolerance) & (gaps[..., 1:] > tolerance) & ~spoiled[..., None]
    assert torch.equal(indices[clear], exact.top_indices[clear]), f"{name}: another key where weights lie apart"
    filled = (weights == 0).any(dim=-1)
    for row, row_weights in zip(indices[filled].tolist(), weights[filled].tolist(), strict=True):
        named = {key for key, weight in zip(row, row_weights, strict=True) if weight != 0.0}
        free = [key for key in range(k_len) if key not in named][: k - len(named)]
        assert row[len(named) :] == free, f"{name}: keys of weight 0 are {row[len(named) :]}, not {free}"


def check_gradients(
    backend: str,
    inputs: tuple[Tensor, ...],
    names: Sequence[str],
    *,
    learned: Sequence[Tensor] = (),
    rules: Callable[[list[Tensor]], tuple[ch.ScoreRule, ...]] = lambda learned: (),
    **options: Any,
) -> None:
    """Gradients of the output together with each statistic named, for inputs and learned tensors of ``rules``."""
    want = everything(inputs, only=[name for name in names if name in given_by(backend)])
    if not want.names:
        pytest.skip(f"{backend}: gives none of {', '.join(names)}")
    given = [tensor.detach().to(inputs[0].dtype).requires_grad_() for tensor in learned]
    _skip_refused(backend, inputs, want, {**options, "scores": rules(given)})

    def run(name: str, dtype: torch.dtype) -> list[Tensor]:
        every = [tensor.detach().to(dtype).requires_grad_() for tensor in (*inputs, *given)]
        scores = rules(every[3:])
        observation = ch.observe_attention(*every[:3], want=want, backend=name, scores=scores, **options)
        return list(torch.autograd.grad(loss_of(observation, want), every))

    textbook, grads = run("reference", inputs[0].dtype), run(backend, inputs[0].dtype)
    exact = run("reference", torch.float64)
    scale = scale_of(tuple(tensor.detach().double() for tensor in inputs), {**options, "scores": rules(given)})
    query, key, value = (max(1.0, tensor.detach().abs().max().item()) if tensor.numel() else 1.0 for tensor in inputs)
    # A score's gradient is a weight times a statistic's slope, which is a logarithm or a value.
    slope = max(scale.size, value)
    sizes = {"query": slope * key, "key": slope * query, "value": 1.0}
    everyone = [*sizes.items(), *((f"learned {number}", slope) for number in range(len(given)))]
    for (name, size), *results in zip(everyone, grads, textbook, exact, strict=True):
        within_budget(f"{backend} gradient of {name}", *results, terms=scale.terms, size=size)


def loss_of(observation: ch.Observation, want: ch.Want) -> Tensor:
    """The sum of all differentiable statistics, each element with another factor; without -inf of empty rows."""
    total = (observation.output.double() * _slope(observation.output)).sum()
    for name in (*DIFFERENTIABLE, *ALSO_DIFFERENTIABLE):
        statistic = getattr(observation, name)
        if name in want.names and statistic.numel():
            finite = statistic.masked_fill(statistic == -torch.inf, 0.0).double()
            total = total + (finite * _slope(statistic)).sum()
    return total


def _slope(like: Tensor) -> Tensor:
    return torch.linspace(-1.0, 1.0, like.numel(), dtype=torch.float64).view(like.shape)


def _skip_refused(backend: str, inputs: tuple[Tensor, ...], want: ch.Want, options: dict[str, Any]) -> None:
    reasons = ch.explain_dispatch(*inputs, want=want, **options).reasons[backend]
    if reasons:
        pytest.skip(f"{backend}: {'; '.join(reasons)}")
