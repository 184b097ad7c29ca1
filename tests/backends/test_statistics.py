"""Every statistic of every backend that supports it, against the float64 specification."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.masks.base import carried_sizes
from tests.problems import BIAS, HEADS, IDS, LEN, MASKS, RULES, SINKS, TABLE, NamedMask, NamedRule, tensors
from tests.statistics_agreement import (
    ALSO_DIFFERENTIABLE,
    DIFFERENTIABLE,
    GIVING,
    check_gradients,
    check_statistics,
    compare_observations,
    everything,
    given_by,
    loss_of,
    scale_of,
)

pytestmark = pytest.mark.covering(1)

each_backend = pytest.mark.parametrize("backend", GIVING)
FEW = ["none", "causal", "padding to nothing", "dense"]


def _check(backend: str, inputs: tuple[Tensor, ...], options: dict[str, Any] | None = None, **numbers: Any) -> None:
    check_statistics(backend, inputs, everything(inputs, only=given_by(backend), **numbers), **(options or {}))


def _packed(lengths: list[int], **sizes: Any) -> tuple[Tensor, ...]:
    return tensors(batch=1, q_len=sum(lengths), k_len=sum(lengths), **sizes)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@each_backend
def test_statistics_under_all_masks_and_rules(backend: str, mask: NamedMask, rule: NamedRule) -> None:
    _check(backend, tensors(), {"mask": mask.mask, "scores": rule.rules})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", [*FEW, "causal documents"])
@each_backend
def test_statistics_in_all_dtypes(backend: str, name: str, dtype: torch.dtype) -> None:
    _check(backend, tensors(dtype=dtype), {"mask": MASKS[name].mask})


SIZES = [
    {"q_len": 1, "k_len": 1},
    {"q_len": 1, "k_len": 700},
    {"q_len": 3, "k_len": 601},
    {"q_len": 127, "k_len": 127},
    {"q_len": 128, "k_len": 512},
    {"q_len": 129, "k_len": 513},
    {"q_len": 257, "k_len": 129},
    {"q_len": 600, "k_len": 1},
    {"q_len": 31, "k_len": 7, "head_dim": 1, "value_dim": 1},
    {"q_len": 9, "k_len": 9, "head_dim": 67, "value_dim": 130},
    {"heads": 6, "kv_heads": 6},
    {"heads": 6, "kv_heads": 1, "q_len": 40, "k_len": 70},
    {"batch": 5, "heads": 3, "kv_heads": 3, "q_len": 151, "k_len": 151, "head_dim": 4},
]


@pytest.mark.covering(2)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mask", [None, ch.Causal(), ch.Causal() & ch.Window(20)], ids=repr)
@each_backend
def test_statistics_in_all_sizes(backend: str, mask: ch.Mask | None, sizes: dict[str, int]) -> None:
    inputs = tensors(**sizes)
    offset = inputs[1].shape[2] - inputs[0].shape[2]
    _check(backend, inputs, {"mask": mask, "query_offset": offset, "scores": ch.Sink(0.5)}, top_k=17, heatmap=48)
    _check(backend, inputs, {"mask": mask, "query_offset": 0}, top_k=3, sink=100, heatmap=7)


@pytest.mark.parametrize("side", [1, 2, 64, 128, 100, 512, 513, 10_000])
@each_backend
def test_heatmap_tiles_of_any_side(backend: str, side: int) -> None:
    if "heatmap" not in given_by(backend):
        pytest.skip(f"{backend}: no heatmap")
    inputs = tensors(batch=1, heads=2, q_len=140, k_len=521)
    for options in ({}, {"mask": ch.Window(30), "query_offset": 200}):
        check_statistics(backend, inputs, ch.Want(heatmap=side), **options)


@pytest.mark.parametrize("k", [1, 2, 64, 128, 511, 512, 513, 530])
@each_backend
def test_top_k_of_any_size(backend: str, k: int) -> None:
    if "top_k" not in given_by(backend):
        pytest.skip(f"{backend}: no top_k")
    inputs = tensors(batch=1, heads=2, q_len=40, k_len=530)
    for options in ({}, {"mask": ch.Window(100, 60), "query_offset": 300}):
        check_statistics(backend, inputs, ch.Want(top_k=k), **options)


@each_backend
def test_equal_weights_name_the_lower_keys(backend: str) -> None:
    """Few distinct keys, many times each, across the borders of tiles."""
    if "top_k" not in given_by(backend):
        pytest.skip(f"{backend}: no top_k")
    key = torch.tensor([1.0, 2.0, 0.0, 2.0, 1.0]).repeat(300)[None, None, :, None]
    query = torch.ones(1, 1, 2, 1)
    for mask in (None, ch.Dense(torch.arange(1500)[None] % 5 != 1)):
        observation = ch.observe_attention(query, key, key, want=ch.Want(top_k=8), mask=mask, backend=backend)
        twos = [1, 3, 6, 8, 11, 13, 16, 18] if mask is None else [3 + 5 * turn for turn in range(8)]
        assert observation.top_indices.tolist() == [[[twos, twos]]]


@each_backend
def test_keys_of_weight_zero_come_last_in_order(backend: str) -> None:
    if "top_k" not in given_by(backend):
        pytest.skip(f"{backend}: no top_k")
    query = torch.ones(1, 1, 1, 1)
    key = torch.full((1, 1, 1200, 1), -1e4)
    key[0, 0, [3, 900]] = torch.tensor([[1.0], [2.0]])
    want = ch.Want(top_k=5)
    observation = ch.observe_attention(query, key, key, want=want, backend=backend)
    assert observation.top_indices.tolist() == [[[[900, 3, 0, 1, 2]]]], "underflowed"
    late = ch.Dense(torch.arange(1200)[None] >= 1198)
    observation = ch.observe_attention(query, key * 0, key, want=want, mask=late, backend=backend)
    assert observation.top_indices.tolist() == [[[[1198, 1199, 0, 1, 2]]]], "forbidden"
    nothing = ch.Dense(torch.zeros(1, 1, dtype=torch.bool))
    observation = ch.observe_attention(query, key, key, want=want, mask=nothing, backend=backend)
    assert observation.top_indices.tolist() == [[[[0, 1, 2, 3, 4]]]], "an empty row"
    assert bool((observation.top_weights == 0).all())


@pytest.mark.parametrize("lengths", [[1] * 9, [300, 1, 2, 290, 7, 40, 40], [513], [0, 5, 0, 6]], ids=str)
@each_backend
def test_statistics_of_packed_documents(backend: str, lengths: list[int]) -> None:
    documents = ch.Documents(lengths=lengths)
    for mask in (documents, ch.Window(3, 1) & documents, ch.Causal() & documents):
        _check(backend, _packed(lengths), {"mask": mask}, heatmap=33, top_k=9, rows=range(0, sum(lengths), 3))


@pytest.mark.parametrize("rules", [(), (ch.Sink(0.5),)], ids=["plain", "sink"])
@each_backend
def test_statistics_of_packed_documents_with_padding(backend: str, rules: tuple[ch.ScoreRule, ...]) -> None:
    ids = torch.tensor([-1, 0, 0, 0, -1, 1, 1, -1, -1, 2])
    _check(backend, _packed([10]), {"mask": ch.Documents(ids=ids), "scores": rules}, heatmap=4, rows=range(10))


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 5), (5, 0), (0, 0)])
@each_backend
def test_statistics_of_empty_lengths(backend: str, q_len: int, k_len: int) -> None:
    inputs = tensors(q_len=q_len, k_len=k_len)
    for rules in ((), (ch.Sink(SINKS),)):
        _check(backend, inputs, {"scores": rules})


@pytest.mark.parametrize("size", [30.0, 1e3])
@each_backend
def test_statistics_of_huge_scores(backend: str, size: float) -> None:
    _check(backend, tensors(size=size), {"mask": ch.Causal()})


@pytest.mark.parametrize("backend", ["reference", *GIVING])
def test_statistics_of_empty_rows(backend: str) -> None:
    inputs = tensors(q_len=140, k_len=140)
    mask = ch.Dense(torch.arange(140)[:, None] > 130) & ch.Padding([0, 140])
    want = everything(inputs, only=given_by(backend))
    observation = ch.observe_attention(*inputs, want=want, mask=mask, backend=backend)
    empty = torch.ones(2, 4, 140, dtype=torch.bool)
    empty[1, :, 131:] = False
    for name in ("entropy", "distance", "sink", "top_weights"):
        if getattr(observation, name) is not None:
            assert bool((getattr(observation, name)[empty] == 0).all()), name
    for name in ("lse", "max_score"):
        if getattr(observation, name) is not None:
            assert bool((getattr(observation, name)[empty] == -torch.inf).all()), name
    for name in ("received", "row_weights", "rows", "heatmap_mean", "heatmap_max"):
        if getattr(observation, name) is not None:
            assert bool((getattr(observation, name)[0] == 0).all()), name
    if "rows" in want.names and "heatmap" in want.names:
        corner = ch.observe_attention(*inputs, want=ch.Want(heatmap=140), mask=mask, backend=backend)
        # Nine rows of weight 1 over all places, the empty rows' too.
        torch.testing.assert_close(corner.heatmap_mean[1], torch.full((4, 1, 1), 9 / 140**2))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rules", [(), (ch.SoftCap(2.0), ch.Alibi(HEADS))], ids=["plain", "rules"])
@each_backend
def test_masked_nan_changes_no_statistic(backend: str, rules: tuple[ch.ScoreRule, ...], poison: float) -> None:
    query, key, value = (tensor.detach() for tensor in tensors())
    dirty = [tensor.clone() for tensor in (key, value)]
    for tensor in dirty:
        tensor[:, :, 9:] = poison
    want = everything((query, key), only=given_by(backend))
    options = {"mask": ch.Padding([9, 9]) & ch.Causal(), "scores": rules, "backend": backend}
    clean = ch.observe_attention(query, key, value, want=want, **options)
    observation = ch.observe_attention(query, *dirty, want=want, **options)
    for field in fields(ch.Observation):
        if getattr(clean, field.name) is not None:
            torch.testing.assert_close(getattr(observation, field.name), getattr(clean, field.name), msg=field.name)


@pytest.mark.parametrize("where", ["query", "key"])
@each_backend
def test_nan_row_affects_only_keys_it_may_attend_to(backend: str, where: str) -> None:
    query, key, value = (tensor.detach() for tensor in tensors())
    (query if where == "query" else key)[1, 0, 6] = torch.nan
    for options in ({"mask": ch.Causal()}, {"mask": ch.Window(1), "scores": ch.Sink(SINKS)}):
        _check(backend, (query, key, value), options)
    if "received" in given_by(backend):
        observation = ch.observe_attention(
            query, key, value, want=ch.Want(received=True), mask=ch.Window(1), backend=backend
        )
        touched = [5, 6] if where == "query" else [5, 6, 7]
        assert observation.received[1, 0].isnan().nonzero()[:, 0].tolist() == touched


@each_backend
def test_statistics_are_from_before_dropout(backend: str) -> None:
    inputs = tensors()
    _check(backend, inputs, {"mask": ch.Causal(), "dropout": 0.4, "seed": 3})


@each_backend
def test_statistics_are_independent_of_each_other(backend: str) -> None:
    inputs = tensors(q_len=140, k_len=140)
    want = everything(inputs, only=given_by(backend))
    whole = ch.observe_attention(*inputs, want=want, mask=ch.Causal(), backend=backend)
    second = ch.observe_attention(*inputs, want=want, mask=ch.Causal(), backend=backend)
    for name in sorted(want.names):
        alone = everything(inputs, only=[name])
        observation = ch.observe_attention(*inputs, want=alone, mask=ch.Causal(), backend=backend)
        for field in fields(ch.Observation):
            one, other, third = (getattr(each, field.name) for each in (observation, whole, second))
            assert one is None or (torch.equal(one, other) and torch.equal(one, third)), f"{name}: {field.name}"


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("mask", FEW)
@each_backend
def test_each_statistic_has_its_gradient(backend: str, mask: str, name: str) -> None:
    check_gradients(backend, tensors(), [name], mask=MASKS[mask].mask)


@pytest.mark.parametrize("rule", RULES, ids=RULES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@each_backend
def test_gradients_under_masks_and_rules(backend: str, mask: NamedMask, rule: str) -> None:
    check_gradients(backend, tensors(), DIFFERENTIABLE, rules=lambda _: RULES[rule].rules, mask=mask.mask)


LEARNED = {
    "biases and a sink": (
        (TABLE, BIAS, SINKS),
        lambda learned: (ch.RelativeBias(learned[0]), ch.DenseBias(learned[1]), ch.SoftCap(3.0), ch.Sink(learned[2])),
    ),
    "slopes": ((torch.full((HEADS,), 0.1),), lambda learned: (ch.Alibi(slopes=learned[0]),)),
}


@pytest.mark.parametrize("rules", LEARNED)
@pytest.mark.parametrize("names", [DIFFERENTIABLE, *((name,) for name in DIFFERENTIABLE)], ids=repr)
@pytest.mark.parametrize("mask", ["none", "causal", "padding to nothing", "document ids"])
@each_backend
def test_gradients_of_rules(backend: str, mask: str, names: tuple[str, ...], rules: str) -> None:
    learned, made = LEARNED[rules]
    check_gradients(backend, tensors(), names, learned=learned, rules=made, mask=MASKS[mask].mask)


@pytest.mark.parametrize("sizes", [SIZES[0], *SIZES[3:9], SIZES[11]], ids=str)
@each_backend
def test_gradients_of_sizes(backend: str, sizes: dict[str, int]) -> None:
    inputs = tensors(**sizes)
    offset = inputs[1].shape[2] - inputs[0].shape[2]
    for mask in (None, ch.Causal() & ch.Window(20)):
        check_gradients(backend, inputs, DIFFERENTIABLE, mask=mask, query_offset=offset)


@pytest.mark.parametrize("lengths", [[1] * 9, [300, 1, 2, 290, 7, 40, 40], [0, 5, 0, 6]], ids=str)
@each_backend
def test_gradients_of_packed_documents(backend: str, lengths: list[int]) -> None:
    mask = ch.Documents(lengths=lengths) & ch.Causal()
    check_gradients(
        backend,
        _packed(lengths),
        DIFFERENTIABLE,
        mask=mask,
        learned=[SINKS],
        rules=lambda learned: (ch.Sink(learned[0]),),
    )


@each_backend
def test_gradients_of_tokens_outside_every_document(backend: str) -> None:
    mask = ch.Documents(ids=IDS[1])
    check_gradients(
        backend,
        _packed([LEN]),
        DIFFERENTIABLE,
        mask=mask,
        learned=[SINKS],
        rules=lambda learned: (ch.Sink(learned[0]),),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@each_backend
def test_gradients_of_dtypes(backend: str, dtype: torch.dtype) -> None:
    check_gradients(backend, tensors(dtype=dtype), DIFFERENTIABLE, mask=ch.Causal())


@each_backend
def test_gradients_with_dropout(backend: str) -> None:
    check_gradients(backend, tensors(), DIFFERENTIABLE, mask=ch.Causal(), dropout=0.3, seed=5)


@each_backend
def test_gradients_of_no_queries_or_no_keys(backend: str) -> None:
    for q_len, k_len in ((0, 5), (5, 0)):
        check_gradients(backend, tensors(q_len=q_len, k_len=k_len), DIFFERENTIABLE)


@each_backend
def test_a_loss_of_statistics_alone(backend: str) -> None:
    """The output takes no part; values have no gradient then."""
    query, key, value = tensors(dtype=torch.float64 if backend == "tiled" else torch.float32)
    for name in DIFFERENTIABLE:
        if name not in given_by(backend):
            continue
        want = everything((query, key), only=[name])
        losses = [
            (getattr(ch.observe_attention(query, key, value, want=want, backend=each), name) ** 2).sum()
            for each in (backend, "reference")
        ]
        actual, right = (torch.autograd.grad(loss, (query, key, value), allow_unused=True) for loss in losses)
        for one, other in zip(actual[:2], right[:2], strict=True):
            torch.testing.assert_close(one, other, msg=name)
        assert actual[2] is None or bool((actual[2] == 0).all())


@pytest.mark.parametrize("names", [(name,) for name in ALSO_DIFFERENTIABLE] + [DIFFERENTIABLE + ALSO_DIFFERENTIABLE])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_tiles_differentiate_the_other_sums_too(packed: bool, names: tuple[str, ...]) -> None:
    inputs = _packed([150, 9, 8]) if packed else tensors()
    mask = ch.Documents(lengths=[150, 9, 8]) if packed else ch.Causal()
    check_gradients("tiled", inputs, names, mask=mask)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("batch", [1, 2])
def test_tiles_are_the_formula_in_float64(batch: int, mask: NamedMask, rule: NamedRule) -> None:
    """To the last few digits, gradients of rules and of ``row_weights`` with the rest; with one batch, packed."""
    inputs = tensors(dtype=torch.float64, batch=batch)
    if mask.mask is not None and carried_sizes(mask.mask)[0] > batch:
        pytest.skip("the mask is for two batches")
    learned = [tensor.detach().clone().requires_grad_() for each in rule.rules for tensor in each.tensors()]
    mixing = torch.rand(1, HEADS, 2, LEN, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    want = replace(everything(inputs), row_weights=mixing.requires_grad_())
    results = []
    for backend in ("tiled", "reference"):
        parameters = iter(learned)
        rules = [each.mapped(lambda _, parameters=parameters: next(parameters)) for each in rule.rules]
        observation = ch.observe_attention(*inputs, want=want, mask=mask.mask, scores=rules, backend=backend)
        grads = torch.autograd.grad(loss_of(observation, want), (*inputs, mixing, *learned), allow_unused=True)
        results.append([*(getattr(observation, field.name) for field in fields(ch.Observation)), *grads])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, HEADS)], ids=str)
def test_row_weights_get_gradients(shape: tuple[int, int]) -> None:
    """What multiplies the weights from the left has its gradient, broadcast axes summed."""
    inputs = tensors(dtype=torch.float64, q_len=140, k_len=140)
    rows = torch.randn(*shape, 3, 140, dtype=torch.float64, requires_grad=True)
    grads = []
    for backend in ("tiled", "reference"):
        observation = ch.observe_attention(*inputs, want=ch.Want(row_weights=rows), mask=ch.Causal(), backend=backend)
        grads.append(
            torch.autograd.grad(observation.row_weights.square().sum() + observation.output.sum(), (*inputs, rows))
        )
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_ties_share_the_gradient_of_the_largest(backend: str) -> None:
    query = torch.ones(1, 1, requires_grad=True)
    key = torch.tensor([[2.0], [1.0], [2.0]], requires_grad=True)
    observation = ch.observe_attention(query, key, key.detach(), want=ch.Want(max_score=True), backend=backend)
    (grad,) = torch.autograd.grad(observation.max_score.sum(), key)
    assert grad[:, 0].tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_nan_rows_do_not_affect_other_gradients(backend: str) -> None:
    query, key, value = tensors()
    with torch.no_grad():
        query[0, 0, 4] = torch.nan
    want = ch.Want(received=True, entropy=True)
    observation = ch.observe_attention(query, key, value, want=want, mask=ch.Window(1), backend=backend)
    loss = observation.output.sum() + observation.entropy.sum() + observation.received.square().sum()
    dquery, dkey, _ = torch.autograd.grad(loss, (query, key, value))
    # Rows 3 to 5 attend to a key whose received sum is NaN; they and another head of the group reach keys 2 to 5.
    spoiled = dquery[0, 0].isnan().any(dim=-1).nonzero()[:, 0].tolist()
    assert set(spoiled) | {4} == {3, 4, 5}, "a query that is NaN itself has no gradient to speak of"
    assert dkey[0, 0].isnan().any(dim=-1).nonzero()[:, 0].tolist() == [2, 3, 4, 5]
    assert torch.isfinite(dkey[0, 1]).all()
    assert torch.isfinite(dquery[1]).all()
    assert torch.isfinite(dkey[1]).all()


def _corrupt(observation: ch.Observation, name: str) -> ch.Observation:
    value = getattr(observation, name)
    wrong = value.roll(1, dims=-1) if name == "top_indices" else value + 1e-3 * (1 + value.abs())
    return replace(observation, **{name: wrong})


@pytest.mark.parametrize("name", [field.name for field in fields(ch.Observation)[1:]])
def test_the_comparison_can_fail(name: str) -> None:
    inputs = tuple(tensor.detach() for tensor in tensors())
    want = everything(inputs)
    exact_inputs = tuple(tensor.double() for tensor in inputs)
    exact = ch.observe_attention(*exact_inputs, want=want, backend="reference")
    observation = ch.observe_attention(*inputs, want=want, backend="reference")
    scale = scale_of(exact_inputs, {})
    compare_observations("same", observation, observation, exact, scale)
    with pytest.raises(AssertionError, match=f"off {name[:4]}"):
        compare_observations("off", _corrupt(observation, name), observation, exact, scale)
    with pytest.raises(AssertionError, match="missing"):
        compare_observations("off", replace(observation, **{name: None}), observation, exact, scale)
    nothing = torch.full_like(getattr(observation, name), -1 if name == "top_indices" else torch.nan)
    with pytest.raises(AssertionError, match=r"NaN elsewhere|out of range"):
        compare_observations("off", replace(observation, **{name: nothing}), observation, exact, scale)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_comparison_of_gradients_can_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ch.observe_attention

    def detached(*inputs: Any, backend: str, **options: Any) -> ch.Observation:
        observation = plain(*inputs, backend=backend, **options)
        return (
            observation
            if backend == "reference"
            else replace(observation, **{name: getattr(observation, name).detach()})
        )

    monkeypatch.setattr(ch, "observe_attention", detached)
    with pytest.raises(AssertionError, match="gradient of query"):
        check_gradients("tiled", tensors(), [name])
