"""Every backend against the float64 specification, forward and backward, for all calls that it supports."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.dispatch import BACKENDS, loaded
from tests.agreement import compare, gradients
from tests.budget import within_budget
from tests.problems import BIAS, HEADS, MASKS, RULES, SINKS, TABLE, NamedMask, NamedRule, tensors

TESTED = [name for name in BACKENDS if name != "reference" and loaded(name).capability.requires() is None]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("backend", TESTED)
def test_agreement_under_all_masks_and_rules(backend: str, mask: NamedMask, rule: NamedRule) -> None:
    compare(backend, tensors(), mask=mask.mask, scores=rule.rules)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["none", "causal", "padding to nothing", "causal documents"])
@pytest.mark.parametrize("backend", TESTED)
def test_agreement_in_all_dtypes(backend: str, name: str, dtype: torch.dtype) -> None:
    compare(backend, tensors(dtype=dtype), mask=MASKS[name].mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["none", "causal", "padding to nothing", "causal documents"])
@pytest.mark.parametrize("backend", TESTED)
def test_inference_in_16_bits_keeps_the_budget(backend: str, name: str, dtype: torch.dtype) -> None:
    """Without gradients, torch's 16-bit kernels may run."""
    batch = 1 if "documents" in name else 2
    query, key, value = (tensor.detach() for tensor in tensors(dtype=dtype, batch=batch, value_dim=8))
    mask = MASKS[name].mask
    exact, textbook, actual = (
        ch.attention(*(tensor.to(kind) for tensor in (query, key, value)), mask=mask, backend=name)
        for kind, name in ((torch.float64, "reference"), (dtype, "reference"), (dtype, backend))
    )
    # Weights may be rounded to 16 bits before they meet the values, as in the textbook formula in 16 bits.
    half = torch.finfo(dtype).eps * value.abs().max().item()
    within_budget(backend, actual, textbook + half, exact)


@pytest.mark.parametrize("backend", [*TESTED, "reference"])
def test_autocast_leaves_float32_alone(backend: str) -> None:
    inputs = tensors(value_dim=8)
    plain = gradients(inputs, backend, mask=ch.Causal())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ch.attention(*inputs, mask=ch.Causal(), backend=backend)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, plain[0], rtol=0, atol=1e-6)


def test_tiled_backward_within_autocast() -> None:
    inputs = tensors()
    plain = gradients(inputs, "tiled", mask=ch.Causal())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = gradients(inputs, "tiled", mask=ch.Causal())
    for one, other in zip(within, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


SIZES = [
    {"q_len": 1, "k_len": 1},
    {"q_len": 127, "k_len": 127},
    {"q_len": 129, "k_len": 513},
    {"q_len": 128, "k_len": 512},
    {"q_len": 1, "k_len": 600},
    {"q_len": 600, "k_len": 1},
    {"q_len": 31, "k_len": 7, "head_dim": 1, "value_dim": 1},
    {"q_len": 9, "k_len": 9, "head_dim": 67, "value_dim": 130},
    {"heads": 6, "kv_heads": 6, "value_dim": 8},
    {"heads": 6, "kv_heads": 1, "q_len": 40, "k_len": 70},
    {"batch": 5, "heads": 3, "kv_heads": 3, "q_len": 300, "k_len": 300, "head_dim": 4},
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mask", [None, ch.Causal(), ch.Causal() & ch.Window(20)], ids=repr)
@pytest.mark.parametrize("backend", TESTED)
def test_agreement_in_all_sizes(backend: str, mask: ch.Mask | None, sizes: dict[str, int]) -> None:
    inputs = tensors(**sizes)
    offset = inputs[1].shape[2] - inputs[0].shape[2]
    compare(backend, inputs, mask=mask, query_offset=offset)
    compare(backend, inputs, mask=mask, query_offset=0)


@pytest.mark.parametrize("backend", TESTED)
def test_agreement_on_strided_views(backend: str) -> None:
    """A packed projection, cut into heads without a copy."""
    packed = torch.randn(2, 13, 3 * HEADS * 8)
    views = tuple(part.unflatten(-1, (HEADS, 8)).transpose(1, 2).requires_grad_() for part in packed.chunk(3, dim=-1))
    assert not views[0].is_contiguous()
    compare(backend, views, mask=ch.Causal())


@pytest.mark.parametrize("backend", TESTED)
@pytest.mark.parametrize("size", [30.0, 1e3])
def test_huge_scores_keep_the_budget(backend: str, size: float) -> None:
    compare(backend, tensors(size=size), mask=ch.Causal())


@pytest.mark.parametrize("backend", ["reference", *(name for name in TESTED if name != "sdpa")])
@pytest.mark.parametrize("low", [-1e9, torch.finfo(torch.float32).min / 2])
def test_rows_with_huge_negative_biases_keep_their_weights(backend: str, low: float) -> None:
    """Beside such scores a log-sum-exp has no digits left for how many keys there are; torch's backward reads one."""
    query, key, value, grad = (torch.randn(1, 2, 12, 4, generator=torch.Generator().manual_seed(n)) for n in range(4))
    bias = torch.zeros(1, 1, 12, 12)
    bias[:, :, 3], bias[:, :, 5:, 6:] = low, low
    weights = (query @ key.mT * 0.5 + bias).double().softmax(dim=-1)
    given = value.clone().requires_grad_()
    rule, want = ch.DenseBias(bias), ch.Want(received=True)
    observation = ch.observe_attention(query, key, given, scores=rule, backend=backend, want=want)
    assert observation.received is not None
    torch.testing.assert_close(observation.output.double(), weights @ value.double(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(observation.received.double(), weights.sum(dim=-2), rtol=1e-5, atol=2e-6)
    (pulled,) = torch.autograd.grad(observation.output, given, grad)
    torch.testing.assert_close(pulled.double(), weights.mT @ grad.double(), rtol=1e-5, atol=2e-6)


@pytest.mark.covering(2)
@pytest.mark.parametrize("lengths", [[1] * 9, [300, 1, 2, 290, 7, 40, 40], [513], [0, 5, 0, 6]], ids=str)
@pytest.mark.parametrize("backend", TESTED)
def test_agreement_on_packed_documents(backend: str, lengths: list[int]) -> None:
    inputs = tensors(batch=1, q_len=sum(lengths), k_len=sum(lengths))
    for mask in (ch.Documents(lengths=lengths), ch.Window(3, 1) & ch.Documents(lengths=lengths)):
        compare(backend, inputs, mask=mask)


@pytest.mark.parametrize("backend", TESTED)
def test_agreement_on_packed_documents_with_padding(backend: str) -> None:
    ids = torch.tensor([0, 0, 0, -1, 1, 1, -1, -1, 2])
    compare(backend, tensors(batch=1, q_len=9, k_len=9), mask=ch.Documents(ids=ids))


@pytest.mark.parametrize("middle", [(), (ch.SoftCap(3.0),)], ids=["side by side", "a cap between"])
@pytest.mark.parametrize("backend", TESTED)
def test_tensor_shared_by_two_rules_gets_one_gradient(backend: str, middle: tuple[ch.ScoreRule, ...]) -> None:
    both = []
    for name, dtype in ((backend, torch.float32), ("reference", torch.float64)):
        table, bias = (tensor.detach().clone().to(dtype).requires_grad_() for tensor in (TABLE, BIAS))
        pair = (ch.RelativeBias(table), ch.DenseBias(bias))
        rules = (*pair, *middle, *pair)
        if backend == "sdpa" and middle:
            pytest.skip("sdpa: cannot apply SoftCap to scores")
        # Several steps: memory that was given back too early does not show in the first.
        for _ in range(8):
            output = ch.attention(*tensors(dtype=dtype), scores=rules, backend=name)
            grads = torch.autograd.grad(output.square().sum(), [table, bias])
        both.append(grads)
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", TESTED)
@pytest.mark.parametrize("name", ["none", "causal", "padding to nothing", "causal documents"])
def test_gradients_of_rules(backend: str, name: str) -> None:
    """Tables, biases and sinks learn."""
    batch = 1 if "documents" in name else 2
    mask = MASKS[name].mask if batch == 2 else ch.Documents(lengths=[5, 1, 7]) & ch.Causal()

    def run(backend: str, dtype: torch.dtype) -> tuple[list[Tensor], tuple[str, ...]]:
        inputs = tensors(dtype=dtype, batch=batch)
        learned = [tensor.detach().clone().to(dtype).requires_grad_() for tensor in (TABLE, BIAS, SINKS)]
        rules: tuple[ch.ScoreRule, ...] = (ch.RelativeBias(learned[0]), ch.DenseBias(learned[1]))
        if backend != "sdpa":
            rules = (*rules, ch.SoftCap(3.0), ch.Sink(learned[2]))
        names = ("output", "dquery", "dkey", "dvalue", "dtable", "dbias", "dsink")
        used = inputs + tuple(learned[: 3 if backend != "sdpa" else 2])
        output = ch.attention(
            *inputs, mask=mask, scores=rules, backend=backend if dtype != torch.float64 else "reference"
        )
        return [output, *torch.autograd.grad(output.square().sum(), used)], names

    actual, names = run(backend, torch.float32)
    exact, _ = run(backend, torch.float64)
    for name, result, right in zip(names, actual, exact, strict=False):
        assert torch.isfinite(result).all(), name
        scale = right.abs().max().item() + 1.0
        assert (result.double() - right).abs().max().item() <= 2e-6 * scale * 13, f"{backend} {name}"


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_closed_over_tensors_get_gradients(backend: str) -> None:
    learned = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    query, key, value = tensors(dtype=torch.float64)
    rule = ch.ScoreFunction(lambda score, b, h, i, j: score * learned[h] + learned[h] * (i - j))

    def run(learned_: Tensor) -> Tensor:
        return ch.attention(query, key, value, scores=rule, mask=ch.Causal(), backend=backend)

    (grad,) = torch.autograd.grad(run(learned).square().sum(), learned)
    step = torch.zeros_like(learned)
    step[2] = 1e-6
    with torch.no_grad():
        learned += step
        high = run(learned).square().sum()
        learned -= 2 * step
        low = run(learned).square().sum()
    torch.testing.assert_close(grad[2], (high - low) / 2e-6, rtol=1e-6, atol=1e-6)


def test_tiled_lse_has_its_gradient() -> None:
    query, key, value = tensors(dtype=torch.float64)

    def lse(backend: str) -> Tensor:
        want = ch.Want(lse=True)
        observation = ch.observe_attention(query, key, value, mask=ch.Causal(), want=want, backend=backend)
        return torch.cat(
            [
                grad.flatten()
                for grad in torch.autograd.grad(observation.lse.sum() + observation.output.sum(), (query, key))
            ]
        )

    torch.testing.assert_close(lse("tiled"), lse("reference"))


@pytest.mark.parametrize("backend", TESTED)
def test_two_runs_give_the_same_bits(backend: str) -> None:
    inputs = tensors(q_len=200, k_len=200)
    first, second = (gradients(inputs, backend, mask=ch.Causal()) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_budget_can_fail() -> None:
    exact = torch.ones(3, dtype=torch.float64)
    within_budget("same", exact.float(), exact.float(), exact)
    with pytest.raises(AssertionError, match="above its budget"):
        within_budget("off", exact.float() + 1e-3, exact.float(), exact)
    with pytest.raises(AssertionError, match="nan at"):
        within_budget("nan", exact.float() * torch.nan, exact.float(), exact)
