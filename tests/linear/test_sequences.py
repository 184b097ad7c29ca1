"""Masks of linear attention: supported classes, padding of documents, and traced lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.errors import MaskError
from clearhead.linear import LinearCache, LinearState, linear_attention, retention
from clearhead.nn import LinearAttention
from tests.linear.members import MEMBERS, Inputs


class _Strict(ch.Causal):
    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos < q_pos


class _ShiftedPadding(ch.Padding):
    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos >= self.lengths[batch]


class _Across(ch.Documents):
    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return self.ids[0][q_pos] != self.ids[0][k_pos]


@pytest.mark.parametrize(
    "mask", [_Strict(), _ShiftedPadding([4]), _Across([4, 5])], ids=lambda mask: type(mask).__name__
)
def test_overridden_mask_is_refused(mask: ch.Mask) -> None:
    x = torch.zeros(1, 2, 9, 4)
    with pytest.raises(MaskError, match="must be None, Causal"):
        linear_attention(x, x, x, mask=mask)
    module, cache, tokens = LinearAttention(8, 2), LinearCache(), torch.zeros(1, 9, 8)
    module(tokens, cache=cache)
    with pytest.raises(MaskError):
        module(tokens, mask=mask, cache=cache)


@pytest.mark.parametrize("native", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", ["elu", "identity", "gate per token"])
def test_nan_after_a_document_affects_no_gradient(name: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr("clearhead.linear.native.takes", lambda *given: False)
    member = MEMBERS[name]
    inputs = member.draw((1, 3, 18, 6), dtype=torch.float32)
    # The second document is shorter than the first, and its padding repeats its first token.
    inputs.query[:, :, 10] = torch.nan
    inputs.value[:, :, 16] = torch.nan

    def spoiled(given: Inputs, mask: ch.Mask | None) -> list[list[int]]:
        leaves = given.mapped(lambda part: part.clone().requires_grad_())
        output, _ = member.run(leaves, mask=mask, form="chunked", chunk_size=1)
        grads = torch.autograd.grad(output[:, :, -8:].sum(), leaves.tensors())
        return [(~part[..., -8:, :].isfinite()).any(dim=(0, 1, 3)).nonzero().flatten().tolist() for part in grads]

    assert spoiled(inputs, ch.Documents([10, 8])) == spoiled(inputs.cut(10, 18), None)


@pytest.mark.slow
def test_padding_is_one_graph_under_compile() -> None:
    x = torch.randn(2, 3, 9, 4, generator=torch.Generator().manual_seed(1))

    def call(query: Tensor, lengths: Tensor) -> Tensor:
        return retention(query, query, query, mask=ch.Causal() & ch.Padding(lengths))[0]

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for lengths in (torch.tensor([4, 9]), torch.tensor([0, 7])):
        torch.testing.assert_close(compiled(x, lengths), call(x, lengths), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["elu", "performer", "retention", "delta, gate per token"])
def test_documents_are_one_graph_under_compile(name: str) -> None:
    member = MEMBERS[name]
    inputs = member.draw((1, 3, 12, 6))

    def call(inputs: Inputs, mask: ch.Mask, state: LinearState | None) -> tuple[Tensor, LinearState]:
        output, last = member.run(inputs, mask=mask, state=state)
        return output, last

    def results(run: Any, mask: ch.Mask, start: LinearState | None) -> list[Tensor]:
        leaves = inputs.mapped(lambda part: part.clone().requires_grad_())
        begin = None if start is None else start.mapped(lambda part: part.detach().clone().requires_grad_())
        output, last = run(leaves, mask, begin)
        states = [part for part in (last.matrix, last.normalizer) if part is not None]
        firsts = [] if begin is None else [part for part in (begin.matrix, begin.normalizer) if part is not None]
        loss = output.sin().sum() + sum(part.square().sum() for part in states)
        return [output, *states, *torch.autograd.grad(loss, [*leaves.tensors(), *firsts])]

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    padded = ch.Documents(ids=torch.tensor([4, 4, 0, 0, 0, 0, 0, -1, 9, 9, 9, 9])) & ch.Padding([10])
    for mask, start in (
        (ch.Documents([5, 7]), None),
        (ch.Documents([1, 2, 9]), None),
        (padded, call(inputs, padded, None)[1]),
    ):
        for one, other in zip(results(compiled, mask, start), results(call, mask, start), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_tokens_of_no_document_have_a_gradient_of_0() -> None:
    x = torch.randn(1, 2, 5, 4, requires_grad=True)
    output, state = linear_attention(x, x, x, causal=True, mask=ch.Documents(ids=torch.full((5,), -1)))
    assert state.matrix.shape == (0, 2, 4, 4)
    assert not bool(output.any())
    assert not bool(torch.autograd.grad(output.sum(), x)[0].any())
