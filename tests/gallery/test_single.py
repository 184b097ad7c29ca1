"""What single variants promise besides: caches, options, sizes, and rows of zeros."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import clearhead as ch
from tests.gallery import formulas
from tests.gallery.cases import EMBED, EXACT, HEADS, LENGTH, build, compare, steps, tokens


@pytest.mark.parametrize("name", ["query_key_norm", "cosine_attention"])
def test_norms_in_float32_as_autocast_makes_them_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.normalize
    monkeypatch.setattr(F, "normalize", lambda x, **options: plain(x.float(), **options))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert build(name)(tokens(torch.float32)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["query_key_norm", "cosine_attention"])
def test_rows_of_zeros_have_numbers_and_bounded_gradients(name: str) -> None:
    module, x = build(name), tokens(torch.float32)
    for parameter_name, parameter in module.named_parameters():
        if parameter_name.endswith("bias"):
            nn.init.zeros_(parameter)
    x[:, 0] = 0.0
    module(x).square().sum().backward()
    assert all(parameter.grad.abs().max() < 1e6 for parameter in module.parameters())
    assert module.half()(x.half()).isfinite().all()


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("differential_attention", (10, 2), {}),
        ("latent_attention", (15, 2), {}),
        ("latent_attention", (16, 2), {"rotary_dim": 7}),
        ("t5_attention", (16, 2), {"farthest": 8}),
        ("t5_attention", (16, 2), {"num_buckets": 2}),
        ("talking_heads", (15, 2), {}),
    ],
)
def test_sizes_that_do_not_fit_are_told(name: str, sizes: tuple[int, int], options: dict[str, int]) -> None:
    with pytest.raises(ch.ShapeError, match=r"must .*; got"):
        build(name, *sizes, **options)


@pytest.mark.parametrize("name", ["latent_attention", "learned_sinks"])
def test_decoding_with_the_cache_is_the_whole(name: str) -> None:
    module, x = build(name).double(), tokens()
    whole = module(x, mask=ch.Causal())
    cache = ch.KVCache()
    with torch.no_grad():
        pieces = [
            module(x[:, part], mask=ch.Causal(), cache=cache) for part in (slice(0, 4), slice(4, 5), slice(5, 11))
        ]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole.detach(), atol=EXACT, rtol=EXACT)
    if name == "latent_attention":
        assert cache.key is not None
        assert cache.value is not None
        assert cache.key.shape[1] * cache.key.shape[3] + cache.value.shape[1] * cache.value.shape[3] == 16 + 8


@pytest.mark.parametrize("depth", [1, 2, 12])
def test_differential_attention_begins_as_deep_as_it_lies(depth: int) -> None:
    module = build("differential_attention", depth=depth).double()
    assert module.lambda_init == pytest.approx(0.8 - 0.6 * math.exp(-0.3 * (depth - 1)), abs=1e-15)
    allowed = torch.ones(1, 1, LENGTH, LENGTH)
    compare(module, module, lambda x: formulas.differential_attention(module, x, allowed), tokens())


def test_no_temperature_is_below_its_limit() -> None:
    module = build("cosine_attention").double()
    with torch.no_grad():
        module.log_scale.copy_(torch.tensor([6.0, 1.0]).view(2, 1, 1))
    allowed = torch.ones(1, 1, LENGTH, LENGTH)
    compare(module, module, lambda x: formulas.cosine_attention(module, x, allowed), tokens())


def test_sinks_take_a_window() -> None:
    module = build("learned_sinks", window=3).double()
    near = torch.ones(LENGTH, LENGTH).triu(-2)[None, None]
    compare(module, module, lambda x: formulas.learned_sinks(module, x, near), tokens())


def test_sinks_decode_in_a_window_on_grouped_heads() -> None:
    module, x, cache = build("learned_sinks", num_kv_heads=1, window=3).double(), tokens(), ch.KVCache()
    with torch.no_grad():
        pieces = [module(x[:, place : place + 1], cache=cache) for place in range(LENGTH)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), module(x), atol=EXACT, rtol=EXACT)


def test_cosine_attention_takes_a_bias() -> None:
    module = build("cosine_attention", scores=[ch.RelativeBias(nn.Parameter(torch.randn(HEADS, 2 * LENGTH - 1)))])
    module, x = module.double(), tokens()
    (table,) = (parameter for name, parameter in module.named_parameters() if "table" in name)
    query, key, value = formulas.projected(module.heads, x)
    place = torch.arange(LENGTH)
    scores = (
        formulas.unit(query) @ formulas.unit(key).mT * module.log_scale.exp()
        + table[:, place[:, None] - place + LENGTH - 1]
    )
    expected = module.heads.output_projection(formulas.side_by_side(torch.softmax(scores, dim=-1) @ value))
    torch.testing.assert_close(module(x), expected, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("length", [3, 300])
@pytest.mark.parametrize("decoder", [False, True])
def test_t5_has_its_buckets_at_any_distance(length: int, decoder: bool) -> None:
    from gallery.t5_attention import buckets

    distance = torch.arange(-length, length + 1)
    expected = [formulas.t5_bucket(one, decoder=decoder) for one in distance.tolist()]
    assert buckets(distance, 32, 128, causal=decoder).tolist() == expected


def test_t5_has_its_decoder_with_all_buckets_behind() -> None:
    module, length = build("t5_attention", causal=True).double(), 40
    allowed = torch.ones(1, 1, length, length).tril()
    x = tokens(torch.float64, 1, length, EMBED)
    compare(module, module, lambda x: formulas.t5_attention(module, x, allowed, decoder=True), x)
    assert torch.equal(module(x, mask=ch.Causal()), module(x))


# Sides that windows divide and not, that are smaller than a window, and just one.
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("shape", [(8, 12), (5, 7), (3, 9), (4, 4), (1, 6)])
def test_swin_is_its_formula(shifted: bool, shape: tuple[int, int]) -> None:
    module = build("swin_windows", side=4, shifted=shifted).double()
    compare(module, module, lambda image: formulas.swin_windows(module, image), tokens(torch.float64, 2, *shape, EMBED))


def test_swin_takes_windows_of_an_odd_side() -> None:
    module = build("swin_windows", side=5, shifted=True).double()
    image = tokens(torch.float64, 1, 7, 11, EMBED)
    torch.testing.assert_close(module(image), formulas.swin_windows(module, image), atol=EXACT, rtol=EXACT)


def test_swin_masks_where_there_are_no_numbers() -> None:
    module = build("swin_windows", side=4, shifted=True).to("meta")
    assert module(torch.zeros(1, 7, 9, EMBED, device="meta")).is_meta


def test_swin_sees_no_opposite_edge_and_trains() -> None:
    module, image = build("swin_windows", side=4, shifted=True), tokens(torch.float32, 2, 8, 8, EMBED)
    before = module(image)
    other = image.clone()
    other[:, :2] += 1.0
    changed = (module(other) - before).abs().amax(dim=(0, 2, 3)) > 0
    assert changed.tolist() == [True] * 2 + [False] * 6
    first, last = steps(module, image, image.mean(dim=(1, 2), keepdim=True).expand_as(image) + 0.5 * image)
    assert last < 0.6 * first


def test_the_resampler_is_its_formula() -> None:
    module = build("perceiver_resampler", num_latents=5, input_dim=6).double()
    x, lengths = tokens(torch.float64, 2, LENGTH, 6), torch.tensor([LENGTH, 4])
    real = torch.arange(LENGTH) < lengths[:, None]
    output = module(x, mask=ch.Padding(lengths))
    assert output.shape == (2, 5, EMBED)
    mask = ch.Padding(lengths)
    compare(module, lambda x: module(x, mask=mask), lambda x: formulas.perceiver_resampler(module, x, real), x)
    assert torch.equal(output, module(x.masked_fill(~real[..., None], 7.0), mask=ch.Padding(lengths)))
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(module(x[:, order]), module(x), atol=EXACT, rtol=EXACT)


def test_the_resampler_trains() -> None:
    x = tokens(torch.float32, 8, LENGTH, EMBED)
    target = x.mean(dim=1, keepdim=True).expand(-1, 8, -1)
    before, last = steps(build("perceiver_resampler"), x, target, mask=ch.Padding(torch.full((8,), LENGTH)))
    assert last < 0.6 * before
