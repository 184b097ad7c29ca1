"""Measures derived from points, each against the full weight matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import Encoder, LanguageModel, MultiHeadAttention, SequenceClassifier
from clearhead.observe import (
    Trace,
    contributions,
    head_effects,
    head_scores,
    received_contributions,
    repeated_tokens,
    rollout,
    value_norms,
)


def encoder(**options: Any) -> Encoder:
    torch.manual_seed(0)
    return Encoder(16, 4, 3, **options).eval()


def traced(model: nn.Module, *inputs: Tensor, **options: Any) -> Trace:
    with torch.no_grad(), ch.trace(model) as trace:
        model(*inputs, **options)
    return trace


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 70, 16, generator=torch.Generator().manual_seed(1))


def explicit_rollout(trace: Trace, residual: float = 0.5) -> Tensor:
    """The product of the weight matrices, as in the paper."""
    size = trace[0].problem.q_len
    total = torch.eye(size)
    for points in trace.values():
        total = (residual * torch.eye(size) + (1.0 - residual) * points.weights.mean(dim=1)) @ total
    return total


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"scores": (ch.Alibi(4), ch.SoftCap(3.0))}], ids=str)
@pytest.mark.parametrize("residual", [0.5, 0.0, 0.9])
def test_rollout_is_the_product_of_the_weight_matrices(x: Tensor, options: dict[str, Any], residual: float) -> None:
    trace = traced(encoder(**options), x, mask=ch.Causal())
    wanted = explicit_rollout(trace, residual)
    torch.testing.assert_close(rollout(trace, range(70), residual=residual), wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(rollout(trace, 33, residual=residual), wanted[:, 33:34], rtol=1e-4, atol=1e-6)
    mean = wanted.mean(dim=1, keepdim=True)
    torch.testing.assert_close(rollout(trace, residual=residual), mean, rtol=1e-4, atol=1e-6)


def test_rollout_of_a_packed_batch_is_that_of_each_sequence(x: Tensor) -> None:
    model = encoder()
    packed = rollout(traced(model, x[:, :9], lengths=[9, 5]), [0, 4, 7])
    mean = rollout(traced(model, x[:, :9], lengths=[9, 5]))
    for place, length in enumerate((9, 5)):
        alone = traced(model, x[place : place + 1, :length])
        for row, token in enumerate((0, 4, 7)):
            wanted = rollout(alone, token)[0, 0] if token < length else torch.zeros(length)
            torch.testing.assert_close(packed[place, row, :length], wanted, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(mean[place, 0, :length], rollout(alone)[0, 0], rtol=1e-4, atol=1e-6)
        assert packed[place, :, length:].abs().sum() == 0.0


def test_rollout_raises_if_layers_are_not_a_stack(x: Tensor) -> None:
    trace = traced(encoder(), x)
    for arguments, words in (
        ((trace, 70), "rollout: tokens must lie from 0 to 69; got 70"),
        ((trace, [0, -1]), "got -1"),
        (({},), "traced must have layers"),
    ):
        with pytest.raises(ch.ClearheadError) as caught:
            rollout(*arguments)
        assert words in str(caught.value)
    with pytest.raises(ch.ShapeError, match="residual must lie from 0 to 1"):
        rollout(trace, residual=1.5)
    model = LanguageModel(20, 16, 4, 2).eval()
    with ch.trace(model) as steps:
        model.generate(torch.tensor([[1, 2]]), 2)
    with pytest.raises(ch.ShapeError, match="must be self-attention over the sequences of the others"):
        rollout(steps)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}], ids=str)
def test_contributions_are_the_norms_of_the_added_vectors(x: Tensor, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = MultiHeadAttention(16, 4, **options)
    points = traced(module, x[:, :9], mask=ch.Causal())[0]
    value = points.value.repeat_interleave(4 // module.num_kv_heads, dim=1)
    assert module.output_projection is not None
    by_head = module.output_projection.weight.view(16, 4, 4)
    # What key j adds to query i's output in head h, in full.
    added = torch.einsum("bhij,bhjd,ehd->bhije", points.weights, value, by_head)
    wanted = added.norm(dim=-1).detach()
    actual = contributions(points, module, [0, 8, 3])
    torch.testing.assert_close(actual, wanted[:, :, [0, 8, 3]], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(received_contributions(points, module), wanted.sum(dim=2), rtol=1e-4, atol=1e-5)
    norms = torch.einsum("bhjd,ehd->bhje", value, by_head).norm(dim=-1).detach()
    for projection in (module, module.output_projection, module.output_projection.weight):
        torch.testing.assert_close(value_norms(points, projection), norms, rtol=1e-4, atol=1e-6)
    assert contributions(points, module, []).shape == (2, 4, 0, 9)


def test_contributions_of_padding_are_zero(x: Tensor) -> None:
    """Packed or padded, a sequence has what it has alone."""
    for options in ({}, {"scores": ch.DenseBias(torch.randn(1, 9, 9))}):
        model = encoder(**options)
        points = traced(model, x[:, :9], lengths=[5, 9])[1]
        alone = traced(model, x[:1, :5], lengths=[5])[1] if not options else None
        module = model.get_submodule("blocks.1.attention")
        received = received_contributions(points, module)
        assert received[0, :, 5:].abs().max() == 0.0
        if alone is not None:
            torch.testing.assert_close(received[:1, :, :5], received_contributions(alone, module), rtol=1e-4, atol=1e-5)


def test_wrong_projection_raises(x: Tensor) -> None:
    points = traced(MultiHeadAttention(16, 4), x)[0]
    for projection, words in (
        (
            nn.LayerNorm(16),
            "projection must be the projection that mixes heads, or a module that has it; got LayerNorm",
        ),
        (nn.Linear(8, 16), "projection must have weight [embed_dim, 16]; got (16, 8)"),
    ):
        with pytest.raises(ch.ClearheadError) as caught:
            value_norms(points, projection)
        assert words in str(caught.value)
    with pytest.raises(ch.ShapeError, match="queries must lie from 0 to 69; got 70"):
        contributions(points, torch.zeros(16, 16), 70)


@pytest.mark.parametrize("mask", [None, ch.Causal(), ch.Window(2, 2)], ids=repr)
@pytest.mark.parametrize("scores", [(), (ch.Alibi(4), ch.Sink(0.3)), ch.DenseBias(torch.randn(4, 12, 12))], ids=repr)
def test_head_scores_are_means_over_diagonals(x: Tensor, mask: ch.Mask | None, scores: Any) -> None:
    torch.manual_seed(0)
    module = MultiHeadAttention(16, 4, num_kv_heads=2, scores=scores)
    points = traced(module, x[:, :12], mask=mask)[0]
    weights, scored = points.weights, head_scores(points, period=5)
    torch.testing.assert_close(scored.previous, weights.diagonal(-1, -2, -1).mean(-1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(scored.following, weights.diagonal(1, -2, -1).mean(-1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(scored.first, weights[..., 1:, 0].mean(-1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(scored.same, weights.diagonal(0, -2, -1)[..., 1:].mean(-1), rtol=1e-4, atol=1e-6)
    prefix = torch.zeros(12, 12)
    for query in range(5, 12):
        for key in range(query):
            prefix[query, key] = (query - (key - 1)) % 5 == 0 and key - 1 >= 0
    assert scored.induction is not None
    # An induction key follows an earlier occurrence of the query's token.
    torch.testing.assert_close(scored.induction, (weights * prefix).sum((-2, -1)) / 7, rtol=1e-4, atol=1e-6)


def test_head_scores_of_padded_and_packed_sequences_are_those_alone(x: Tensor) -> None:
    for options in ({}, {"scores": ch.DenseBias(torch.zeros(1, 1, 12))}):
        model = encoder(**options)
        scored = head_scores(traced(model, x[:, :12], lengths=[7, 12])[0])
        plain = encoder()
        plain.load_state_dict({name: value for name, value in model.state_dict().items() if "scores" not in name})
        alone = head_scores(traced(plain, x[:1, :7])[0])
        for name in ("previous", "following", "first", "same"):
            torch.testing.assert_close(getattr(scored, name)[:1], getattr(alone, name), rtol=1e-4, atol=1e-6, msg=name)


def test_head_scores_distinguish_induction_and_previous_token_heads() -> None:
    """Keys encode the preceding token (head 0) or their position (head 1), and queries match it."""
    period, repeats, sharp = 6, 3, 40.0
    ids = repeated_tokens(6, period=period, repeats=repeats, seed=0)[0]
    length = len(ids)
    tokens = nn.functional.one_hot(ids, period).float()
    before = torch.cat([torch.zeros(1, period), tokens[:-1]])
    places = torch.eye(length)
    query = torch.zeros(2, length, length)
    key = torch.zeros(2, length, length)
    query[0, :, :period], key[0, :, :period] = sharp * tokens, before
    query[1, 1:], key[1] = sharp * places[:-1], places
    with ch.trace(_Given()) as trace:
        given = _Given.last
        given(query[None], key[None])
    scores = head_scores(trace[0], period=period)
    assert scores.induction is not None
    assert scores.induction[0, 0] > 0.99
    assert scores.previous[0, 0] < 0.1  # in the first period nothing matches
    assert scores.previous[0, 1] > 0.99
    assert scores.induction[0, 1] < 0.01
    assert "induction=[[1.0, 0.0]]" in repr(scores)


class _Given(MultiHeadAttention):
    """Attends from and to what it is given."""

    last: _Given

    def __init__(self) -> None:
        super().__init__(4, 2)
        _Given.last = self

    def forward(self, query: Tensor, key: Tensor) -> Tensor:  # type: ignore[override]
        from clearhead.watch import attend

        return attend(self, query, key, key, scale=1.0, mask=ch.Causal())


def test_repeated_tokens_repeat_and_differ() -> None:
    ids = repeated_tokens(100, period=25, repeats=4, batch=2, seed=3)
    assert ids.shape == (2, 100)
    assert torch.equal(ids[:, :25], ids[:, 75:])
    assert [len(set(row[:25].tolist())) for row in ids] == [25, 25]
    assert torch.equal(ids, repeated_tokens(100, period=25, repeats=4, batch=2, seed=3))
    assert repeated_tokens(3, period=5, repeats=2).shape == (1, 10)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda points: head_scores(points, period=0), "period must be a whole number of at least 1; got 0"),
        (lambda points: head_scores(points, period=70), "period must be below the length 70; got 70"),
        (lambda points: repeated_tokens(0), "vocab_size must be a whole number of at least 1; got 0"),
        (lambda points: repeated_tokens(9, repeats=1), "repeats must be a whole number of at least 2; got 1"),
    ],
)
def test_bad_numbers_raise_one_line(x: Tensor, call: Any, words: str) -> None:
    with pytest.raises(ch.ShapeError) as caught:
        call(traced(MultiHeadAttention(16, 4), x)[0])
    assert words in str(caught.value)


def test_head_scores_need_a_whole_sequence(x: Tensor) -> None:
    points = traced(MultiHeadAttention(16, 4), x[:, :3], x)[0]
    with pytest.raises(ch.ShapeError, match="must be of self-attention over a whole sequence; got q_len 3, k_len 70"):
        head_scores(points)


def test_head_effects_are_those_of_a_head_whose_output_columns_are_zero() -> None:
    torch.manual_seed(0)
    model = SequenceClassifier(30, 16, 4, 2, 3).train()
    ids, labels = torch.randint(0, 30, (4, 7)), torch.tensor([0, 1, 2, 0])

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels)

    losses = head_effects(model, ids, measure=loss, lengths=[7, 7, 4, 2])
    moved = head_effects(model, ids, layers=1, lengths=[7, 7, 4, 2])
    assert model.training
    assert list(moved) == ["encoder.blocks.1.attention"]
    model.eval()
    with torch.no_grad():
        whole = model(ids, lengths=[7, 7, 4, 2])
        for name, effects in losses.items():
            module: Any = model.get_submodule(name)
            for head, effect in enumerate(effects.tolist()):
                weight = module.output_projection.weight
                before = weight.clone()
                weight[:, 4 * head : 4 * head + 4] = 0.0
                without = model(ids, lengths=[7, 7, 4, 2])
                weight.copy_(before)
                assert effect == pytest.approx(float(loss(without) - loss(whole)), abs=1e-5)
                if name in moved:
                    distance = float((without - whole).norm() / whole.norm())
                    assert float(moved[name][head]) == pytest.approx(distance, rel=1e-3)
    assert max(abs(effects).max() for effects in losses.values()) > 1e-4
    assert not any(part._forward_hooks for part in model.modules())


def test_head_effects_need_a_tensor_to_compare() -> None:
    class Odd(MultiHeadAttention):
        def forward(self, x: Tensor) -> str:  # type: ignore[override]
            super().forward(x)
            return "done"

    with pytest.raises(ch.UnsupportedError, match="model must return a tensor; got str"):
        head_effects(Odd(4, 2), torch.zeros(1, 2, 4))
