"""The CPU kernels on extreme values: huge scores, infinities, NaN, subnormals, empty rows, any scale."""

from __future__ import annotations

import platform
import time

import pytest
import torch
from torch import Tensor

import clearhead as ch
from tests.agreement import compare, draw, needs_native, results
from tests.problems import HEADS, MASKS, RULES, SINKS, tensors

pytestmark = needs_native


class TestOddNumbers:
    """Huge scores, infinities and NaN."""

    @pytest.mark.parametrize("size", [1e3**0.5, 1e4**0.5, 1e3])
    @pytest.mark.parametrize("mask", [None, ch.Causal()], ids=repr)
    def test_huge_scores(self, size: float, mask: ch.Mask | None) -> None:
        compare("native", tensors(size=size, q_len=70, k_len=70, value_dim=8), mask=mask)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("size", [1e5, 1e12])
    def test_scores_near_overflow_agree_with_reference(self, size: float, dtype: torch.dtype) -> None:
        """One key has all the weight; the rounding error of a score must not count as a score."""
        query, key, value = (tensor.detach() for tensor in tensors(q_len=70, k_len=70, size=size, dtype=dtype))
        value = value / size
        actual, right = (ch.attention(query, key, value, backend=name) for name in ("native", "reference"))
        torch.testing.assert_close(actual, right, rtol=torch.finfo(dtype).eps, atol=1e-6)

    @pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("where", [0, 1, 2], ids=["query", "key", "value"])
    @pytest.mark.parametrize(
        "mask",
        [None, ch.Causal(), ch.Window(20, 5), ch.Dense(draw(90, 90, grad=False) > 0.8)],
        ids=["none", "causal", "window", "dense"],
    )
    @pytest.mark.parametrize("rules", ["none", "alibi", "sink"])
    def test_nan_and_infinity_are_contained(self, poison: float, where: int, mask: ch.Mask | None, rules: str) -> None:
        """Rows that may attend to it, and keys that such a row may attend to; the rest is as it was."""
        inputs = tuple(tensor.detach() for tensor in tensors(q_len=90, k_len=90, value_dim=8))
        options = {"mask": mask, "scores": RULES[rules].rules}
        clean = results(tuple(tensor.clone().requires_grad_() for tensor in inputs), **options)
        inputs[where][0, 1, 40, 3] = poison
        spoiled = results(tuple(tensor.clone().requires_grad_() for tensor in inputs), **options)
        allowed = torch.ones(90, 90, dtype=torch.bool) if mask is None else mask.dense(90, 90)
        heads = [1] if where == 0 else [2, 3]
        rows = torch.zeros(2, 4, 90, dtype=torch.bool)
        rows[0, heads] = allowed[:, 40] if where > 0 else torch.arange(90) == 40
        keys = (rows[..., None] & allowed).any(dim=2).unflatten(1, (2, 2)).any(dim=2)
        untouched = {"output": ~rows, "lse": ~rows, "dquery": ~rows, "dkey": ~keys, "dvalue": ~keys}
        for (what, still), one, other in zip(untouched.items(), spoiled, clean, strict=True):
            torch.testing.assert_close(
                one[still], other[still], rtol=1e-5, atol=1e-6, msg=lambda text, w=what: f"{w}: {text}"
            )
        if where == 2:
            channels = torch.arange(8) != 3
            torch.testing.assert_close(spoiled[0][..., channels], clean[0][..., channels], rtol=1e-5, atol=1e-6)
            assert not torch.isfinite(spoiled[0][rows][:, 3]).any()
        elif poison != poison:
            assert torch.isnan(spoiled[0][rows]).all()
        if poison != poison:
            assert torch.isnan(spoiled[2][rows]).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("backward", [False, True])
    def test_nan_does_not_cross_batch_entries_and_heads(self, dtype: torch.dtype, backward: bool) -> None:
        inputs = tuple(tensor.detach() for tensor in tensors(q_len=40, k_len=600, dtype=dtype))
        clean = self._run(inputs, backward)
        for place in range(3):
            spoiled = [tensor.clone() for tensor in inputs]
            spoiled[place][0, 0, 7] = torch.nan
            for one, other in zip(self._run(tuple(spoiled), backward), clean, strict=True):
                assert not torch.isfinite(one[0, 0]).all()
                assert torch.equal(one[1], other[1])
                assert torch.equal(one[0, -1], other[0, -1])

    def _run(self, inputs: tuple[Tensor, ...], backward: bool) -> list[Tensor]:
        inputs = tuple(tensor.clone().requires_grad_(backward) for tensor in inputs)
        output = ch.attention(*inputs, backend="native")
        return [output, *torch.autograd.grad(output.float().sum(), inputs)[:1]] if backward else [output]

    @pytest.mark.parametrize("value_dim", [6, 64])
    def test_masked_nan_changes_nothing(self, value_dim: int) -> None:
        """Few queries read keys in place, many read packed ones: neither reads masked keys."""
        for q_len in (1, 8, 200):
            query, key, value = (
                tensor.detach() for tensor in tensors(q_len=q_len, k_len=700, head_dim=64, value_dim=value_dim)
            )
            mask = ch.Padding([600, 300])
            clean = ch.attention(query, key, value, mask=mask, backend="native")
            key, value = key.clone(), value.clone()
            for b, length in enumerate((600, 300)):
                key[b, :, length:], value[b, :, length:] = torch.nan, torch.inf
            output = ch.attention(query, key, value, mask=mask, backend="native")
            torch.testing.assert_close(output, clean, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("logit", [-torch.inf, -1e4, 1e4])
    @pytest.mark.parametrize("mask", ["none", "padding to nothing"])
    def test_extreme_sinks_agree_with_reference(self, logit: float, mask: str) -> None:
        logits = SINKS.float().clone()
        logits[2] = logit
        logits.requires_grad_()
        compare("native", tensors(), mask=MASKS[mask].mask, scores=(ch.Sink(logits),))
        actual, right = (
            results(tensors(), backend, mask=MASKS[mask].mask, scores=(ch.Sink(logits),))
            for backend in ("native", "reference")
        )
        for one, other in zip(actual, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

    def test_bias_of_minus_infinity_agrees_with_reference(self) -> None:
        """A mask in all but name: rows of nothing else are empty, and the bias has a gradient of 0 there."""
        bias = draw(HEADS, 40, 300, grad=False).masked_fill(draw(HEADS, 40, 300, seed=9, grad=False) > 0, -torch.inf)
        bias[:, 3] = -torch.inf
        bias[1, 4, :256] = -torch.inf
        bias.requires_grad_()
        inputs = tensors(q_len=40, k_len=300)
        actual, right = (results(inputs, name, scores=(ch.DenseBias(bias),)) for name in ("native", "reference"))
        for one, other in zip(actual, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert bool((actual[0][:, :, 3] == 0).all())
        assert bool((actual[1][:, :, 3] == -torch.inf).all())
        assert bool((actual[-1].view_as(bias)[torch.isinf(bias)] == 0).all())

    @pytest.mark.parametrize(
        "mask",
        [
            ch.Padding([6, 2]) & (ch.Global(0) | ch.Window(1)),
            ch.Padding([6, 6]) & (ch.Global(2) | ch.Window(2)) & (ch.Prefix(1) | ch.Window(4)),
            (ch.Prefix(0) | ch.Window(3)) & ch.Dense(torch.ones(12, 6, dtype=torch.bool)),
            ch.Padding([5, 6]) & ~(ch.Window(30) | ch.Prefix(4)),
            ch.Padding([5, 0]) & (ch.Window(3) | ch.Window(0, 2)),
        ],
        ids=repr,
    )
    def test_rows_beyond_the_last_key(self, mask: ch.Mask) -> None:
        """Empty intervals remain empty when they are intersected with others."""
        query, key, value = tensors(q_len=12, k_len=6)
        for offset in (0, 4, 9):
            compare("native", (query, key, value), mask=mask, query_offset=offset)
            with_table = mask & ch.Dense(torch.ones(12, 6, dtype=torch.bool))
            empty = ~with_table.dense(12, 6, query_offset=offset).any(dim=-1).expand(2, HEADS, 12)
            output = ch.attention(query, key, value, mask=mask, query_offset=offset, backend="native")
            assert bool((output[empty] == 0).all())

    def test_a_sink_without_keys_has_its_gradient(self) -> None:
        """Every row's log-sum-exp is the sink's logit then."""
        logits = draw(HEADS)
        query, key, value = tensors(k_len=0)
        want = ch.Want(lse=True)
        observation = ch.observe_attention(query, key, value, scores=(ch.Sink(logits),), want=want, backend="native")
        torch.testing.assert_close(observation.lse, logits[None, :, None].expand_as(observation.lse))
        (grad,) = torch.autograd.grad(observation.lse.sum(), logits)
        torch.testing.assert_close(grad, torch.full((HEADS,), 26.0))

    @pytest.mark.parametrize("scale", [0.0, -0.7, 1e-30, 40.0])
    def test_extreme_scales_agree_with_reference(self, scale: float) -> None:
        compare("native", tensors(), mask=ch.Causal(), scale=scale)


class TestNumbersThatAreNotNormal:
    """Numbers below 2**-126 are 0 to attention, for a multiplication of one costs some processors a hundred cycles."""

    TINY = 1e-39

    def trained(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        inputs = tuple(tensor.clone().requires_grad_() for tensor in (query, key, value))
        output = ch.attention(*inputs, backend="native")
        return [output.detach(), *torch.autograd.grad(output.sum(), inputs)]

    @pytest.mark.skipif(
        platform.machine() not in ("x86_64", "AMD64"), reason="other processors multiply them as they do others"
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_subnormal_values_give_0(self, dtype: torch.dtype) -> None:
        query, key, value = (tensor.detach() for tensor in tensors(q_len=70, k_len=70))
        inputs = query.to(dtype), key.to(dtype), (torch.ones_like(value) * self.TINY).to(dtype)
        assert not ch.attention(*inputs, backend="native").any()

    @pytest.mark.usefixtures("_threads_as_before")
    @pytest.mark.parametrize("threads", [1, 2])
    def test_caller_keeps_its_subnormal_mode(self, threads: int) -> None:
        """Also on the threads of the pool that it shares with torch."""
        torch.set_num_threads(threads)
        self.trained(*torch.randn(3, 2, 8, 200, 32))
        assert (torch.full((1 << 20,), self.TINY) * 0.5).all()

    def test_sharp_rows_are_right(self) -> None:
        """Their weights range from 1 to values that underflow."""
        query, key, value = (tensor.detach() for tensor in tensors(q_len=300, k_len=300))
        compare("native", tuple(tensor.clone().requires_grad_() for tensor in (query * 8, key * 8, value)))

    def test_sharp_rows_take_no_longer(self) -> None:
        query, key, value = torch.randn(3, 1, 4, 512, 64)
        best = {1.0: float("inf"), 20.0: float("inf")}
        for _ in range(7):
            for size in best:
                started = time.perf_counter()
                self.trained(query * size, key, value)
                best[size] = min(best[size], time.perf_counter() - started)
        assert best[20.0] < 3 * best[1.0], best
