"""The CPU kernels on tensors of any layout: views, repeated calls, and a growing KV cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead as ch
from tests.agreement import draw, needs_native, results
from tests.budget import within_budget

pytestmark = needs_native


class TestLayouts:
    """Tensors are read without a copy."""

    def views(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        packed = draw(2, 50, 3 * 4 * 16, grad=False)
        cache = [draw(2, 2, 400, 16, seed=seed, grad=False) for seed in (1, 2)]
        one_head = draw(2, 1, 50, 16, grad=False)
        query, wide = (draw(2, 4, 50, dim, seed=3, grad=False) for dim in (16, 64))
        odd = [draw(8 * 50 * 17 + 1, seed=seed, grad=False)[1:].view(1, 8, 50, 17)[..., :16] for seed in (1, 2, 3)]
        long = [draw(2, 2, 400, 64, seed=seed, grad=False)[:, :, 7:57] for seed in (1, 2)]
        many = draw(1, 600, 3 * 2 * 64, grad=False).chunk(3, -1)
        return {
            "packed projection": tuple(part.unflatten(-1, (4, 16)).transpose(1, 2) for part in packed.chunk(3, -1)),
            "sliced cache": (query, cache[0][:, :, 7:57], cache[1][:, :, 7:57]),
            "heads expanded": (query, one_head.expand(2, 4, 50, 16), one_head.expand(2, 4, 50, 16)),
            "batch expanded": (query, one_head[:1].expand(2, 1, 50, 16), one_head[:1].expand(2, 1, 50, 16)),
            "one key over and over": (query, one_head[:, :, :1].expand(2, 1, 50, 16), cache[1][:, :1, :50]),
            "last axis strided": (query, draw(2, 2, 16, 50, grad=False).mT, draw(2, 2, 50, 32, grad=False)[..., ::2]),
            "every other row": (query[:, :, ::2], cache[0][:, :, :50:2], cache[1][:, :, 1:51:2]),
            "odd offsets": (odd[0], odd[1], odd[2]),
            "one query, sliced cache": (wide[:, :, 49:], long[0], long[1]),
            "several tiles": tuple(part.unflatten(-1, (2, 64)).transpose(1, 2) for part in many),
        }

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(
        "name",
        ["packed projection", "sliced cache", "heads expanded", "batch expanded", "one key over and over",
         "last axis strided", "every other row", "odd offsets", "one query, sliced cache", "several tiles"],
    )  # fmt: skip
    def test_views_equal_copies(self, name: str, dtype: torch.dtype) -> None:
        """The same bits from a copy, forward and backward; the gradients reach what the views show."""
        views = self.views()[name]
        if dtype != torch.float32:
            views = tuple(self._recast(view, dtype) for view in views)
        copies = tuple(view.clone(memory_format=torch.contiguous_format) for view in views)
        assert any(view.stride() != copy.stride() for view, copy in zip(views, copies, strict=True))
        offset = views[1].shape[2] - views[0].shape[2]
        for mask in (None, ch.Causal()):
            options = {"mask": mask, "query_offset": offset}
            plain = [ch.attention(*inputs, backend="native", **options) for inputs in (views, copies)]
            assert torch.equal(*plain)
            of_views, right = (
                results(tuple(tensor.detach().requires_grad_() for tensor in inputs), **options)
                for inputs in (views, copies)
            )
            assert all(torch.equal(one, other) for one, other in zip(of_views, right, strict=True))

    @pytest.mark.parametrize("q_len", [16, 200])
    def test_masked_nan_values_are_not_read_and_not_modified(self, q_len: int) -> None:
        """A forbidden key is NaN in one tile of several: the kernel ignores it and does not modify the tensor."""
        query = draw(1, 2, q_len, 64, grad=False)
        key, value = (draw(1, 2, 600, 64, seed=seed, grad=False) for seed in (1, 2))
        mask = ch.Padding(torch.tensor([599]))
        plain = ch.attention(query, key, value, mask=mask, backend="native")
        value[0, 1, 599, 3] = torch.nan
        given = value.clone()
        assert torch.equal(ch.attention(query, key, value, mask=mask, backend="native"), plain)
        torch.testing.assert_close(value, given, rtol=0, atol=0, equal_nan=True)

    @staticmethod
    def _recast(view: Tensor, dtype: torch.dtype) -> Tensor:
        """The view in another dtype with the same strides."""
        steps = sum(stride * (size - 1) for size, stride in zip(view.shape, view.stride(), strict=True))
        memory = torch.zeros(view.storage_offset() + steps + 1, dtype=dtype)
        new = memory.as_strided(view.shape, view.stride(), view.storage_offset())
        if 0 in view.stride():
            first = tuple(slice(0, 1) if s == 0 else slice(None) for s in view.stride())
            new[first].copy_(view[first])
        else:
            new.copy_(view)
        return new

    @pytest.mark.parametrize("grad", [False, True])
    def test_output_has_the_layout_of_query(self, grad: bool) -> None:
        query = draw(2, 50, 4, 16, grad=grad)
        key = draw(2, 4, 50, 16, grad=grad)
        for _ in range(2):
            side_by_side = ch.attention(query.transpose(1, 2), key, key, backend="native")
            assert side_by_side.transpose(1, 2).is_contiguous()
            assert ch.attention(key, key, key, backend="native").is_contiguous()
        torch.testing.assert_close(
            side_by_side, ch.attention(query.transpose(1, 2).contiguous(), key, key, backend="native"), rtol=0, atol=0
        )

    def test_gradients_flow_through_views(self) -> None:
        packed = draw(2, 50, 3 * 4 * 16)

        def run(packed: Tensor, backend: str) -> Tensor:
            query, key, value = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in packed.chunk(3, -1))
            one = key[:, :1].expand(-1, 4, -1, -1)
            output = ch.attention(query, one, value, mask=ch.Causal(), backend=backend)
            return torch.autograd.grad(output.square().sum(), packed)[0]

        right = run(packed.detach().double().requires_grad_(), "reference")
        torch.testing.assert_close(run(packed, "native").double(), right, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("grad", [False, True])
    def test_negative_view_is_resolved(self, grad: bool) -> None:
        """The imaginary part of a conjugate is a view with a lazy sign."""
        lazy = torch.complex(draw(1, 2, 9, 8, grad=False), draw(1, 2, 9, 8, seed=1, grad=False)).conj().imag
        assert lazy.is_neg()
        other = draw(1, 2, 9, 8, seed=2, grad=grad)
        for place in range(3):
            inputs = [other, other, other]
            inputs[place] = lazy
            output = ch.attention(*inputs, backend="native")
            inputs[place] = lazy.resolve_neg()
            torch.testing.assert_close(output, ch.attention(*inputs, backend="reference"))


class TestAgain:
    """Repeated calls with changed options compute what the options say."""

    def test_options_change_the_result(self) -> None:
        query, key, value = (draw(1, 2, n, 16, seed=n, grad=False) for n in (6, 40, 40))
        plain = ch.attention(query, key, value, backend="native")
        for options in (
            {"scale": 0.5},
            {"dropout": 0.5, "seed": 1},
            {"mask": ch.Causal(), "query_offset": 34},
            {"scores": (ch.Sink(torch.zeros(1)),)},
        ):
            other = ch.attention(query, key, value, backend="native", **options)
            assert not torch.equal(other, plain)
            torch.testing.assert_close(other, ch.attention(query, key, value, backend="reference", **options))
            assert torch.equal(ch.attention(query, key, value, backend="native"), plain)
        assert ch.attention(query.requires_grad_(), key, value, backend="native").requires_grad

    def test_missing_offset_raises_after_a_valid_call(self) -> None:
        """A missing offset raises, although an earlier call had one."""
        query, key = draw(1, 2, 6, 16, grad=False), draw(1, 2, 40, 16, grad=False)
        for offset in (0, 34):
            ch.attention(query, key, key, mask=ch.Causal(), query_offset=offset, backend="native")
            with pytest.raises(ch.MaskError, match="query_offset must be given"):
                ch.attention(query, key, key, mask=ch.Causal(), backend="native")


class TestDecoding:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("mask", [ch.Causal(), ch.Causal() & ch.Window(40)], ids=repr)
    @pytest.mark.parametrize("head_dim", [24, 64])
    def test_decoding_equals_the_whole(self, dtype: torch.dtype, mask: ch.Mask, head_dim: int) -> None:
        """A prompt, then tokens one by one and three by three, through a cache."""
        query = draw(2, 8, 140, head_dim, dtype=dtype, grad=False)
        key, value = (draw(2, 2, 140, head_dim, seed=seed, dtype=dtype, grad=False) for seed in (1, 2))
        exact = ch.attention(query.double(), key.double(), value.double(), mask=mask, backend="reference")
        whole = ch.attention(query, key, value, mask=mask, backend="native")
        cache, parts, start = ch.KVCache(), [], 0
        for count in (100, *[1] * 25, *[3] * 5):
            rows = slice(start, start + count)
            with torch.no_grad():
                keys, values = cache.append(key[:, :, rows], value[:, :, rows])
            parts.append(ch.attention(query[:, :, rows], keys, values, mask=mask, query_offset=start, backend="native"))
            start += count
        assert start == 140
        stepped = torch.cat(parts, dim=2)
        # Both errors are within the budget, so the difference is within twice the budget.
        within_budget("stepped", stepped, whole, exact, terms=140)
        within_budget("whole", whole, stepped, exact, terms=140)
