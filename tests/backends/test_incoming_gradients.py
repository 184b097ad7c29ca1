"""Incoming gradients with NaN or infinity affect only the keys that their rows may attend to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clearhead as ch
from tests.problems import tensors

pytestmark = pytest.mark.covering(1)

BACKENDS = ["reference", "tiled", "native", "sdpa"]
LENGTH = 20
MASKS = {
    "none": None,
    "causal": ch.Causal(),
    "window": ch.Window(2),
    "padding": ch.Padding([9, 9]),
    "dense": ch.Dense(torch.arange(LENGTH)[:, None] >= torch.arange(LENGTH)),
    "table": ch.MaskFunction(lambda b, h, i, j: (i * j + h) % 3 != 0),
    "runs": ch.Padding([9, 12]) & ch.Window(3),
}
#: Head 1 reads key head 0.
HEAD, ROW = 1, 3


def reached(mask: ch.Mask | None) -> Tensor:
    """Keys that the row may attend to."""
    if mask is None:
        return torch.ones(LENGTH, dtype=torch.bool)
    return mask.dense(LENGTH, LENGTH, num_heads=4).expand(2, 4, LENGTH, LENGTH)[0, HEAD, ROW]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("channels", [slice(None), slice(2, 3)], ids=["row", "channel"])
@pytest.mark.parametrize("value_dim", [8, 6], ids=["fused", "unfused"])
def test_nan_gradient_reaches_allowed_keys_only(
    backend: str, mask: str, poison: float, channels: slice, value_dim: int
) -> None:
    inputs, case = tensors(head_dim=8, value_dim=value_dim, q_len=LENGTH, k_len=LENGTH), MASKS[mask]
    arrived = torch.randn(2, 4, LENGTH, value_dim, generator=torch.Generator().manual_seed(0))
    spoiled = arrived.clone()
    spoiled[0, HEAD, ROW, channels] = poison
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    right = torch.autograd.grad(ch.attention(*exact, mask=case, backend="reference"), exact, arrived.double())
    grads = torch.autograd.grad(ch.attention(*inputs, mask=case, backend=backend), inputs, spoiled)

    bad = [torch.zeros(grad.shape, dtype=torch.bool) for grad in grads]
    keys = reached(case)
    bad[0][0, HEAD, ROW] = True
    bad[1][0, 0, keys] = True
    bad[2][0, 0, keys, channels] = True
    for grad, clean, where in zip(grads, right, bad, strict=True):
        assert torch.equal(~torch.isfinite(grad), where)
        torch.testing.assert_close(grad[~where].double(), clean[~where], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "tiled", "native"])
def test_nan_gradient_of_an_empty_row_reaches_nothing(backend: str) -> None:
    inputs = tensors()
    mask = ch.Dense(torch.arange(13)[:, None] > 3)
    arrived = torch.ones(2, 4, 13, 6)
    arrived[:, :, :3] = torch.nan
    grads = torch.autograd.grad(ch.attention(*inputs, mask=mask, backend=backend), inputs, arrived)
    assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("backend", ["reference", "tiled", "native"])
@pytest.mark.parametrize("name", ["lse", "entropy", "distance", "max_score"])
def test_nan_gradient_of_a_statistic_affects_its_row_only(backend: str, name: str) -> None:
    inputs = tensors()
    want = ch.Want(lse=name == "lse", entropy=name == "entropy", distance=name == "distance", max_score=True)
    statistic = getattr(ch.observe_attention(*inputs, want=want, mask=ch.Causal(), backend=backend), name)
    arrived = torch.ones_like(statistic)
    arrived[0, HEAD, ROW] = torch.nan
    query, key, _ = torch.autograd.grad(statistic, inputs, arrived, allow_unused=True)
    rows = torch.zeros(query.shape[:3], dtype=torch.bool)
    rows[0, HEAD, ROW] = True
    assert torch.equal(torch.isnan(query).any(dim=-1), rows)
    assert torch.isfinite(key[1]).all()
    assert torch.isfinite(key[0, 1]).all()
    assert torch.isfinite(key[0, 0, ROW + 1 :]).all()
    assert torch.isnan(key[0, 0, : ROW + 1]).any()


@pytest.mark.parametrize("backend", ["reference", "tiled", "native"])
def test_nan_gradient_of_a_forbidden_key_reaches_nothing(backend: str) -> None:
    inputs = tensors()
    observation = ch.observe_attention(*inputs, want=ch.Want(received=True), mask=ch.Padding([9, 9]), backend=backend)
    arrived = torch.ones_like(observation.received)
    arrived[:, :, 9:] = torch.nan
    grads = torch.autograd.grad(observation.received, inputs, arrived, allow_unused=True)
    assert all(grad is None or torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("backend", ["reference", "tiled", "native"])
def test_rule_gradient_is_nan_where_a_spoiled_row_reads_it(backend: str) -> None:
    """Neither hidden nor spread: a bias at the row's keys, a table at its distances, the sink of its head."""
    inputs = tensors()
    bias, table, logits = (torch.zeros(*shape, requires_grad=True) for shape in ((1, 4, 13, 13), (4, 5), (4,)))
    rules = (ch.DenseBias(bias), ch.RelativeBias(table), ch.Sink(logits))
    output = ch.attention(*inputs, mask=ch.Causal(), scores=rules, backend=backend)
    arrived = torch.ones_like(output)
    arrived[0, HEAD, 1] = torch.nan
    of_bias, of_table, of_sink = torch.autograd.grad(output, (bias, table, logits), arrived)
    places = torch.zeros(1, 4, 13, 13, dtype=torch.bool)
    places[0, HEAD, 1, :2] = True
    assert torch.equal(torch.isnan(of_bias), places)
    assert torch.isnan(of_table).sum() == 2
    assert torch.isnan(of_table[HEAD]).sum() == 2
    assert torch.isnan(of_sink).tolist() == [head == HEAD for head in range(4)]


def test_nan_value_does_not_affect_value_gradients() -> None:
    """The gradient of values is weights times the output's gradient, independent of the values."""
    query, key, value = tensors()
    clean = torch.autograd.grad(ch.attention(query, key, value, mask=ch.Causal(), backend="native").sum(), value)[0]
    with torch.no_grad():
        value[:, :, 6, 2] = torch.nan
    for backend in ("reference", "tiled", "native"):
        output = ch.attention(query, key, value, mask=ch.Causal(), backend=backend)
        grad = torch.autograd.grad(output, value, torch.ones_like(output))[0]
        torch.testing.assert_close(grad, clean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("statistic", [False, True], ids=["output", "received"])
def test_containment_evaluates_a_mask_once(statistic: bool) -> None:
    """A mask function may return another result on a second call: backward uses that of forward."""
    answers: list[int] = []

    def fickle(batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        answers.append(1)
        return (q_pos * k_pos) % 3 == 0

    query, key, value = tensors()
    with torch.no_grad():
        key[:, :, 3] = torch.nan
    want = ch.Want(received=statistic)
    observation = ch.observe_attention(query, key, value, mask=ch.MaskFunction(fickle), want=want, backend="native")
    asked = len(answers)
    loss = observation.output.sum() + (observation.received.sum() if statistic else 0.0)
    grads = torch.autograd.grad(loss, (query, key, value))
    assert torch.isnan(grads[0]).any()
    assert len(answers) == asked


@pytest.mark.parametrize("k_len", [1, 2, 3, 7, 8, 15, 16, 17])
@pytest.mark.parametrize("place", [0, 1], ids=["query", "key"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sdpa_keeps_nan_with_few_keys(k_len: int, place: int, dtype: torch.dtype) -> None:
    """torch's CPU kernel takes a short row that is NaN throughout for one that is masked throughout."""
    inputs = [tensor.detach().clone() for tensor in tensors(q_len=5, k_len=k_len, head_dim=8, value_dim=8, dtype=dtype)]
    clean = ch.attention(*inputs, backend="sdpa")
    # torch's own kernel rounds weights to bfloat16.
    near = {"rtol": 2e-2, "atol": 5e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(clean, ch.attention(*inputs, backend="reference"), **near)
    inputs[place][0, 0] = torch.nan
    output = ch.attention(*inputs, backend="sdpa")
    assert torch.isnan(output[0, 0]).all()
    torch.testing.assert_close(output[1], clean[1], **near)


@pytest.mark.parametrize("backend", ["native", "tiled", "reference", "sdpa"])
@pytest.mark.parametrize("name", ["output", "entropy"])
def test_batched_gradients_equal_single_ones(backend: str, name: str) -> None:
    query, key, value = tensors()
    if name == "output":
        output = ch.attention(query, key, value, mask=ch.Causal(), backend=backend)
    elif backend == "sdpa":
        pytest.skip("sdpa: has no statistics")
    else:
        want = ch.Want(entropy=True)
        observation = ch.observe_attention(query, key, value, mask=ch.Causal(), want=want, backend=backend)
        assert observation.entropy is not None
        output = observation.entropy
    arrived = torch.randn(3, *output.shape, generator=torch.Generator().manual_seed(0))
    batched = torch.autograd.grad(output, query, arrived, is_grads_batched=True, retain_graph=True)[0]
    for upstream, grad in zip(arrived, batched, strict=True):
        torch.testing.assert_close(grad, torch.autograd.grad(output, query, upstream, retain_graph=True)[0])


RULES: dict[str, Callable[[Tensor], tuple[ch.ScoreRule, ...]]] = {
    "plain": lambda bias: (),
    "a bias": lambda bias: (ch.DenseBias(bias.detach()),),
    "a learned bias": lambda bias: (ch.DenseBias(bias),),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("length", [13, 40])
@pytest.mark.parametrize("lie", ["fused", "other widths", "strided"])
def test_backward_within_autocast_keeps_its_precision(
    backend: str, mask: str, rules: str, length: int, lie: str
) -> None:
    bias = torch.randn(4, length, length, generator=torch.Generator().manual_seed(1), requires_grad=True)
    value_dim = 6 if lie == "other widths" else 8
    inputs = tensors(head_dim=8, value_dim=value_dim, q_len=length, k_len=length)
    if lie == "strided":
        inputs = tuple(tensor.detach().mT.contiguous().mT.requires_grad_() for tensor in inputs)
    output = ch.attention(*inputs, mask=MASKS[mask], scores=RULES[rules](bias), backend=backend)
    wanted = [*inputs, *([bias] if rules == "a learned bias" else [])]
    outside = torch.autograd.grad(output.square().sum(), wanted, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = torch.autograd.grad(output.square().sum(), wanted)
    for one, other in zip(within, outside, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_second_derivative_within_autocast_keeps_its_precision() -> None:
    inputs = tensors()
    output = ch.attention(*inputs, mask=ch.Causal(), backend="reference")
    seconds = []
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            (first,) = torch.autograd.grad(output.square().sum(), inputs[0], create_graph=True)
            seconds.append(torch.autograd.grad(first.square().sum(), inputs, retain_graph=True))
    for one, other in zip(*seconds, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", [("jacfwd", "jacfwd"), ("jacfwd", "jacrev"), ("jacrev", "jacrev")], ids="-".join)
def test_second_derivatives_in_any_direction(order: tuple[str, str]) -> None:
    """The matrix multiplications of ``reference`` are autograd functions, which must not lose a tangent."""
    query, key, value = (tensor.detach() for tensor in tensors(batch=1, q_len=3, k_len=3, dtype=torch.float64))
    allowed = torch.ones(3, 3).tril().bool()

    def ours(query: Tensor) -> Tensor:
        return ch.attention(query, key, value, mask=ch.Causal(), backend="reference").square().sum()

    def formula(query: Tensor) -> Tensor:
        keys, values = (tensor.repeat_interleave(2, dim=1) for tensor in (key, value))
        scores = (query @ keys.mT / 8**0.5).masked_fill(~allowed, -torch.inf)
        return (scores.softmax(dim=-1) @ values).square().sum()

    outer, inner = (getattr(torch.func, name) for name in order)
    torch.testing.assert_close(outer(inner(ours))(query), outer(inner(formula))(query))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("mask", ["none", "causal", "window", "dense", "table"])
@pytest.mark.parametrize("gradient", [False, True])
def test_fake_tensors_give_fake_outputs(backend: str, mask: str, gradient: bool) -> None:
    """Under FakeTensorMode calls return shapes, without a check for NaN."""
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        query, key, value = (torch.empty(2, heads, LENGTH, 8, requires_grad=gradient) for heads in (4, 2, 2))
        output = ch.attention(query, key, value, mask=MASKS[mask], backend=backend)
        assert isinstance(output, fake_tensor.FakeTensor)
        assert output.shape == (2, 4, LENGTH, 8)
        if gradient:
            output.sum().backward()
            assert key.grad is not None
            assert key.grad.shape == key.shape
