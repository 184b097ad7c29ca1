"""Top-k attention against a dense oracle: keys, outputs, gradients, and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.benchmark import peak_extra_bytes
from clearhead.sparse import top_k as module
from clearhead.sparse import top_k_attention
from clearhead.verify import law_names, verify
from tests.budget import within_budget
from tests.problems import BATCH, HEADS, LEN, MASKS, RULES


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    k: int,
    mask: ch.Mask | None = None,
    scores: tuple[ch.ScoreRule, ...] = (),
    scale: float | None = None,
) -> Tensor:
    """Every score, all but the k largest of a row forbidden; softmax; nothing shared with what is tested."""
    batch, heads, q_len, head_dim = query.shape
    k_len = key.shape[2]
    key, value = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (key, value))
    index = (
        torch.arange(batch).view(-1, 1, 1, 1),
        torch.arange(heads).view(1, -1, 1, 1),
        torch.arange(q_len).view(1, 1, -1, 1),
        torch.arange(k_len).view(1, 1, 1, -1),
    )
    all_scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(head_dim) if scale is None else scale)
    sink = None
    for rule in scores:
        if isinstance(rule, ch.Sink):
            sink = rule.logits.to(all_scores.dtype).view(1, -1, 1, 1).expand(batch, heads, q_len, 1)
        else:
            all_scores = rule.apply(all_scores, *index)
    if mask is not None:
        all_scores = all_scores.masked_fill(~mask.allows(*index).expand_as(all_scores), -torch.inf)
    order = all_scores.detach().argsort(dim=-1, descending=True, stable=True)
    forbidden = torch.ones_like(all_scores, dtype=torch.bool).scatter(-1, order[..., :k], False)
    all_scores = all_scores.masked_fill(forbidden, -torch.inf)
    if sink is not None:
        all_scores = torch.cat([all_scores, sink], dim=-1)
    empty = (all_scores == -torch.inf).all(dim=-1, keepdim=True)
    weights = torch.softmax(all_scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)[..., :k_len]
    return weights @ value


def tensors(dtype: torch.dtype = torch.float64, *, kv_heads: int = HEADS, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((BATCH, HEADS, LEN, 8), (BATCH, kv_heads, LEN, 8), (BATCH, kv_heads, LEN, 5))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def with_gradients(call: Callable[..., Tensor], inputs: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = call(*leaves)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return [output.detach(), *torch.autograd.grad((output * weight.to(output.dtype)).sum(), [*leaves, *others])]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("k", [1, 4, LEN + 3])
def test_every_mask_against_the_oracle(name: str, k: int) -> None:
    mask = MASKS[name].mask
    inputs = tensors()
    ours = with_gradients(lambda *given: top_k_attention(*given, k=k, mask=mask), inputs, [])
    exact = with_gradients(lambda *given: dense(*given, k=k, mask=mask), inputs, [])
    for got, wanted in zip(ours, exact, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_against_the_oracle(name: str) -> None:
    rules, mask = RULES[name].rules, ch.Causal()
    learned = [tensor for rule in rules for tensor in rule.tensors() if tensor.is_floating_point()]
    for tensor in learned:
        tensor.requires_grad_()
    try:
        ours = with_gradients(lambda *given: top_k_attention(*given, k=3, mask=mask, scores=rules), tensors(), learned)
        exact = with_gradients(lambda *given: dense(*given, k=3, mask=mask, scores=rules), tensors(), learned)
    finally:
        for tensor in learned:
            tensor.requires_grad_(False)
    for got, wanted in zip(ours, exact, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_scale_and_strips_of_one_query(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRIP_ELEMENTS", 1)
    inputs = tensors(kv_heads=kv_heads)
    ours = with_gradients(lambda *given: top_k_attention(*given, k=3, scale=0.7), inputs, [])
    exact = with_gradients(lambda *given: dense(*given, k=3, scale=0.7), inputs, [])
    for got, wanted in zip(ours, exact, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_keep_the_budget(dtype: torch.dtype) -> None:
    inputs = [tensor.to(dtype) for tensor in tensors(seed=3)]
    exact = with_gradients(lambda *given: dense(*given, k=4, mask=ch.Causal()), [part.double() for part in inputs], [])
    ours = with_gradients(lambda *given: top_k_attention(*given, k=4, mask=ch.Causal()), inputs, [])
    plain = with_gradients(lambda *given: dense(*given, k=4, mask=ch.Causal()), inputs, [])
    for place, name in enumerate(("output", "query", "key", "value")):
        assert ours[place].dtype == dtype
        within_budget(name, ours[place], plain[place], exact[place], terms=4 * LEN, size=4.0)


def test_all_keys_are_full_attention() -> None:
    query, key, value = tensors()
    torch.testing.assert_close(
        top_k_attention(query, key, value, k=LEN, mask=ch.Causal()), ch.attention(query, key, value, mask=ch.Causal())
    )


@pytest.mark.slow
def test_with_all_keys_every_law_of_attention_holds() -> None:
    laws = [law for law in law_names() if law != "memory"]
    report = verify(partial(top_k_attention, k=10**6), signature="clearhead", laws=laws, examples=0)
    assert report.ok, str(report)
    assert len([finding for finding in report.findings if finding.status == "holds"]) >= 25


def test_missing_axes_stay_missing() -> None:
    query, key, value = (tensor[0, 0] for tensor in tensors())
    assert top_k_attention(query, key, value, k=2).shape == (LEN, 5)


def test_no_leak_from_the_future() -> None:
    query, key, value = tensors()
    before = top_k_attention(query, key, value, k=3, mask=ch.Causal())
    key[:, :, 9:], value[:, :, 9:] = 50.0, torch.nan
    changed = top_k_attention(query, key, value, k=3, mask=ch.Causal())
    assert torch.equal(before[:, :, :9], changed[:, :, :9])
    assert not torch.equal(before[:, :, 9:], changed[:, :, 9:])


def test_nan_reaches_only_queries_that_may_attend_to_it() -> None:
    query, key, value = tensors(torch.float32)
    key[:, :, 6] = torch.nan
    key.requires_grad_()
    output = top_k_attention(query, key, value, k=2, mask=ch.Causal())
    assert bool(output[:, :, :6].isfinite().all())
    assert bool(output[:, :, 6:].isnan().all())
    (grad,) = torch.autograd.grad(output[:, :, :6].sum(), key)
    assert bool(grad[:, :, :6].isfinite().all())


def test_large_scores_keep_the_budget() -> None:
    query, key, value = tensors(torch.float32)
    query = query * 1e4
    exact = dense(query.double(), key.double(), value.double(), k=2)
    within_budget(
        "output", top_k_attention(query, key, value, k=2), dense(query, key, value, k=2), exact, terms=8, size=1e4
    )


@pytest.mark.slow
def test_gradients_have_second_derivatives() -> None:
    inputs = [tensor.requires_grad_() for tensor in tensors()]
    assert torch.autograd.gradgradcheck(lambda *given: top_k_attention(*given, k=2), inputs)


@pytest.mark.slow
def test_gradient_of_a_learned_bias_has_a_second_derivative() -> None:
    bias = torch.zeros(LEN, LEN, dtype=torch.float64, requires_grad=True)
    inputs = tensors()
    assert torch.autograd.gradgradcheck(
        lambda learned: top_k_attention(*inputs, k=2, scores=[ch.SoftCap(3.0), ch.DenseBias(learned)]), bias
    )


def test_autocast_does_not_round_float32() -> None:
    query, key, value = (tensor.float().requires_grad_() for tensor in tensors())
    expected = top_k_attention(query, key, value, k=4, mask=ch.Causal())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = top_k_attention(query, key, value, k=4, mask=ch.Causal())
    assert torch.equal(output, expected)


@pytest.mark.parametrize("rules", [(), (ch.Sink(torch.zeros(HEADS, dtype=torch.float64)), ch.SoftCap(5.0))])
def test_without_keys_a_query_gives_0_with_gradient_0(rules: tuple[ch.ScoreRule, ...]) -> None:
    query, key, value = tensors()
    inputs = [query.requires_grad_(), *(part[:, :, :0].clone().requires_grad_() for part in (key, value))]
    output = top_k_attention(*inputs, k=3, scores=rules)
    assert torch.equal(output, torch.zeros(BATCH, HEADS, LEN, 5, dtype=torch.float64))
    for part, grad in zip(inputs, torch.autograd.grad(output.sum(), inputs), strict=True):
        assert torch.equal(grad, torch.zeros_like(part))


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, score: Tensor) -> Tensor:
        return score.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ArithmeticError("no derivative here")


def test_a_function_without_a_derivative_is_named() -> None:
    def plain(score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return _NoBackward.apply(score)  # type: ignore[no-any-return, no-untyped-call]

    inputs = [tensor.requires_grad_() for tensor in tensors()]
    output = top_k_attention(*inputs, k=3, scores=ch.ScoreFunction(plain))
    with pytest.raises(ch.UnsupportedError, match=r"fn must have a derivative; got ArithmeticError.*plain"):
        output.sum().backward()


def test_unreachable_learned_tensor_is_refused() -> None:
    class Holder:
        __slots__ = ("weight",)

        def __init__(self) -> None:
            self.weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    holders = [Holder()] * 2000

    def hidden(score: Tensor, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return score * next(iter(holders)).weight

    inputs = [tensor.requires_grad_() for tensor in tensors()]
    with pytest.raises(ch.UnsupportedError, match="name the learned tensors it reads; got one of shape"):
        top_k_attention(*inputs, k=3, scores=ch.ScoreFunction(hidden))


def test_rules_without_gradient_give_0() -> None:
    inputs = [tensor.requires_grad_() for tensor in tensors()]
    logits = torch.zeros(HEADS, dtype=torch.float64, requires_grad=True)
    constant = ch.ScoreFunction(lambda score, batch, head, q_pos, k_pos: score.detach() - 0.1 * k_pos)
    output = top_k_attention(*inputs, k=3, scores=[constant, ch.Sink(logits)])
    query, key, value, sink = torch.autograd.grad(output.sum(), [*inputs, logits])
    assert float(query.abs().max()) == float(key.abs().max()) == 0.0
    assert min(float(value.abs().max()), float(sink.abs().max())) > 0.0


def test_one_tensor_of_a_rule_and_the_sink_gets_both_gradients() -> None:
    def run(one: Tensor, other: Tensor) -> Tensor:
        rule = ch.ScoreFunction(lambda score, batch, head, q_pos, k_pos: score * (1.0 + one[head]))
        query, key, value = tensors()
        return top_k_attention(query, key, value, k=3, scores=[rule, ch.Sink(other)]).square().sum()

    first, second = (torch.full((HEADS,), 0.3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    separate = torch.autograd.grad(run(first, second), [first, second])
    (both,) = torch.autograd.grad(run(first, first), first)
    torch.testing.assert_close(both, separate[0] + separate[1], atol=1e-12, rtol=1e-12)


def test_backward_saves_indices_not_scores() -> None:
    length, k = 512, 4
    query = torch.randn(1, 2, length, 16, requires_grad=True)
    sizes: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        top_k_attention(query, query, query, k=k)
    assert sum(sizes) <= 2 * length * (3 * 16 + k)


def test_memory_is_linear_in_the_length() -> None:
    length = 4096
    query, key, value = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))

    def step() -> None:
        torch.autograd.grad(top_k_attention(query, key, value, k=8, mask=ch.Causal()).sum(), [query, key, value])

    peak = peak_extra_bytes(step)
    assert peak is None or peak < length * length * 4 / 2, "half of one matrix of weights"


@pytest.mark.parametrize("k", [0, -1, 2.0, True])
def test_k_must_be_a_count(k: object) -> None:
    with pytest.raises(ch.ShapeError, match="top_k_attention: k must be a whole number of at least 1; got"):
        top_k_attention(*tensors(), k=k)  # type: ignore[arg-type]


def test_an_empty_batch_gives_an_empty_batch() -> None:
    x = torch.randn(0, 2, 5, 4, requires_grad=True)
    output = ch.sparse.top_k_attention(x, x, x, k=2)
    output.sum().backward()
    assert output.shape == x.shape


def test_transforms_raise_one_line() -> None:
    x = torch.randn(2, 2, 5, 4, requires_grad=True)
    with pytest.raises(ch.UnsupportedError, match="top_k_attention: query must not be under a transform"):
        torch.vmap(lambda one: ch.sparse.top_k_attention(one, one, one, k=2))(x)
    output = ch.sparse.top_k_attention(x, x, x, k=2)
    batched = torch.randn(3, *x.shape)
    (batched_grad,) = torch.autograd.grad(output, x, batched, is_grads_batched=True, retain_graph=True)
    for grad, one in zip(batched_grad, batched, strict=True):
        torch.testing.assert_close(grad, torch.autograd.grad(output, x, one, retain_graph=True)[0])
