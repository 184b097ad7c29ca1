"""Gradients by torch's operations in place of the kernels': second and batched ones; and gradients of empty calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.linear import LinearState, linear_attention, retention
from tests.linear.members import MEMBERS

every_name = pytest.mark.parametrize("name", MEMBERS)
#: By the kernels, and by the pass of torch's operations.
every_pass = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "torch"])


def close(one: Tensor, other: Tensor) -> None:
    size = max(1.0, float(other.detach().abs().max()))
    torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * size)


@every_name
@every_pass
def test_a_second_derivative_of_one_input_alone(name: str, dtype: torch.dtype) -> None:
    member = MEMBERS[name]
    inputs = member.draw(dtype=dtype)

    def penalty(form: str) -> Tensor:
        inputs.query.requires_grad_()
        output, state = member.run(inputs, form=form)
        # The state depends on no query, and yet it is what a function of queries gave.
        (first,) = torch.autograd.grad(output.sin().sum() + state.matrix.sum(), inputs.query, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), inputs.query)
        return second

    close(penalty("chunked"), penalty("recurrent"))


@every_pass
def test_a_normalizer_made_of_the_matrix_is_counted_once(dtype: torch.dtype) -> None:
    inputs = MEMBERS["elu"].draw(dtype=dtype)
    matrix = torch.rand(2, 3, 6, 5, dtype=dtype, requires_grad=True)

    def gradient(form: str, create_graph: bool) -> Tensor:
        state = LinearState(matrix=matrix, normalizer=matrix.sum(dim=-1))
        output, _ = MEMBERS["elu"].run(inputs, state=state, form=form)
        return torch.autograd.grad(output.square().sum(), matrix, create_graph=create_graph)[0]

    for form in ("chunked", "parallel"):
        close(gradient(form, True), gradient(form, False))
        close(gradient(form, True), gradient("recurrent", False))


@every_pass
@pytest.mark.parametrize("name", ["elu", "identity", "retention", "delta"])
def test_autocast_does_not_reach_recorded_gradients(name: str, dtype: torch.dtype) -> None:
    member = MEMBERS[name]
    inputs = member.draw(dtype=dtype)
    inputs.query.requires_grad_()

    def gradient(create_graph: bool) -> Tensor:
        output, _ = member.run(inputs, form="chunked")
        return torch.autograd.grad(output.square().sum(), inputs.query, create_graph=create_graph)[0]

    expected = gradient(False)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = gradient(True)
    close(under_autocast, expected)


@every_name
@every_pass
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batched_gradients_equal_single_ones(name: str, dtype: torch.dtype) -> None:
    member = MEMBERS[name]
    inputs = member.draw((1, 3, 9, 6), dtype=dtype)
    inputs.key.requires_grad_()
    output, _ = member.run(inputs, form="chunked", chunk_size=4)
    many = torch.randn(3, *output.shape, generator=torch.Generator().manual_seed(2)).to(dtype)

    def back(upstream: Tensor, **options: Any) -> Tensor:
        return torch.autograd.grad(output, inputs.key, upstream, retain_graph=True, **options)[0]

    expected = torch.stack([back(one) for one in many])
    close(back(many, is_grads_batched=True), expected)
    close(torch.vmap(back)(many), expected)


@pytest.mark.parametrize("name", ["identity", "retention", "gate per channel", "delta"])
def test_an_output_that_is_not_divided_may_be_changed_in_place(name: str) -> None:
    inputs = MEMBERS[name].draw(dtype=torch.float32)
    grads = []
    for change in (Tensor.mul_, Tensor.mul):
        inputs.key.requires_grad_()
        output = change(MEMBERS[name].run(inputs, form="chunked")[0], 2.0)
        grads.append(torch.autograd.grad(output.square().sum(), inputs.key)[0])
    assert torch.equal(*grads)


@every_name
@every_pass
@pytest.mark.parametrize("shape", [(0, 3, 9, 6), (2, 3, 0, 6), (0, 3, 0, 6)], ids=["batch", "length", "both"])
def test_empty_inputs_have_empty_gradients(name: str, dtype: torch.dtype, shape: Any) -> None:
    member = MEMBERS[name]
    for form in ("auto", "recurrent", "chunked", "parallel"):
        inputs = member.draw(shape, dtype=dtype).mapped(lambda part: part.requires_grad_())
        output, state = member.run(inputs, form=form)
        assert output.shape[:3] == shape[:3]
        assert state.matrix.shape[:2] == shape[:2]
        assert not bool(state.matrix.any())
        for part, grad in zip(inputs.tensors(), torch.autograd.grad(output.sum(), inputs.tensors()), strict=True):
            assert grad.shape == part.shape


def test_meta_tensors_give_shapes() -> None:
    x = torch.empty(2, 3, 9, 6, device="meta")
    for output, state in (linear_attention(x, x, x, causal=True), linear_attention(x, x, x), retention(x, x, x)):
        assert output.device.type == state.matrix.device.type == "meta"
        assert output.shape == x.shape
