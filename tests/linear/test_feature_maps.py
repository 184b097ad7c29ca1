"""Feature maps: their values and slopes, and that Performer's estimate is unbiased."""

from __future__ import annotations

import math

import pytest
import torch

import clearhead as ch
from clearhead.linear import PositiveRandomFeatures, feature_maps, linear_attention
from clearhead.linear.feature_maps import FEATURE_MAPS


@pytest.mark.parametrize("name", [name for name, feature_map in FEATURE_MAPS.items() if feature_map.slope is not None])
def test_the_slope_is_the_derivative_and_absent_has_no_features(name: str) -> None:
    feature_map = FEATURE_MAPS[name]
    x = torch.cat([torch.linspace(-30, 3, 200, dtype=torch.float64), torch.tensor([1e-9, -1e-9], dtype=torch.float64)])
    x.requires_grad_()
    features = feature_map.key(x)
    (derivative,) = torch.autograd.grad(features.sum(), x)
    assert feature_map.slope is not None
    torch.testing.assert_close(
        feature_map.slope(features.detach()) * torch.ones_like(x), derivative, rtol=1e-12, atol=0
    )
    assert feature_map.absent is not None
    empty = torch.tensor([feature_map.absent, 1.0], requires_grad=True)
    of_absent = feature_map.key(empty)
    assert float(of_absent[0].detach()) == 0.0
    assert bool(torch.autograd.grad(of_absent.sum(), empty)[0].isfinite().all())


def test_elu_is_exact_for_small_features() -> None:
    x = torch.tensor([-12.0, -0.5, 0.0, 2.0])
    torch.testing.assert_close(
        FEATURE_MAPS["elu"].key(x), torch.tensor([math.exp(-12), math.exp(-0.5), 1.0, 3.0]), rtol=1e-6, atol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("orthogonal", [True, False])
def test_performers_estimate_is_unbiased(orthogonal: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    dim, draws = 8, 1500
    query, key = 0.5 * torch.randn(2, 5, dim, generator=generator, dtype=torch.float64)
    wanted = torch.exp((query * key).sum(-1) / math.sqrt(dim))
    estimates = torch.stack(
        [
            (features.features(query) * features.features(key)).sum(-1)
            for features in (
                PositiveRandomFeatures.draw(dim, 12, orthogonal=orthogonal, seed=seed) for seed in range(draws)
            )
        ]
    )
    # Means of many independent draws are nearly normal: five standard errors are passed once in some 1.7 million.
    error = estimates.std(dim=0) / math.sqrt(draws)
    assert bool(((estimates.mean(dim=0) - wanted).abs() < 5.0 * error).all())
    # The test detects a wrong factor of 10 % (Choromanski et al. 2021: without |x|^2 / 2 it is far more).
    assert bool((5.0 * error < 0.1 * wanted).all())


def test_variance_of_one_feature_is_that_of_the_paper() -> None:
    # Choromanski et al. 2021, lemma 2: one feature's variance is SM(x, y)^2 (exp(|x + y|^2) - 1) for independent rows.
    x = torch.tensor([[0.3, -0.2, 0.4]], dtype=torch.float64)
    y = torch.tensor([[0.1, 0.5, 0.2]], dtype=torch.float64)
    features = PositiveRandomFeatures.draw(3, 200_000, orthogonal=False, scale=1.0)
    one = 200_000 * (features.features(x) * features.features(y))[0]
    expected = math.exp(2 * float((x * y).sum())) * (math.exp(float((x + y).square().sum())) - 1)
    assert float(one.var()) == pytest.approx(expected, rel=0.1)


def test_rows_are_orthogonal_in_blocks_and_as_long_as_normal_ones() -> None:
    dim = 16
    weights = PositiveRandomFeatures.draw(dim, 40).weights
    assert weights.shape == (40, dim)
    for block in weights.split(dim):
        products = block @ block.mT
        torch.testing.assert_close(products, torch.diag(products.diagonal()), rtol=0, atol=1e-12)
    many = PositiveRandomFeatures.draw(dim, 4000, seed=5).weights
    # Squared lengths are chi-square with dim degrees: mean dim, variance 2 dim.
    squares = many.square().sum(-1)
    assert abs(float(squares.mean()) - dim) < 5 * math.sqrt(2 * dim / 4000)
    assert abs(float(many.mean())) < 5 / math.sqrt(4000 * dim)
    lower = PositiveRandomFeatures.draw(dim, dim, orthogonal=False).weights
    assert float((lower @ lower.mT).triu(1).abs().max()) > 0.1


def test_equal_seeds_draw_equal_features() -> None:
    first, repeated, other = (PositiveRandomFeatures.draw(4, seed=seed).weights for seed in (0, 0, 1))
    assert torch.equal(first, repeated)
    assert not torch.equal(first, other)


def test_performer_comes_near_softmax_attention_with_many_features() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (0.5 * torch.randn(3, 1, 2, 30, 8, generator=generator, dtype=torch.float64)).unbind(0)
    exact = ch.attention(query, key, value, mask=ch.Causal())
    errors = []
    for count in (16, 1024, 16384):
        output, _ = linear_attention(
            query, key, value, causal=True, feature_map=PositiveRandomFeatures.draw(8, count, seed=2)
        )
        errors.append(float((output - exact).square().mean().sqrt()))
    # Errors fall with the square root of the number of features, here by 8 and by 4, give or take a factor.
    assert errors[0] > 3 * errors[1] > 6 * errors[2]
    assert errors[2] < 0.01


def test_underflowing_performer_keys_are_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, 20, 64, generator=generator).unbind(0)
    far = 10 * key
    for causal in (False, True):
        with pytest.raises(ch.UnsupportedError, match=r"key must have features within torch\.float32"):
            linear_attention(query, far, value, feature_map="performer", causal=causal)
        exact, _ = linear_attention(
            query.double(), far.double(), value.double(), feature_map="performer", causal=causal
        )
        assert float(exact.abs().max()) > 0.1
        # One key that does not underflow has all the weight; a state with keys continues after one that underflows.
        near = torch.cat([far[:, :, 1:], key[:, :, :1]], dim=2)
        _, state = linear_attention(query, near, value, feature_map="performer", causal=causal)
        last = [part[:, :, :1] for part in (query, far, value)]
        output, _ = linear_attention(*last, feature_map="performer", causal=causal, state=state)
        torch.testing.assert_close(output, value[:, :, -1:], rtol=1e-4, atol=1e-4)


def test_absent_keys_do_not_count_as_underflow() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, 20, 64, generator=generator).unbind(0)
    _, state = linear_attention(query, key, value, feature_map="performer", mask=ch.Padding([20, 0]))
    assert float(state.matrix[1].abs().max()) == 0.0
    none, _ = linear_attention(query, key[:, :, :0], value[:, :, :0], feature_map="performer")
    assert float(none.abs().max()) == 0.0
    packed = [part[:1] for part in (query, key, value)]
    mask = ch.Documents([12, 8]) & ch.Padding([12])
    _, state = linear_attention(*packed, feature_map="performer", mask=mask)
    assert float(state.matrix[1].abs().max()) == 0.0
    # Of two documents the second has keys out of reach alone.
    packed[1][:, :, 12:] *= 10
    linear_attention(*packed, feature_map="performer", mask=mask)
    with pytest.raises(ch.UnsupportedError, match="key must have features"):
        linear_attention(*packed, feature_map="performer", mask=ch.Documents([12, 8]))


def test_large_queries_do_not_overflow_performer() -> None:
    query = torch.full((1, 1, 4, 8), 60.0)
    key, value = torch.randn(2, 1, 1, 4, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    output, _ = linear_attention(query, key, value, causal=True, feature_map="performer")
    assert bool(output.isfinite().all())


@pytest.mark.parametrize("form", ["recurrent", "chunked", "parallel"])
def test_zero_key_has_zero_features_and_gradient(form: str) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 1, 7, 4, generator=generator) for _ in range(3))
    key[:, :, 2] = 0.0
    query[:, :, 5] = 0.0
    rate = torch.full((1, 1, 7), 0.5)
    query.requires_grad_()
    key.requires_grad_()
    output, state = ch.linear.delta_attention(query, key, value, rate=rate, form=form)
    assert not bool(output[:, :, 5].any())
    for part, place in zip(torch.autograd.grad(output.sum() + state.matrix.sum(), (query, key)), (5, 2), strict=True):
        assert not bool(part[:, :, place].any())
        assert float(part.abs().max()) < 100.0


def test_cached_performer_map_has_no_gradient() -> None:
    def spoil(x: torch.Tensor) -> None:
        feature_maps.performer_map.cache_clear()
        linear_attention(x, x, x, feature_map="performer")

    x = torch.randn(1, 1, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = linear_attention(x, x, x, feature_map="performer")[0]
    with torch.inference_mode():
        spoil(x)
    leaf = x.clone().requires_grad_()
    output = linear_attention(leaf, leaf, leaf, feature_map="performer")[0]
    assert bool(torch.autograd.grad(output.sum(), leaf)[0].isfinite().all())
    with torch.device("meta"):
        spoil(x)
    assert torch.equal(linear_attention(x, x, x, feature_map="performer")[0], expected)
    feature_maps.performer_map.cache_clear()
    mapped = torch.vmap(lambda one: linear_attention(one, one, one, feature_map="performer")[0])(x)
    torch.testing.assert_close(mapped, expected)
    assert torch.equal(linear_attention(x, x, x, feature_map="performer")[0], expected)


def test_module_made_on_meta_has_features_on_meta() -> None:
    with torch.device("meta"):
        module = ch.nn.LinearAttention(12, 2, feature_map="performer")
    assert module.random_features.device.type == "meta"
    x = torch.randn(1, 2, 5, 6, generator=torch.Generator().manual_seed(1))
    assert linear_attention(x, x, x, feature_map="performer")[0].device.type == "cpu"
