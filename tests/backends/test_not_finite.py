"""NaN and infinity count by IEEE arithmetic over allowed keys, forward and backward, on every backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

import clearhead as ch
from tests.oracle import Array
from tests.oracle import attend as oracle

pytestmark = pytest.mark.covering(1)

BACKENDS = ("reference", "tiled", "native", "sdpa", "auto")
SPECIAL = (math.nan, math.inf, -math.inf)
INPUTS = ("query", "key", "value")

MASKS: dict[str, ch.Mask | None] = {
    "none": None,
    "causal": ch.Causal(),
    "window": ch.Window(3, 2),
    "padding": ch.Padding([3, 40]),
    "dense": ch.Dense((torch.arange(40)[:, None] * 7 + torch.arange(40) * 3) % 5 != 0),
    "documents": ch.Documents(lengths=[7, 2, 31]) & ch.Causal(),
}


@dataclass
class Formula:
    """The formula and its gradients in float64 loops over rows; each row reads its allowed keys and no others."""

    output: Array
    grads: tuple[Array, Array, Array]


def formula(query: Array, key: Array, value: Array, grad: Array, allowed: np.ndarray, scale: float) -> Formula:
    output, weights, _ = oracle(query, key, value, allowed=lambda b, h, i, j: bool(allowed[b, h, i, j]), scale=scale)
    of_query, of_key, of_value = (np.zeros_like(array) for array in (query, key, value))
    group = query.shape[1] // key.shape[1]
    with np.errstate(invalid="ignore", over="ignore"):
        for b, h, i in np.ndindex(*query.shape[:3]):
            (at,) = np.nonzero(allowed[b, h, i])
            keys, values, row = key[b, h // group, at], value[b, h // group, at], weights[b, h, i, at]
            of_weights = (values * grad[b, h, i]).sum(axis=1)
            delta = (grad[b, h, i] * output[b, h, i]).sum()
            of_scores = scale * row * (of_weights - delta)
            of_query[b, h, i] = (of_scores[:, None] * keys).sum(axis=0)
            of_key[b, h // group, at] += of_scores[:, None] * query[b, h, i]
            of_value[b, h // group, at] += row[:, None] * grad[b, h, i]
    return Formula(output, (of_query, of_key, of_value))


def draw(k_len: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(k_len)
    shapes = ((batch, 4, k_len, 5), (batch, 2, k_len, 5), (batch, 2, k_len, 5), (batch, 4, k_len, 5))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def compare(tensors: list[Tensor], mask: ch.Mask | None, backend: str) -> None:
    """The output's NaN and infinities are those of the formula; gradients are finite at the same elements."""
    query, key, value, grad = tensors
    batch, heads, q_len, _ = query.shape
    allowed = np.ones((batch, heads, q_len, key.shape[2]), dtype=bool)
    if mask is not None:
        allowed &= mask.dense(q_len, key.shape[2], batch=batch, num_heads=heads).numpy()
    expected = formula(*(tensor.double().numpy() for tensor in tensors), allowed, query.shape[3] ** -0.5)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    output = ch.attention(leaves[0], leaves[1], leaves[2], mask=mask, backend=backend)
    grads = torch.autograd.grad(output, leaves, grad)
    single = 1e-9 if query.dtype == torch.float64 else 2e-5
    tolerance = {"rtol": single, "atol": single} if query.dtype.itemsize > 2 else {"rtol": 0.05, "atol": 0.05}
    # Without gradients other code runs.
    for one in (output.detach(), ch.attention(query, key, value, mask=mask, backend=backend)):
        np.testing.assert_allclose(one.double().numpy(), expected.output, **tolerance, equal_nan=True)
    for name, one, exact in zip(INPUTS, grads, expected.grads, strict=True):
        finite = np.isfinite(exact)
        wrong = np.argwhere(np.isfinite(one.double().numpy()) != finite)
        assert not wrong.size, f"{name}.grad at {wrong[0]}: {one[tuple(wrong[0])]}, not {exact[tuple(wrong[0])]}"
        np.testing.assert_allclose(one.double().numpy()[finite], exact[finite], **tolerance, err_msg=name)


def is_refused(tensors: list[Tensor], mask: ch.Mask | None, backend: str) -> bool:
    """Whether the call is one of those with NaN or infinity under a mask that ``sdpa`` refuses."""
    if backend != "sdpa" or mask is None:
        return False
    tensors = [tensor.requires_grad_() for tensor in tensors[:3]]
    return ch.explain_dispatch(tensors[0], tensors[1], tensors[2], mask=mask, backend=backend).choice is None


def run_or_skip(tensors: list[Tensor], mask: ch.Mask | None, backend: str) -> None:
    if is_refused([tensor.clone() for tensor in tensors], mask, backend):
        pytest.skip("sdpa refuses NaN and infinity under a mask")
    compare(tensors, mask, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("place", range(4), ids=(*INPUTS, "grad"))
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_one_element_counts_by_arithmetic(backend: str, special: float, place: int, mask: str) -> None:
    tensors = draw(9)
    tensors[place][0, 1, 4, 2] = special
    run_or_skip(tensors, MASKS[mask], backend)


def spoil(tensors: list[Tensor], seed: int) -> None:
    """Write NaN and infinity, positive or of both signs, to up to four random places."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(1 + seed % 4):
        tensor = tensors[int(torch.randint(4, (), generator=generator))]
        at = tuple(int(torch.randint(size, (), generator=generator)) for size in tensor.shape)
        tensor[at] = SPECIAL[int(torch.randint(3, (), generator=generator))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("seed", [3, pytest.param(range(8), marks=pytest.mark.slow)], ids=["one", "many"])
def test_random_places_count_by_arithmetic(backend: str, name: str, seed: int | range) -> None:
    batch = 1 if name == "documents" else 2
    for each in [seed] if isinstance(seed, int) else seed:
        tensors = draw(40, batch)
        spoil(tensors, each)
        if not is_refused([tensor.clone() for tensor in tensors], MASKS[name], backend):
            compare(tensors, MASKS[name], backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes_count_by_arithmetic(backend: str, dtype: torch.dtype) -> None:
    if backend == "native" and dtype == torch.float64:
        pytest.skip("native has no float64")
    for seed in range(4):
        tensors = draw(9, dtype=dtype)
        spoil(tensors, seed)
        compare(tensors, None, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [None, ch.Causal()], ids=repr)
@pytest.mark.parametrize("k_len", [9, 40])
def test_row_with_every_score_minus_infinity_is_empty(backend: str, mask: ch.Mask | None, k_len: int) -> None:
    tensors = draw(k_len)
    tensors[0][0, 1, 4, 0] = math.inf
    tensors[1][..., 0] = -tensors[1][..., 0].abs() - 0.1
    output = ch.attention(*tensors[:3], mask=mask, backend=backend)
    assert bool((output[0, 1, 4] == 0.0).all())
    run_or_skip(tensors, mask, backend)


def _overflow(tensors: list[Tensor]) -> None:
    tensors[0][0, :, 4, 0] = 1e30
    tensors[1][0, :, :3, 0] = 1e30


def _cancelled(tensors: list[Tensor]) -> None:
    tensors[0][0, :, 4, :2] = 1e30
    tensors[1][0, :, 2, 0], tensors[1][0, :, 2, 1] = 1e30, -1e30


@pytest.mark.parametrize("k_len", [9, 40])
@pytest.mark.parametrize("mask", [None, ch.Causal()], ids=repr)
@pytest.mark.parametrize("change", [_overflow, _cancelled])
def test_overflow_gives_nan_in_the_same_rows_everywhere(
    change: Callable[[list[Tensor]], None], mask: ch.Mask | None, k_len: int
) -> None:
    outcomes = []
    for backend in BACKENDS:
        query, key, value, grad = draw(k_len)
        change([query, key, value, grad])
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        output = ch.attention(query, key, value, mask=mask, backend=backend)
        grads = torch.autograd.grad(output, leaves, grad)
        outcomes.append([torch.isfinite(one) for one in (output, *grads)])
    assert not bool(outcomes[0][0].all())
    for backend, others in zip(BACKENDS[1:], outcomes[1:], strict=True):
        for name, one, first in zip(("output", *INPUTS), others, outcomes[0], strict=True):
            assert torch.equal(one, first), (backend, name)


@pytest.mark.parametrize("backend", ["reference", "tiled", "native"])
@pytest.mark.parametrize("mask", [None, ch.Causal()], ids=repr)
def test_dropped_infinite_value_is_nan(backend: str, mask: ch.Mask | None) -> None:
    query, key, value, _ = draw(9)
    value[0, 1, 2, 3] = math.inf
    clean = torch.where(value.isinf(), 1.0, 0.0)
    options = {"mask": mask, "dropout": 0.5, "seed": 3, "backend": backend}
    output = ch.attention(query, key, value, **options)[0, 2:, :, 3]
    read = ch.attention(query, key, clean, **options)[0, 2:, :, 3] > 0.0
    attends = torch.ones(9, dtype=torch.bool) if mask is None else torch.arange(9) >= 2
    assert bool((output[read] == math.inf).all())
    assert bool(output[~read & attends].isnan().all())
    assert bool(torch.isfinite(output[:, ~attends]).all())
    assert bool(read.any())
    assert bool((~read & attends).any())


@pytest.mark.parametrize("rule", [ch.SoftCap(2.0), ch.Alibi(4), ch.Sink(torch.zeros(4))], ids=repr)
@pytest.mark.parametrize("mask", [None, ch.Causal()], ids=repr)
def test_infinite_keys_under_rules_agree_with_the_specification(rule: ch.ScoreRule, mask: ch.Mask | None) -> None:
    results: dict[str, list[Tensor]] = {}
    for backend in ("reference", "tiled", "native"):
        query, key, value, grad = draw(9)
        key[0, 1, 4, 2] = math.inf
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        output = ch.attention(query, key, value, mask=mask, scores=rule, backend=backend)
        results[backend] = [output.detach(), *torch.autograd.grad(output, leaves, grad)]
    for backend in ("tiled", "native"):
        for one, exact in zip(results[backend], results["reference"], strict=True):
            finite = torch.isfinite(exact)
            assert torch.equal(torch.isfinite(one), finite), backend
            torch.testing.assert_close(one[finite], exact[finite], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("special", SPECIAL)
def test_statistics_agree_on_nan_and_infinity(special: float) -> None:
    want = ch.Want(lse=True, max_score=True, entropy=True, received=True)
    for place in range(2):
        outcomes = []
        for backend in ("reference", "tiled", "native"):
            tensors = draw(9)
            tensors[place][0, 1, 4, 2] = special
            observed = ch.observe_attention(*tensors[:3], mask=ch.Causal(), want=want, backend=backend)
            outcomes.append({name: getattr(observed, name) for name in ("lse", "max_score", "entropy", "received")})
        for other in outcomes[1:]:
            for name, exact in outcomes[0].items():
                torch.testing.assert_close(
                    other[name], exact, rtol=1e-4, atol=1e-5, equal_nan=True, msg=f"{place} {name}"
                )
