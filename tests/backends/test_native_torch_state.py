"""The CPU kernels under torch's defaults, checkpoints, traces, transforms, and with tensors that are written into
between forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from tests.agreement import draw, needs_native

pytestmark = needs_native


@pytest.fixture
def defaults() -> Iterator[Callable[..., None]]:
    """Sets torch's default dtype and device for a test."""

    def change(dtype: torch.dtype = torch.float32, device: str | None = None) -> None:
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)

    yield change
    change()


def inputs(*shape: int, grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (draw(*shape, seed=seed, grad=grad) for seed in range(3))
    return query, key, value


# ---- torch's defaults ----------------------------------------------------------------------------------------------


def test_workspace_is_float32_under_any_default_dtype(defaults: Callable[..., None]) -> None:
    """A workspace of half the size would be overrun by the kernel."""
    tensors = inputs(8, 8, 128, 4)
    exact = torch.autograd.grad(ch.attention(*tensors).sum(), tensors)
    defaults(torch.float64)
    for _ in range(2):
        output = ch.attention(*tensors)
        assert "_Plain" in type(output.grad_fn).__name__
        assert output.grad_fn.saved_tensors[3].dtype == torch.float32  # type: ignore[union-attr]
        for grad, right in zip(torch.autograd.grad(output.sum(), tensors), exact, strict=True):
            assert torch.equal(grad, right)


def test_workspace_of_nan_rows_is_float32(defaults: Callable[..., None]) -> None:
    query, key, value = (tensor.detach() for tensor in inputs(1, 2, 40, 4))
    key[0, 0, 5] = torch.nan

    def grads() -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        output = ch.attention(*leaves, mask=ch.Causal(), backend="native")
        return list(torch.autograd.grad(output, leaves, torch.ones_like(output)))

    right = grads()
    defaults(torch.float64)
    for one, other in zip(grads(), right, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("device", ["meta"])
def test_default_device_is_ignored(device: str, defaults: Callable[..., None]) -> None:
    small, large = inputs(1, 2, 9, 8), inputs(8, 8, 128, 4)
    weights = torch.ones(1, 1, 2, 9)
    want = ch.Want(
        lse=True, entropy=True, received=True, max_score=True, top_k=2, rows=[1], heatmap=2, row_weights=weights
    )
    defaults(device=device)
    observation = ch.observe_attention(*small, want=want, mask=ch.Causal() | ch.Prefix(2), dropout=0.5)
    statistics = [
        getattr(observation, name) for name in ("output", "lse", "entropy", "received", "top_indices", "rows")
    ]
    assert all(tensor.device.type == "cpu" for tensor in statistics)
    for _ in range(3):
        grads = torch.autograd.grad(ch.attention(*large, dropout=0.5).sum(), large)
        assert all(grad.device.type == "cpu" for grad in grads)


# ---- repeated calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_query_offset_counts_with_dropout(training: bool) -> None:
    tensors = inputs(1, 2, 11, 8, grad=training)
    ch.attention(*tensors, dropout=0.5, query_offset=5)
    torch.manual_seed(0)
    output = ch.attention(*tensors, dropout=0.5)
    torch.manual_seed(0)
    torch.testing.assert_close(output, ch.attention(*tensors, dropout=0.5, backend="reference"))


@pytest.mark.parametrize("shape", [(1, 2, 17, 8), (8, 8, 128, 4), (1, 1, 300, 4)])
@pytest.mark.parametrize("mask", [None, ch.Causal()], ids=repr)
def test_checkpointed_calls_have_right_gradients_twice(shape: tuple[int, ...], mask: ch.Mask | None) -> None:
    """Forward runs twice for each call: once as written and once to recompute it."""
    tensors = inputs(*shape)
    right = torch.autograd.grad(ch.attention(*tensors, mask=mask, backend="reference").sum(), tensors)
    for _ in range(2):
        output = checkpoint(lambda *leaves: ch.attention(*leaves, mask=mask), *tensors, use_reentrant=False)
        for grad, exact in zip(torch.autograd.grad(output.sum(), tensors), right, strict=True):
            torch.testing.assert_close(grad, exact, rtol=1e-4, atol=1e-5)


def test_a_model_with_checkpoints_trains_from_its_first_step() -> None:
    model, x = ch.nn.Encoder(32, 4, 2, checkpoint_activations=True), torch.randn(2, 21, 32, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None


@pytest.mark.filterwarnings("ignore")
def test_a_trace_records_operations() -> None:
    tensors, other = inputs(1, 2, 6, 4, grad=False), inputs(1, 2, 6, 4, grad=False)
    ch.attention(*tensors)
    traced = torch.jit.trace(lambda *tensors: ch.attention(*tensors), tensors, check_trace=False)
    other = (other[2], other[1], other[0])
    torch.testing.assert_close(traced(*other), ch.attention(*other))


# ---- what changes between forward and backward ---------------------------------------------------------------------


def _table() -> tuple[dict[str, Any], Tensor]:
    table = torch.zeros(1, 9, requires_grad=True)
    return {"scores": ch.RelativeBias(table)}, table


def _slopes() -> tuple[dict[str, Any], Tensor]:
    slopes = torch.ones(1)
    return {"scores": ch.Alibi(slopes=slopes)}, slopes


def _sink() -> tuple[dict[str, Any], Tensor]:
    logits = torch.zeros(1, requires_grad=True)
    return {"scores": ch.Sink(logits)}, logits


def _dense() -> tuple[dict[str, Any], Tensor]:
    allowed = torch.ones(5, 5, dtype=torch.bool)
    return {"mask": ch.Dense(allowed)}, allowed


def _blocks() -> tuple[dict[str, Any], Tensor]:
    table = torch.ones(3, 3, dtype=torch.bool)
    return {"mask": ch.Blocks(table, 2)}, table


CHANGED: list[Callable[[], tuple[dict[str, Any], Tensor]]] = [_table, _slopes, _sink, _dense, _blocks]


@pytest.mark.parametrize("backend", ["native", "tiled"])
@pytest.mark.parametrize("make", CHANGED)
def test_writing_into_tensors_read_by_backward_raises(
    make: Callable[[], tuple[dict[str, Any], Tensor]], backend: str
) -> None:
    tensors = inputs(1, 1, 5, 4)
    options, tensor = make()
    output = ch.attention(*tensors, **options, backend=backend)
    with torch.no_grad():
        tensor.copy_(1 - tensor if tensor.is_floating_point() else ~tensor)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("backend", ["native", "tiled"])
def test_a_mask_made_in_inference_mode_is_a_mask(backend: str) -> None:
    tensors = inputs(1, 1, 5, 4)
    with torch.inference_mode():
        mask, rule = ch.Dense(torch.ones(5, 5, dtype=torch.bool).tril()), ch.Alibi(1)
    output = ch.attention(*tensors, mask=mask, scores=rule, backend=backend)
    right = ch.attention(*tensors, mask=ch.Causal(), scores=ch.Alibi(1), backend=backend)
    for grad, exact in zip(*(torch.autograd.grad(one.sum(), tensors) for one in (output, right)), strict=True):
        torch.testing.assert_close(grad, exact)


def test_backward_does_not_call_a_mask_function() -> None:
    """What it closes over may have changed."""
    closed = {"most": 3}
    mask = ch.MaskFunction(lambda b, h, i, j: (i * 7 + j * 13) % 5 < closed["most"])
    tensors = inputs(1, 2, 9, 4)
    right = torch.autograd.grad(ch.attention(*tensors, mask=mask, backend="reference").sum(), tensors)
    output = ch.attention(*tensors, mask=mask, backend="native")
    closed["most"] = 1
    for grad, exact in zip(torch.autograd.grad(output.sum(), tensors), right, strict=True):
        torch.testing.assert_close(grad, exact)


def test_intervals_of_a_function_are_not_cached() -> None:
    closed = {"most": 3}
    mask = ch.MaskFunction(lambda b, h, i, j: j < closed["most"]) & ch.Padding([7])
    tensors = inputs(1, 2, 9, 4, grad=False)
    for most in (3, 5):
        closed["most"] = most
        output = ch.attention(*tensors, mask=mask, backend="native")
        torch.testing.assert_close(output, ch.attention(*tensors, mask=mask, backend="reference"))


# ---- derivatives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["native", "tiled"])
def test_second_derivative_through_a_rule_alone_is_the_references(backend: str) -> None:
    tensors = inputs(1, 1, 5, 4, grad=False)

    def second(backend: str) -> Tensor:
        table = torch.zeros(1, 9, requires_grad=True)
        output = ch.attention(*tensors, scores=ch.RelativeBias(table), backend=backend)
        (grad,) = torch.autograd.grad(output.square().sum(), table, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), table)[0]

    torch.testing.assert_close(second(backend), second("reference"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["native", "tiled"])
def test_tangent_in_backward_is_the_references(backend: str) -> None:
    tensors = inputs(1, 2, 6, 4)

    def tangents(backend: str) -> list[Tensor]:
        output = ch.attention(*tensors, backend=backend)
        with forward_ad.dual_level():
            grad = forward_ad.make_dual(torch.ones_like(output), torch.arange(48.0).view(output.shape))
            grads = torch.autograd.grad(output, tensors, grad)
            return [forward_ad.unpack_dual(one).tangent for one in grads]

    for actual, right in zip(tangents(backend), tangents("reference"), strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", [ch.SoftCap(5.0), ch.Sink(0.0)], ids=repr)
@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_auto_takes_a_backend_that_torch_func_can_see(rule: ch.ScoreRule, transform: str) -> None:
    query, key, value = inputs(1, 2, 6, 4, grad=False)

    def call(tensor: Tensor, backend: str) -> Tensor:
        return ch.attention(tensor, key, value, scores=rule, backend=backend)

    def run(backend: str) -> Tensor:
        if transform == "grad":
            return torch.func.grad(lambda tensor: call(tensor, backend).square().sum())(query)
        if transform == "jvp":
            return torch.func.jvp(lambda tensor: call(tensor, backend), (query,), (query,))[1]
        return torch.vmap(lambda tensor: call(tensor, backend))(torch.stack([query, 2 * query]))

    torch.testing.assert_close(run("auto"), run("reference"))


def test_vmapped_rule_matches_reference() -> None:
    tensors, bias = inputs(1, 2, 6, 4, grad=False), draw(1, 2, 6, 6, grad=False)

    def call(bias: Tensor, backend: str) -> Tensor:
        return ch.attention(*tensors, scores=ch.DenseBias(bias), backend=backend)

    with pytest.raises(ch.UnsupportedError, match=r"torch\.func"):
        torch.func.jvp(lambda one: call(one, "native"), (bias,), (bias,))
    actual, right = (
        torch.func.jvp(lambda one, n=name: call(one, n), (bias,), (bias,))[1] for name in ("auto", "reference")
    )
    torch.testing.assert_close(actual, right)


# ---- kinds and numbers ---------------------------------------------------------------------------------------------


class _FirstKey(ch.RelativeBias):
    def apply(self, score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return score + 7 * (k_pos == 0)


class _EvenKeys(ch.Causal):
    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (k_pos <= q_pos) & (k_pos % 2 == 0)


@pytest.mark.parametrize("backend", ["auto", "native", "sdpa", "tiled"])
def test_overridden_masks_and_rules_are_respected(backend: str) -> None:
    tensors = inputs(1, 2, 6, 4, grad=False)
    right = ch.attention(*tensors, mask=_EvenKeys(), backend="reference")
    torch.testing.assert_close(ch.attention(*tensors, mask=_EvenKeys(), backend=backend), right)
    causal = ch.attention(*tensors, mask=ch.Causal(), backend="reference")
    torch.testing.assert_close(ch.attention(*tensors, mask=ch.Causal()), causal)
    rule = _FirstKey(torch.zeros(2, 5))
    if backend in ("native", "sdpa"):
        with pytest.raises(ch.UnsupportedError, match="cannot apply _FirstKey"):
            ch.attention(*tensors, scores=rule, backend=backend)
    else:
        right = ch.attention(*tensors, scores=rule, backend="reference")
        torch.testing.assert_close(ch.attention(*tensors, scores=rule, backend=backend), right)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scores": ch.SoftCap(1e-50)}, "takes a cap within float32's range"),
        ({"scores": ch.SoftCap(1e39)}, "takes a cap within float32's range"),
        ({"mask": ch.Blocks(torch.ones(1, 1, dtype=torch.bool), 2**31)}, "takes blocks of up to 2,147,483,647"),
    ],
)
def test_numbers_beyond_the_fields_are_refused(options: dict[str, Any], reason: str) -> None:
    tensors = inputs(1, 2, 6, 4, grad=False)
    assert reason in str(ch.explain_dispatch(*tensors, **options).reasons["native"])
    assert ch.attention(*tensors, **options).shape == tensors[0].shape


@pytest.mark.parametrize("backend", ["native", "tiled", "reference"])
def test_heatmap_tile_is_clamped_to_the_weights(backend: str) -> None:
    tensors = inputs(1, 2, 6, 4, grad=False)
    observation = ch.observe_attention(*tensors, want=ch.Want(heatmap=2**62), backend=backend)
    assert observation.heatmap_mean is not None
    torch.testing.assert_close(observation.heatmap_mean, torch.full((1, 2, 1, 1), 1 / 6))


def test_values_without_channels_use_another_backend() -> None:
    query, key, value = inputs(1, 2, 3, 4)
    empty = value[..., :0]
    assert "at least one channel" in str(ch.explain_dispatch(query, key, empty).reasons["native"])
    for backend in ("auto", "tiled", "reference"):
        output = ch.attention(query, key, empty, backend=backend)
        assert output.shape == (1, 2, 3, 0)
        grads = torch.autograd.grad(output.sum(), (query, key, value))
        assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)
