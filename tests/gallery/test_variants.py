"""What the variants promise beyond their formula at one size: options, other lengths, memories, equal forms."""

from __future__ import annotations

import importlib

import pytest
import torch

import clearhead as ch
from clearhead.nn import MultiHeadAttention
from tests.gallery import formulas, formulas_linear, formulas_sparse
from tests.gallery.cases import EMBED, EXACT, FORMULAS, HEADS, LENGTH, build, compare, steps, tokens


def ones(length: int = LENGTH) -> torch.Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.float64)


def test_latent_attention_is_the_same_expanded_and_absorbed() -> None:
    absorbed, expanded = build("latent_attention").double(), build("expanded_latent_attention").double()
    for parameter in expanded.parameters():
        torch.nn.init.zeros_(parameter)
    expanded.load_state_dict(absorbed.state_dict())
    x = tokens()
    for mask in (None, ch.Causal(), ch.Causal() & ch.Padding([LENGTH, 5])):
        torch.testing.assert_close(expanded(x, mask=mask), absorbed(x, mask=mask), atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("name", ["grouped_query_attention", "alibi_attention"])
def test_decoding_with_a_cache_gives_the_whole(name: str) -> None:
    module, x, cache = build(name).double(), tokens(), ch.KVCache()
    with torch.no_grad():
        pieces = [module(x[:, place : place + 1], mask=ch.Causal(), cache=cache) for place in range(LENGTH)]
        expected = module(x, mask=ch.Causal())
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=EXACT, rtol=EXACT)


def test_grouping_takes_the_mean_of_the_heads_of_a_group() -> None:
    kind = importlib.import_module("gallery.grouped_query_attention").GroupedQueryAttention
    heads, x = MultiHeadAttention(EMBED, 4).double(), tokens()
    whole = kind.from_multi_head(heads, 4).double()
    torch.testing.assert_close(whole(x), heads(x), atol=EXACT, rtol=EXACT)
    grouped = kind.from_multi_head(heads, 2).double()
    _, key, value = heads.project(x)
    _, grouped_key, grouped_value = grouped.heads.project(x)
    for many, few in ((key, grouped_key), (value, grouped_value)):
        expected = torch.stack([many[:, 0:2].mean(dim=1), many[:, 2:4].mean(dim=1)], dim=1)
        torch.testing.assert_close(few, expected, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize(("length", "size", "keep", "window"), [(12, 3, 3, 5), (2, 4, 3, 1), (13, 2, 16, 2)])
def test_native_sparse_attention_at_other_sizes(length: int, size: int, keep: int, window: int) -> None:
    module = build("native_sparse_attention", size=size, keep=keep, window=window).double()
    x = tokens(torch.float64, 2, length, EMBED)
    # Shorter than a block there is nothing to compress, and its layers have no gradient.
    with torch.no_grad():
        expected = formulas_sparse.native_sparse_attention(module, x, ones(length).tril())
        torch.testing.assert_close(module(x), expected, atol=EXACT, rtol=EXACT)


def test_a_mixture_of_all_blocks_is_causal_attention() -> None:
    module, x = build("mixture_of_block_attention", size=3, keep=4).double(), tokens()
    torch.testing.assert_close(module(x), module.heads(x, mask=ch.Causal()), atol=EXACT, rtol=EXACT)
    fewer = build("mixture_of_block_attention", size=3, keep=2).double()
    assert not torch.allclose(fewer(x), module(x))
    allowed = ones().tril()
    compare(fewer, fewer, lambda x: formulas_sparse.mixture_of_block_attention(fewer, x, allowed), x)


@pytest.mark.parametrize("depth", [3, 4, 8])
def test_each_fourth_layer_has_no_positions(depth: int) -> None:
    module = build("interleaved_rope", depth=depth, floor=4, strength=0.3, num_kv_heads=HEADS).double()
    assert (module.heads.rotary is None) == (depth % 4 == 0)
    compare(module, module, lambda x: formulas_sparse.interleaved_rope(module, x, ones()), tokens())


@pytest.mark.parametrize("buckets", [2, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_reformer_without_order_and_with_more_buckets(buckets: int, causal: bool) -> None:
    module = build("reformer_attention", causal=causal, buckets=buckets).double()
    allowed = ones().tril() if causal else ones()
    compare(module, module, lambda x: formulas_sparse.reformer_attention(module, x, allowed), tokens())


@pytest.mark.parametrize(("window", "num_global"), [(0, 1), (2, 0), (6, 3), (2, LENGTH + 1)])
def test_longformer_with_other_windows_and_global_tokens(window: int, num_global: int) -> None:
    module = build("longformer_attention", window=window, num_global=num_global).double()
    with torch.no_grad():
        expected = formulas_sparse.longformer_attention(module, tokens(), ones(), window=window)
        torch.testing.assert_close(module(tokens()), expected, atol=EXACT, rtol=EXACT)


def test_big_bird_refuses_more_tokens_than_it_was_made_for() -> None:
    module = build("big_bird_attention", max_len=8)
    with pytest.raises(ch.MaskError, match="must cover"):
        module(tokens(torch.float32))


# Squares that lie within the image, that are as large as it, and larger along one axis.
@pytest.mark.parametrize(("side", "shape"), [(3, (6, 5)), (5, (5, 7)), (5, (3, 9)), (1, (2, 2))])
def test_neighborhood_attention_is_its_formula(side: int, shape: tuple[int, int]) -> None:
    module = build("neighborhood_attention", side=side).double()
    image = tokens(torch.float64, 2, *shape, EMBED)
    compare(module, module, lambda image: formulas_sparse.neighborhood_attention(module, image), image)


@pytest.mark.parametrize("shape", [(4, 6), (1, 5), (5, 1)])
def test_axial_attention_is_its_formula(shape: tuple[int, int]) -> None:
    module = build("axial_attention").double()
    image = tokens(torch.float64, 2, *shape, EMBED)
    compare(module, module, lambda image: formulas_sparse.axial_attention(module, image), image)


@pytest.mark.parametrize("name", ["neighborhood_attention", "axial_attention"])
def test_images_train(name: str) -> None:
    image = tokens(torch.float32, 2, 6, 6, EMBED)
    # Two axial attentions reach any pixel, and a neighborhood those that are near.
    near = image if name == "neighborhood_attention" else 0.0 * image
    target = image.mean(dim=(1, 2), keepdim=True) + 0.5 * near
    first, last = steps(build(name), image, target)
    assert last < 0.6 * first


def test_induced_sets_are_their_formula_in_any_order() -> None:
    module = build("induced_set_attention", num_points=3).double()
    x, lengths = tokens(), torch.tensor([LENGTH, 4])
    real, mask = torch.arange(LENGTH) < lengths[:, None], ch.Padding(lengths)
    compare(module, lambda x: module(x, mask=mask), lambda x: formulas.induced_set_attention(module, x, real), x)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(module(x[:, order]), module(x)[:, order], atol=EXACT, rtol=EXACT)


def test_induced_sets_train() -> None:
    x = tokens(torch.float32, 8, LENGTH, EMBED)
    first, last = steps(build("induced_set_attention"), x, x.mean(dim=1, keepdim=True) + 0.5 * x)
    assert last < 0.6 * first


def test_transformer_xl_reads_its_memory_without_a_gradient() -> None:
    module = build("transformer_xl").double()
    with torch.no_grad():
        module.biases.normal_(generator=torch.Generator().manual_seed(3))
    memory = tokens(torch.float64, 2, 6, EMBED).flip(1).requires_grad_()
    allowed = torch.cat([torch.ones(LENGTH, 6), torch.ones(LENGTH, LENGTH).tril()], dim=1).double()[None, None]
    compare(
        module,
        lambda x: module(x, mask=ch.Causal(), memory=memory),
        lambda x: formulas.transformer_xl(module, x, allowed, memory=memory.detach()),
        tokens(),
    )
    module(tokens(), mask=ch.Causal(), memory=memory).sum().backward()
    assert memory.grad is None


# Chunks of the kernels have 64 tokens.
@pytest.mark.parametrize("name", ["gated_delta_net", "mamba2", "multi_scale_retention"])
@pytest.mark.parametrize("length", [1, 3, 70])
def test_states_are_the_recurrence_at_other_lengths(name: str, length: int) -> None:
    module, x = build(name).double(), tokens(torch.float64, 1, length, EMBED)
    with torch.no_grad():
        expected = FORMULAS[name](module, x, ones(length).tril())
        torch.testing.assert_close(module(x), expected, atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("segment", [1, 5, LENGTH, 64])
def test_infini_attention_at_other_segments(segment: int) -> None:
    module = build("infini_attention", segment=segment).double()
    compare(module, module, lambda x: formulas_linear.infini_attention(module, x, ones().tril()), tokens())


def test_more_random_features_come_nearer_to_the_softmax() -> None:
    x, errors = tokens(), []
    for num_features in (16, 256, 4096):
        module = build("performer", num_features=num_features, seed=1).double()
        exact = MultiHeadAttention(EMBED, HEADS).double()
        exact.load_state_dict({name: tensor for name, tensor in module.heads.state_dict().items() if "." in name})
        with torch.no_grad():
            errors.append((module(x, mask=ch.Causal()) - exact(x, mask=ch.Causal())).abs().mean().item())
    assert errors[2] < 0.5 * errors[1] < 0.25 * errors[0]
