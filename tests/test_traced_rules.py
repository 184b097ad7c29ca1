"""Score functions traced to rules of the kernels, which equal the function; others are not converted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import clearhead as ch
from clearhead.ops.library import reason
from clearhead.problem import Problem
from clearhead.scores import ScoreRule
from clearhead.traced_rules import Extent, TracedRules, traced_rules

pytestmark = pytest.mark.covering(1)

needs_kernels = pytest.mark.skipif(reason() is not None, reason=f"the native backend {reason()}")
BATCH, HEADS, Q_LEN, K_LEN, OFFSET = 2, 4, 70, 90, 20
EXTENT = Extent(batch=BATCH, heads=HEADS, q_len=Q_LEN, k_len=K_LEN, query_offset=OFFSET)
LIKE = torch.empty(0)

_generator = torch.Generator().manual_seed(5)
SLOPES = torch.rand(HEADS, generator=_generator).requires_grad_()
TABLE = torch.randn(HEADS, 33, generator=_generator).requires_grad_()
BY_KEY = torch.randn(BATCH, K_LEN, generator=_generator).requires_grad_()
LEARNED = [SLOPES, TABLE, BY_KEY]
BOUNDARIES = torch.tensor([1, 2, 4, 8, 16])

#: Functions with the rules that they come to.
TRACED: dict[str, tuple[Callable[..., Tensor], list[type[ScoreRule]]]] = {
    "alibi": (lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(), [ch.RelativeBias]),
    "alibi, slopes as an axis": (lambda s, b, h, i, j: s - SLOPES[:, None, None] * (i - j).abs(), [ch.RelativeBias]),
    "table": (lambda s, b, h, i, j: s + TABLE[h, (i - j).clamp(-16, 16) + 16], [ch.RelativeBias]),
    "buckets": (lambda s, b, h, i, j: TABLE[h, torch.bucketize((i - j).abs(), BOUNDARIES)] + s, [ch.RelativeBias]),
    "positions in float": (lambda s, b, h, i, j: s - 0.1 * (i.float() - j.float()).square(), [ch.RelativeBias]),
    "each position scaled": (lambda s, b, h, i, j: (0.25 * j - 0.25 * i) + s, [ch.RelativeBias]),
    "logarithm": (lambda s, b, h, i, j: s - torch.log1p((i - j).abs().to(s.dtype)), [ch.RelativeBias]),
    "compared": (lambda s, b, h, i, j: s + torch.where(i >= j - 3, 0.0, -SLOPES[h]), [ch.RelativeBias]),
    "by head alone": (lambda s, b, h, i, j: s + SLOPES[h], [ch.RelativeBias]),
    "by key": (lambda s, b, h, i, j: s + BY_KEY[b, j] * SLOPES[h], [ch.DenseBias]),
    "cap": (lambda s, b, h, i, j: 5.0 * torch.tanh(s / 5.0), [ch.SoftCap]),
    "cap by product": (lambda s, b, h, i, j: (s * 0.5).tanh() * 2.0, [ch.SoftCap]),
    "cap, then alibi": (
        lambda s, b, h, i, j: 2 * torch.tanh(s / 2) - SLOPES[h] * (i - j).abs(),
        [ch.SoftCap, ch.RelativeBias],
    ),
    "nothing": (lambda s, b, h, i, j: s, []),
    "both positions": (lambda s, b, h, i, j: s - 0.01 * i * j * SLOPES[h], [ch.DenseBias]),
    "query alone": (lambda s, b, h, i, j: s + (0.1 * i).sin() * SLOPES[h], [ch.DenseBias]),
    "distance by batch entry": (lambda s, b, h, i, j: s - (i - j).abs() * (b + SLOPES[h]), [ch.DenseBias]),
    # Rounding makes them no functions of the distance.
    "whole numbers of fractions": (
        lambda s, b, h, i, j: s - ((i / 4).long() - (j / 4).long()).abs() * SLOPES[h],
        [ch.DenseBias],
    ),
    "whole numbers of products": (
        lambda s, b, h, i, j: s + ((i * 0.25).to(torch.int32) == (j * 0.25).to(torch.int32)) * SLOPES[h],
        [ch.DenseBias],
    ),
    "tenths": (lambda s, b, h, i, j: s + (i * 0.1 - j * 0.1).floor() * SLOPES[h], [ch.DenseBias]),
    "thirds": (lambda s, b, h, i, j: s + (i / 3 - j / 3).floor() * SLOPES[h], [ch.DenseBias]),
    "masked": (lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf), []),
    "masked, the other way": (lambda s, b, h, i, j: torch.where(i < j, torch.tensor(-torch.inf), s), []),
    "masked by filling": (lambda s, b, h, i, j: s.masked_fill((i - j).abs() > 9, -torch.inf), []),
    "masked, then biased": (
        lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf) - SLOPES[h] * (i - j).abs(),
        [ch.RelativeBias],
    ),
    "capped, biased, masked twice": (
        lambda s, b, h, i, j: torch.where(
            j != 3, torch.where(i >= j, 2 * torch.tanh(s / 2) + BY_KEY[b, j], -torch.inf), -torch.inf
        ),
        [ch.SoftCap, ch.DenseBias],
    ),
}


def _decides(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s - (i - j).abs() if int(i.max()) > 60 else s


def _hides(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    try:
        return s + torch.cumsum(i - j, dim=3)
    except Exception:
        return s


#: Functions that do something else, or may.
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "scales": lambda s, b, h, i, j: 1.5 * s,
    "scales by head": lambda s, b, h, i, j: s * SLOPES[h],
    "subtracts the score": lambda s, b, h, i, j: (i - j) - s,
    "two scores": lambda s, b, h, i, j: s + s,
    "position in float16": lambda s, b, h, i, j: s + (i.half() - j.half()).to(s.dtype),
    "decides": _decides,
    "hides what it cannot do": _hides,
    "asks for the shape": lambda s, b, h, i, j: s + (i - j) / s.shape[-1],
    "a tile's shape": lambda s, b, h, i, j: s + torch.zeros(K_LEN),
    "random": lambda s, b, h, i, j: s + torch.rand_like(s),
    "another cap than it divides by": lambda s, b, h, i, j: 2.0 * torch.tanh(s / 3.0),
    "cap that never ends": lambda s, b, h, i, j: torch.tanh(s / 2.0),
    "cap of a masked score": lambda s, b, h, i, j: 2.0 * torch.tanh(torch.where(i >= j, s, -torch.inf) / 2.0),
    "masked by the score": lambda s, b, h, i, j: torch.where(s > 0.0, s, -torch.inf),
    "another choice": lambda s, b, h, i, j: torch.where(i >= j, s, 0.0),
    "cap of a biased score": lambda s, b, h, i, j: 2.0 * torch.tanh((s + 1.0) / 2.0),
    "cap of a cap": lambda s, b, h, i, j: 2.0 * torch.tanh(2.0 * torch.tanh(s / 2.0) / 2.0),
    "added within the cap": lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0 + 1.0),
    "cap beyond numbers": lambda s, b, h, i, j: 1e320 * torch.tanh(s / 1e320),
    "a copy that knows nothing": lambda s, b, h, i, j: s + 0.01 * torch.as_tensor(i * j, dtype=s.dtype),
    "a new tensor": lambda s, b, h, i, j: s + torch.tensor(float(i.max())),
    "matrix product": lambda s, b, h, i, j: s + (i - j).float() @ torch.ones(1, 1),
    "chosen by truth": lambda s, b, h, i, j: s + SLOPES[h > 0].sum(),
}


def _indices(extent: Extent = EXTENT) -> list[Tensor]:
    sizes = ((0, extent.batch), (0, extent.heads), (extent.query_offset, extent.q_len), (0, extent.k_len))
    return [
        torch.arange(first, first + size).view([-1 if place == axis else 1 for place in range(4)])
        for axis, (first, size) in enumerate(sizes)
    ]


def _inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(BATCH, HEADS, Q_LEN, 16), (BATCH, 2, K_LEN, 16), (BATCH, 2, K_LEN, 16)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def _applied(traced: TracedRules, score: Tensor, indices: list[Tensor]) -> Tensor:
    for rule in traced.rules:
        score = rule.apply(score, *indices)
    return score if traced.mask is None else score.masked_fill(~traced.mask.allows(*indices), -torch.inf)


@pytest.mark.parametrize("name", TRACED)
def test_function_becomes_rules(name: str) -> None:
    fn, kinds = TRACED[name]
    traced = traced_rules(ch.ScoreFunction(fn), EXTENT, LIKE)
    assert traced is not None
    assert [type(rule) for rule in traced.rules] == kinds
    score = torch.randn(BATCH, HEADS, Q_LEN, K_LEN)
    written = _applied(traced, score, _indices())
    assert (traced.mask is not None) == ("masked" in name)
    torch.testing.assert_close(written, fn(score, *_indices()), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_functions_are_not_converted(name: str) -> None:
    assert traced_rules(ch.ScoreFunction(FUNCTIONS[name]), EXTENT, LIKE) is None


@needs_kernels
@pytest.mark.parametrize("mask", [None, ch.Causal()], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRACED)
def test_the_kernels_run_it_with_every_gradient(name: str, dtype: torch.dtype, mask: ch.Mask | None) -> None:
    # Beside a sink also a bias by head alone changes the weights.
    rule = [ch.ScoreFunction(TRACED[name][0]), ch.Sink(0.5)]

    def step(inputs: list[Tensor], backend: str) -> list[Tensor]:
        options: dict[str, Any] = {"mask": mask, "scores": rule, "query_offset": OFFSET, "backend": backend}
        output = ch.attention(*inputs, **options)
        wanted = [*inputs, *LEARNED]
        grads = torch.autograd.grad(output.double().square().sum(), wanted, allow_unused=True)
        return [
            output,
            *(torch.zeros_like(actual) if grad is None else grad for actual, grad in zip(wanted, grads, strict=True)),
        ]

    inputs = _inputs(dtype)
    assert ch.explain_dispatch(*inputs, mask=mask, scores=rule, query_offset=OFFSET).choice == "native"
    exact = step([tensor.detach().double().requires_grad_() for tensor in inputs], "reference")
    plain, ours = step(inputs, "tiled"), step(inputs, "auto")
    for right, usual, actual in zip(exact, plain, ours, strict=True):
        norm = right.norm() + 1e-30
        rounding = 3e-6 if dtype == torch.float32 else 2e-2
        assert (actual.double() - right).norm() / norm <= 2 * (usual.double() - right).norm() / norm + rounding


@needs_kernels
def test_statistics_come_from_the_kernels_too() -> None:
    inputs, rule = [tensor.detach() for tensor in _inputs(torch.float32)], ch.ScoreFunction(TRACED["alibi"][0])
    want = ch.Want(lse=True, entropy=True, received=True)
    observation, right = (
        ch.observe_attention(*inputs, want=want, scores=rule, query_offset=OFFSET, backend=backend)
        for backend in ("native", "tiled")
    )
    for name in ("output", "lse", "entropy", "received"):
        torch.testing.assert_close(getattr(observation, name), getattr(right, name), rtol=1e-4, atol=1e-4)


def test_the_reason_says_what_the_kernels_take() -> None:
    inputs = _inputs(torch.float32)
    report = ch.explain_dispatch(*inputs, scores=ch.ScoreFunction(FUNCTIONS["scales"]), query_offset=OFFSET)
    assert report.choice == "tiled"
    if reason() is None:
        assert "caps or masks scores, or adds a bias of q_pos - k_pos, of the key, or a small one" in str(report)


def test_only_occurring_distances_are_evaluated() -> None:
    """A square root of negative distances is NaN, and so would be the gradient of what it is multiplied by."""
    slope = torch.tensor(0.5, requires_grad=True)
    rule = ch.ScoreFunction(lambda s, b, h, i, j: s - slope * (i - j).float().sqrt())
    query, key, value = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8)
    options: dict[str, Any] = {"scores": rule, "query_offset": 39}
    grads = [
        torch.autograd.grad(ch.attention(query, key, value, backend=backend, **options).sum(), slope)[0]
        for backend in ("auto", "reference")
    ]
    assert torch.isfinite(grads[0])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_a_score_that_is_masked_and_then_capped_is_not_masked() -> None:
    """The cap gives it a finite score: the mask of the first rule is none of the call."""
    inputs = [tensor.detach() for tensor in _inputs(torch.float32)]
    masks = ch.ScoreFunction(TRACED["masked"][0])
    for rules in ([masks, ch.SoftCap(2.0)], [masks, ch.ScoreFunction(TRACED["cap"][0])]):
        output = ch.attention(*inputs, scores=rules, query_offset=OFFSET)
        right = ch.attention(*inputs, scores=rules, query_offset=OFFSET, backend="reference")
        torch.testing.assert_close(output, right, rtol=1e-4, atol=1e-5)


@needs_kernels
def test_large_biases_are_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    places = BATCH * HEADS * Q_LEN * K_LEN
    fn = TRACED["distance by batch entry"][0]
    for most, choice in ((places, "native"), (places - 1, "tiled")):
        monkeypatch.setattr("clearhead.traced_rules.MOST_ENTRIES", most)
        report = ch.explain_dispatch(*_inputs(torch.float32), scores=ch.ScoreFunction(fn), query_offset=OFFSET)
        assert report.choice == choice


def test_function_is_traced_at_each_call() -> None:
    """What it closes over may have changed."""
    strength, inputs = [0.1], [tensor.detach() for tensor in _inputs(torch.float32)]
    rule = ch.ScoreFunction(lambda s, b, h, i, j: s - strength[0] * (i - j).abs())
    first = ch.attention(*inputs, scores=rule, query_offset=OFFSET)
    strength[0] = 1.0
    second = ch.attention(*inputs, scores=rule, query_offset=OFFSET)
    right = ch.attention(*inputs, scores=rule, query_offset=OFFSET, backend="reference")
    assert not torch.allclose(first, second)
    torch.testing.assert_close(second, right, rtol=1e-4, atol=1e-5)


def test_function_that_raises_or_writes_is_named() -> None:
    def raises(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        raise LookupError("no such place")

    def writes(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s.sub_(1.0)

    inputs = _inputs(torch.float32)
    with pytest.raises(ch.ShapeError, match=r"LookupError: no such place from .*raises on the tile batch"):
        ch.attention(*inputs, scores=ch.ScoreFunction(raises), query_offset=OFFSET)
    with pytest.raises(ch.UnsupportedError, match=r"one that .*writes wrote into"):
        ch.attention(*inputs, scores=ch.ScoreFunction(writes), query_offset=OFFSET)


def test_lengths_beyond_float32_are_not_traced() -> None:
    far = Extent(batch=1, heads=1, q_len=1, k_len=5, query_offset=2**24)
    assert traced_rules(ch.ScoreFunction(TRACED["positions in float"][0]), far, LIKE) is None


def test_a_problem_without_functions_is_itself() -> None:
    inputs = _inputs(torch.float32)
    problem = Problem.of("attention", *inputs, scores=[ch.SoftCap(3.0), ch.Alibi(HEADS)], query_offset=OFFSET)
    assert problem.with_traced_rules is problem
    rules = [ch.SoftCap(3.0), ch.ScoreFunction(TRACED["cap, then alibi"][0]), ch.Sink(0.0)]
    traced = Problem.of("attention", *inputs, scores=rules, query_offset=OFFSET).with_traced_rules
    assert re.sub(r"\(.*?\)", "", ", ".join(map(repr, traced.scores))) == "SoftCap, SoftCap, RelativeBias, Sink"


_Number = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
_HEADWISE, _KEYWISE = torch.tensor([0.5, -1.0, 2.0]), torch.arange(7.0).cos()
_LEAVES: list[_Number] = [
    lambda b, h, i, j: i,
    lambda b, h, i, j: j,
    lambda b, h, i, j: h,
    lambda b, h, i, j: b,
    lambda b, h, i, j: i - j,
    lambda b, h, i, j: 2,
    lambda b, h, i, j: 0.25,
    lambda b, h, i, j: _HEADWISE[h],
    lambda b, h, i, j: _KEYWISE[j],
    lambda b, h, i, j: _HEADWISE[:, None, None],
]
_ONE: list[Callable[[Any], Any]] = [
    lambda x: -x,
    abs,
    lambda x: 0.5 * x,
    lambda x: x / 4,
    lambda x: x * 3,
    lambda x: torch.as_tensor(x).float(),
    lambda x: torch.as_tensor(x).clamp(-2, 2),
    lambda x: torch.as_tensor(x).float().cos(),
    lambda x: _HEADWISE[torch.as_tensor(x).long().remainder(3)],
    lambda x: torch.as_tensor(x / 3).long(),
]
_TWO: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * y,
    lambda x, y: torch.where(torch.as_tensor(x >= y), 1.0, -0.5),
    lambda x, y: torch.maximum(torch.as_tensor(x).float(), torch.as_tensor(y).float()),
]


def _one(change: Callable[[Any], Any], inner: _Number) -> _Number:
    return lambda b, h, i, j: change(inner(b, h, i, j))


def _two(join: Callable[[Any, Any], Any], left: _Number, right: _Number) -> _Number:
    return lambda b, h, i, j: join(left(b, h, i, j), right(b, h, i, j))


_NUMBERS: st.SearchStrategy[_Number] = st.recursive(
    st.sampled_from(_LEAVES),
    lambda inner: st.builds(_one, st.sampled_from(_ONE), inner) | st.builds(_two, st.sampled_from(_TWO), inner, inner),
    max_leaves=6,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(number=_NUMBERS, offset=st.integers(0, 9), subtract=st.booleans())
def test_rules_equal_the_function(number: _Number, offset: int, subtract: bool) -> None:
    """For any expression of the indices: traced rules give equal scores at every place."""

    def fn(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s - number(b, h, i, j) if subtract else s + number(b, h, i, j)

    extent = Extent(batch=2, heads=3, q_len=5, k_len=7, query_offset=offset)
    traced = traced_rules(ch.ScoreFunction(fn), extent, LIKE)
    if traced is None:
        return
    score = torch.zeros(2, 3, 5, 7)
    written = _applied(traced, score, _indices(extent))
    torch.testing.assert_close(written, fn(score, *_indices(extent)).float(), rtol=1e-5, atol=1e-4)


class _Through(torch.autograd.Function):
    """Rounded, with the gradient of what was not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@torch.no_grad()
def _frozen(h: Tensor, d: Tensor) -> Tensor:
    return TABLE[h, d.clamp(-16, 16) + 16]


@torch.jit.script
def _scripted(i: Tensor, j: Tensor) -> Tensor:
    return ((i - j) == 7).float()


def _hides_all(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    try:
        return s + 0.0 * i.shape[2] + ((i - j) == 7)
    except:  # noqa: E722
        return s


@pytest.mark.parametrize(
    "fn",
    [
        lambda s, b, h, i, j: s + _Through.apply(TABLE[h, (i - j).clamp(-16, 16) + 16]),
        lambda s, b, h, i, j: s + _frozen(h, i - j),
        lambda s, b, h, i, j: s + _scripted(i, j),
        _hides_all,
        lambda s, b, h, i, j: s + ((i + SLOPES[h].detach()) - (j + SLOPES[h].detach()) == 0.0),
        lambda s, b, h, i, j: torch.tanh(s * float("inf")) * 0.0,
        lambda s, b, h, i, j: s + torch.abs(i - j, out=torch.empty(0, dtype=torch.int64)),
    ],
    ids=["straight-through", "no_grad", "scripted", "bare except", "shifted", "inf", "out"],
)
def test_untraceable_functions_are_not_converted(fn: Callable[..., Tensor]) -> None:
    assert traced_rules(ch.ScoreFunction(fn), EXTENT, LIKE) is None


def test_queries_far_from_all_keys_make_no_table() -> None:
    far = Extent(batch=1, heads=HEADS, q_len=4, k_len=8, query_offset=8_000_000)
    rule = ch.ScoreFunction(lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs())
    assert traced_rules(rule, far, LIKE) is None
