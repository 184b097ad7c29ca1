"""Masks as the family reads them: their kinds and no others, what is laid beside documents, and traced lengths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.errors import MaskError
from clearhead.linear import LinearCache, linear_attention, retention
from clearhead.nn import LinearAttention
from tests.linear.members import MEMBERS, Inputs


class _Strict(ch.Causal):
    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos < q_pos


class _Behind(ch.Padding):
    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return k_pos >= self.lengths[batch]


class _Across(ch.Documents):
    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return self.ids[0][q_pos] != self.ids[0][k_pos]


@pytest.mark.parametrize("mask", [_Strict(), _Behind([4]), _Across([4, 5])], ids=lambda mask: type(mask).__name__)
def test_a_mask_that_means_something_else_is_refused(mask: ch.Mask) -> None:
    x = torch.zeros(1, 2, 9, 4)
    with pytest.raises(MaskError, match="must be None, Causal"):
        linear_attention(x, x, x, mask=mask)
    module, cache, tokens = LinearAttention(8, 2), LinearCache(), torch.zeros(1, 9, 8)
    module(tokens, cache=cache)
    with pytest.raises(MaskError):
        module(tokens, mask=mask, cache=cache)


@pytest.mark.parametrize("native", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", ["elu", "identity", "gate per token"])
def test_what_is_not_finite_comes_back_from_no_place_behind_a_document(
    name: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr("clearhead.linear.native.takes", lambda *given: False)
    member = MEMBERS[name]
    inputs = member.draw((1, 3, 18, 6), dtype=torch.float32)
    # The second document is shorter than the first, and places behind it repeat its first token.
    inputs.query[:, :, 10] = torch.nan
    inputs.value[:, :, 16] = torch.nan

    def spoiled(given: Inputs, mask: ch.Mask | None) -> list[list[int]]:
        own = given.mapped(lambda part: part.clone().requires_grad_())
        output, _ = member.run(own, mask=mask, form="chunked", chunk_size=1)
        found = torch.autograd.grad(output[:, :, -8:].sum(), own.tensors())
        return [(~part[..., -8:, :].isfinite()).any(dim=(0, 1, 3)).nonzero().flatten().tolist() for part in found]

    assert spoiled(inputs, ch.Documents([10, 8])) == spoiled(inputs.cut(10, 18), None)


def test_padding_is_one_graph_under_compile() -> None:
    x = torch.randn(2, 3, 9, 4, generator=torch.Generator().manual_seed(1))

    def call(query: Tensor, lengths: Tensor) -> Tensor:
        return retention(query, query, query, mask=ch.Causal() & ch.Padding(lengths))[0]

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for lengths in (torch.tensor([4, 9]), torch.tensor([0, 7])):
        torch.testing.assert_close(compiled(x, lengths), call(x, lengths), rtol=1e-5, atol=1e-5)
